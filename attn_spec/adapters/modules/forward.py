"""What the arguments of a module's forward stand for, by their names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules.construct import substituted
from attn_spec.adapters.signature import TargetError
from attn_spec.conventions import ROLES

INPUTS = (
    *("x", "hidden_states", "hidden", "inputs", "input", "inp", "embeddings", "tokens", "src", "tgt", "x_q", "q_in"),
    *(
        "x_1",
        "x1",
        "query_states",
        "hidden_state",
        "from_tensor",
        "inputs_q",
        "queries_input",
        "input_tensor",
        "feats",
        "features",
    ),
)
CONTEXTS = (
    *("context", "memory", "encoder_hidden_states", "key_value_states", "x_2", "x2", "kv", "y", "cond", "enc"),
    *(
        "encoder_output",
        "encoder_outputs",
        "x_kv",
        "kv_in",
        "cross",
        "ctx",
        "source",
        "encoder_out",
        "inputs_kv",
        "z",
        "key_value",
        "kv_input",
        "kv_states",
        "key_value_input",
        "xa",
        "to_tensor",
        "cross_attention_states",
    ),
)
ROTATIONS = ("position_embeddings", "rotary_pos_emb", "rotary_emb", "freqs_cis", "freqs", "rope")
LENGTHS = (  # LongTensor [B], how many of each sample's keys are real
    *("lengths", "memory_lengths", "src_lengths", "x_lengths", "input_lengths", "valid_lens", "valid_lengths"),
    *("valid_len", "seq_lengths", "context_lengths", "encoder_lengths", "key_lengths", "x_lens", "src_lens"),
)
MORE = {  # further names of forward, beside those of functions
    "mask": ("src_mask", "attn_bias", "tgt_mask", "att_mask", "attention_masks", "m", "masks"),
    "key_padding": (
        *("pad_mask", "key_mask", "kv_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask"),
        *LENGTHS,
    ),
    "weights": ("return_attention", "return_attn", "return_scores", "return_attention_weights", "output_weights"),
}
ZEROS = ("residual", "alibi")  # what is added: to the output, to the scores
PREFIXES = ("prefix_len", "prefix_length", "prefix_lens", "prefix_lengths")  # LongTensor [B], seen by every query
STARTS = ("start_pos", "start_position", "past_length", "pos_offset", "offset")  # the position of the first token
POSITIONS = ("cache_position", "input_pos", "positions", "cache_positions")  # LongTensor [S]
BATCHED = ("position_ids",)  # LongTensor [1, S]
NOTHING = (  # arguments that are left out, or None, when nothing is asked of them
    *(
        "past_key_value",
        "past_key_values",
        "layer_past",
        "kv_cache",
        "cache",
        "use_cache",
        "start_pos",
    ),
    *(*POSITIONS, *BATCHED),
    *("layer_idx", "head_mask", "layer_head_mask", "position_bias", "encoder_attention_mask", "mem"),
)


def role_of(name: str) -> str:
    """The role of an argument of forward beside its inputs; "" where the name says nothing."""
    roles = (
        "mask",
        "key_padding",
        "bias",
        "causal",
        "scale",
        "dropout",
        "weights",
        "lse",
        "window",
        "softcap",
        "sinks",
    )
    for role in (*roles, "alibi"):
        if name in ROLES.get(role, ()) or name in MORE.get(role, ()):
            return role
    return ""


@dataclass(frozen=True, eq=False)
class Forward:
    """The arguments of forward by what they stand for.

    inputs: the one of the hidden states, or the three of query, key and value.  context: of what keys are made from, if
    that can be given.  roles: role -> name, of masks, flags and the like.  fixed: what each call gets (`call:`).
    turned: for how many of a head's channels rotations are given, as a share of them.  complex: whether they go in as
    complex numbers whatever their name.  empty: what is given as None.
    """

    inputs: tuple[str, ...]
    context: str = ""
    context_required: bool = False
    roles: Mapping[str, str] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    rotations: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    turned: float = 1.0
    complex: bool = False
    empty: tuple[str, ...] = ()
    half: bool = False  # whether rotations hold one number for each pair of channels

    @property
    def separate(self) -> bool:
        """Whether query, key and value are given apart."""
        return len(self.inputs) == 3

    @property
    def prefix(self) -> str:
        """The argument that says how many tokens of each sample every query sees; "" where there is none."""
        return next((name for name in PREFIXES if name in (*self.required, *self.left)), "")

    def zeros(self, states: Tensor, batch: int) -> dict[str, Tensor]:
        """What the module adds and its caller must give, as what changes nothing; states: the hidden states."""
        known = {"residual": torch.zeros_like(states), "alibi": states.new_zeros(1, 1, 1)}
        known |= {name: torch.zeros(batch, dtype=torch.long, device=states.device) for name in PREFIXES}
        return {
            name: x for name, x in known.items() if name in self.required and name not in (*self.fixed, *self.empty)
        }

    def extras(
        self,
        x: Tensor,
        length: int,
        head_dim: int,
        words: Mapping[str, Any],
        *,
        start: int | None = None,
        table: int = 0,
    ) -> dict[str, Any]:
        """What each call gets whatever is asked: the declared arguments, and rotations by nothing.

        start: the position of the first token; then rotations are real ones, by the positions from there on.
        table: rotations are given for this many positions from 0 on, [table, head_dim], not for the tokens alone.
        """
        head_dim = int(head_dim * self.turned)
        cos, sin = x.new_ones(1, length, head_dim), x.new_zeros(1, length, head_dim)
        turns = torch.ones(length, head_dim // 2, dtype=torch.complex64)
        if start is not None:
            angles = rotation(range(start, start + length), head_dim)
            turns = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
            angles = rotation(range(table), head_dim) if table else angles
            cos, sin = (y(angles).repeat(1, 2).to(x)[None] for y in (torch.cos, torch.sin))
        if self.half:
            cos, sin = (y[..., : head_dim // 2] for y in (cos, sin))
        if any(name in STARTS for name in (*self.required, *self.defaults)):
            cos, sin = cos[0], sin[0]  # the whole table, of which the module takes the rows from its start on
        known = {
            **words,
            "cos": cos,
            "sin": sin,
            "identity_rotation": (cos, sin),
            "positions": torch.arange(start or 0, (start or 0) + length)[None],
        }
        values: dict[str, Any] = dict.fromkeys(self.empty)
        if "cos" in self.required or "sin" in self.required:
            values |= {name: value for name, value in (("cos", cos), ("sin", sin)) if name in self.required}
        for name in self.rotations:
            if name in ("freqs_cis", "freqs"):
                values[name] = turns
            elif self.complex:
                values[name] = turns[None]
            else:
                values[name] = (cos, sin)
        for name in self.required:
            if name in (*POSITIONS, *BATCHED):
                values[name] = known["positions"] if name in BATCHED else known["positions"][0]
            elif name in NOTHING:
                values[name] = 0 if name in (*STARTS, "layer_idx") else None
        for name, value in self.fixed.items():
            values[name] = _word(value, known)
        return values


def rotation(positions: range, head_dim: int) -> Tensor:
    """The angles by which RoPE turns each pair of channels [S, head_dim / 2], float64."""
    frequency = 10_000.0 ** (-torch.arange(0, head_dim - head_dim % 2, 2, dtype=torch.float64) / head_dim)
    return torch.tensor(positions, dtype=torch.float64)[:, None] * frequency


def _word(value: Any, known: Mapping[str, Any]) -> Any:
    """A declared argument; `$positions` and its like are tensors of the size in use."""
    if isinstance(value, str) and value.startswith("$") and value[1:] in known:
        return known[value[1:]]
    return substituted(value, known)


def read(module: nn.Module, name: str, declared: Mapping[str, Any]) -> Forward:
    """Read forward's signature. Raises TargetError where it takes no input or requires what is not understood."""
    try:
        every = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        raise TargetError(f"{name}: the signature of its forward can't be read") from None
    parameters = [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    fixed = dict(declared.get("call") or {})
    renamed = dict(declared.get("parameters") or {})
    by_name = {parameter: role for role, parameter in renamed.items()}
    _check_names([*fixed, *renamed.values()], parameters, every, name)
    if not parameters:
        gathered = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in every)
        takes = "takes its arguments as *args or **kwargs alone: name them in its signature" if gathered else ""
        raise TargetError(f"{name}: its forward {takes or 'takes nothing; an attention takes hidden states'}")
    inputs, context, context_required = _inputs(parameters, by_name)
    roles: dict[str, str] = {role: parameter for parameter, role in by_name.items() if role not in ("q", "k", "v")}
    rotations, required, left, empty = [], [], [], []
    for p in parameters:
        if p.name in (*inputs, context, *fixed):
            continue
        needed = p.default is p.empty
        role = by_name.get(p.name) or role_of(p.name)
        if role and role not in roles:
            roles[role] = p.name
        if p.name in ROTATIONS and (needed or p.name == "position_embeddings"):  # which transformers needs all the same
            rotations.append(p.name)
        elif needed and not role:
            if _may_be_none(p.annotation) and p.name not in NOTHING:
                empty.append(p.name)
            elif p.name not in ("cos", "sin", *ZEROS, *PREFIXES, *NOTHING):
                raise TargetError(
                    f"{name}: its forward requires {p.name!r}, whose meaning can't be told from the name; give it in "
                    f"attn.yaml: `call: {{{p.name}: ...}}`, or say what it is under `parameters:`"
                )
        elif not role:
            left.append(p.name)
        if needed:
            required.append(p.name)
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    return Forward(
        inputs,
        context,
        context_required,
        roles,
        tuple(required),
        tuple(rotations),
        fixed,
        defaults,
        tuple(left),
        empty=tuple(empty),
    )


def _may_be_none(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return re.search(r"\bOptional\[|\bNone\b", annotation) is not None
    return type(None) in get_args(annotation)


def _check_names(
    given: list[str], parameters: list[inspect.Parameter], every: list[inspect.Parameter], name: str
) -> None:
    known = [p.name for p in parameters]
    for word in given:
        if word not in known and not any(p.kind is p.VAR_KEYWORD for p in every):
            raise TargetError(
                f"{name}: call, parameters: forward has no argument {word!r}; they are {', '.join(known)}"
            )


def _inputs(parameters: list[inspect.Parameter], by_name: Mapping[str, str]) -> tuple[tuple[str, ...], str, bool]:
    """The inputs of forward: (hidden states,) and a context, or (query, key, value)."""
    role = {p.name: by_name.get(p.name) or tensor_role(p.name) for p in parameters}
    triple = [next((n for n, r in role.items() if r == wanted), "") for wanted in ("q", "k", "v")]
    if all(triple):
        return tuple(triple), "", False
    first = next((p.name for p in parameters if p.name in INPUTS), parameters[0].name)
    rest = [p for p in parameters if p.name != first]
    context = next((p for p in rest if p.name in CONTEXTS), None)
    if context is None and rest and rest[0].name == "c" and rest[0].default is inspect.Parameter.empty:
        context = rest[0]
    if context is None and triple[0] and triple[1]:  # query and key, the values from the keys
        context = next(p for p in rest if p.name == triple[1])
    return (first,), context.name if context else "", bool(context and context.default is context.empty)


def tensor_role(name: str) -> str:
    """ "q", "k" or "v" for the name of an input; "" where it says none of them."""
    name = name.lower()
    for role in ("q", "k", "v"):
        if name in (
            *ROLES[role],
            f"{role}_in",
            f"x_{role}",
            f"input_{role}",
            f"{role}_input",
            f"inputs_{role}",
            f"{ROLES[role][1]}_tensor",
        ):
            return role
    return ""
