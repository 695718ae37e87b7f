"""Which parameters of a module project the hidden states to q, k and v, and the heads back: found by their names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor, nn

from attn_spec.adapters.signature import TargetError

NAMES: dict[str, tuple[str, ...]] = {
    "q": (
        *(
            "q_proj",
            "w_query",
            "to_q",
            "w_qs",
            "wqs",
            "query",
            "q",
            "wq",
            "w_q",
            "q_linear",
            "query_proj",
            "linear_q",
            "q_lin",
            "fc_q",
        ),
        *("query_layer", "queries", "query_projection", "proj_q", "q_proj_weight", "q_attn", "lin_q", "weight_q", "qw"),
        *("query_linear", "query_weight", "to_queries", "tq", "q_w", "project_q"),
    ),
    "k": (
        *(
            "k_proj",
            "w_key",
            "to_k",
            "key",
            "k",
            "wk",
            "w_k",
            "k_linear",
            "key_proj",
            "linear_k",
            "k_lin",
            "fc_k",
            "w_ks",
            "wks",
        ),
        *("key_layer", "keys", "key_projection", "proj_k", "k_proj_weight", "k_attn", "lin_k", "weight_k", "kw"),
        *("key_linear", "key_weight", "to_keys", "tk", "k_w", "project_k"),
    ),
    "v": (
        *(
            "v_proj",
            "w_value",
            "to_v",
            "w_vs",
            "wvs",
            "value",
            "v",
            "wv",
            "w_v",
            "v_linear",
            "value_proj",
            "linear_v",
            "v_lin",
            "fc_v",
        ),
        *("value_layer", "values", "value_projection", "proj_v", "v_proj_weight", "v_attn", "lin_v", "weight_v", "vw"),
        *("value_linear", "value_weight", "to_values", "tv", "v_w", "project_v"),
    ),
    "o": (
        *("o_proj", "out_proj", "to_out", "c_proj", "proj", "wo", "w_o", "dense", "out", "fc_out", "out_linear"),
        *("o_linear", "output", "unify", "unifyheads", "unify_heads", "proj_out", "out_lin", "w_out", "o", "fc_o"),
        *("output_proj", "linear_o", "output_linear", "projection", "linear_out", "out_projection", "fc", "o_lin"),
        *("final", "final_linear", "combine", "combine_heads", "output_projection", "w_output", "resid_proj", "wout"),
    ),
    "qkv": (
        *("qkv", "qkv_proj", "c_attn", "in_proj", "to_qkv", "wqkv", "w_qkv", "query_key_value", "in_proj_weight"),
        *("w_pack", "qkv_linear", "attn", "qkv_lin", "fused_qkv", "linear_qkv", "qkv_projection", "proj_qkv", "fc_qkv"),
        *("qkv_weight", "in_linear", "attention", "att_proj"),
    ),
    "kv": ("to_kv", "kv", "kv_proj", "wkv", "w_kv", "kv_linear", "linear_kv", "fc_kv", "key_value", "proj_kv", "c_kv"),
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
# words of a name that say that it is a projection, and not of what
BESIDE = {"proj", "projection", "projector", "linear", "lin", "layer", "w", "weight", "weights", "fc", "to", "map"}
BESIDE |= {"transform", "dense", "kernel", "matrix", "mat", "net", "mapping", "mlp", "conv", "c", "in"}
MEANT = {"q": "q", "query": "q", "queries": "q", "k": "k", "key": "k", "keys": "k", "v": "v", "value": "v"}
MEANT |= {"values": "v", "val": "v", "o": "o", "out": "o", "output": "o", "qkv": "qkv", "kv": "kv"}
ROWS = ("linears", "linear_layers", "projections", "projs", "layers", "linear")  # of q, k, v and o, by number
BIASES = {  # a bare parameter that is added to what a projection gives
    "q": ("b_query", "b_q", "bq", "q_bias", "query_bias", "bias_q", "qb", "q_b"),
    "k": ("b_key", "b_k", "bk", "k_bias", "key_bias", "kb", "k_b"),
    "v": ("b_value", "b_v", "bv", "v_bias", "value_bias", "vb", "v_b"),
    "o": ("b_out", "b_o", "bo", "o_bias", "out_bias", "output_bias", "ob", "o_b"),
    "qkv": ("in_proj_bias", "b_qkv", "qkv_bias", "bqkv"),
    "kv": ("b_kv", "kv_bias", "bkv"),
}
GATES = (  # of the logits of a gate on the heads' outputs
    *("g", "gate", "g_proj", "gate_proj", "linear_g", "to_gate", "to_gates", "wg", "w_g", "w_gate", "gating", "gates"),
    *("gate_linear", "linear_gate", "output_gate", "out_gate", "attn_gate", "g_linear", "fc_gate", "gate_layer"),
)


@dataclass(frozen=True, eq=False)
class Projection:
    """One projection: its role, its weight by name and its bias; head: of which one, where each has its own."""

    role: str
    name: str
    weight: Tensor
    bias: Tensor | None = None
    head: int | None = None


@dataclass(frozen=True, eq=False)
class Projections:
    """The projections of a module. Empty: none was found, and the module is judged as a black box.

    gate: that of the logits of a gate on the heads' outputs, of role "g".
    """

    found: tuple[Projection, ...] = ()
    missing: tuple[str, ...] = ()
    gate: Projection | None = None

    def of(self, *roles: str) -> list[Projection]:
        return [p for p in self.found if p.role in roles]

    @property
    def whole(self) -> bool:
        """Whether q, k and v all have one."""
        return bool(self.found) and not self.missing

    @property
    def single_heads(self) -> int:
        """How many heads have projections of their own; 0 where all share one."""
        heads = [p.head for p in self.found if p.head is not None]
        return max(heads) + 1 if heads else 0

    def __str__(self) -> str:
        shown: dict[str, str] = {}
        for p in self.found:
            key = re.sub(r"\b\d+\b", "*", p.name) if p.head is not None else p.name
            shown.setdefault(p.role, key)
        return ", ".join(f"{role} = {name}" for role, name in shown.items()) or "none found"


def find(module: nn.Module, declared: Mapping[str, str] | None = None) -> Projections:
    """The projections of a module by the names of its parameters, or as declared; {}: it has none that count.

    Raises TargetError where a declared one does not exist.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    if declared == {}:
        return Projections()
    named = [_declared(module, parameters, role, name) for role, name in (declared or {}).items()]
    if named and not _complete(named).missing:
        return _complete(named)
    by_place: dict[tuple[str, int | None], dict[str, Projection]] = {}
    rows = _in_a_row(parameters)
    for name, weight in parameters.items():
        role, place, head = _role(name) if name not in rows else (rows[name], name.rpartition(".")[0][:-2], None)
        if role and (weight.dim() in (2, 3) or is_pointwise(weight)) and not name.endswith("bias"):
            group = by_place.setdefault((place, head), {})
            group.setdefault(role, Projection(role, name, weight, _bias(parameters, name, role), head))
    given = {p.role for p in named}
    by_place = dict(_as_block(*item) for item in by_place.items())
    found = _complete([*named, *(p for p in _chosen(by_place) if p.role not in given)])
    return replace(found, gate=_gate(parameters)) if found.whole else found


def _gate(parameters: Mapping[str, Tensor]) -> Projection | None:
    """The projection of a gate, where one parameter has the name of one."""
    named = [
        name
        for name, weight in parameters.items()
        if weight.dim() == 2 and name.removesuffix(".weight").rpartition(".")[2].lower() in GATES
    ]
    if len(named) != 1:
        return None
    name = named[0]
    return Projection("g", name, parameters[name], parameters.get(f"{name.removesuffix('.weight')}.bias"))


def is_pointwise(weight: Tensor) -> bool:
    """Whether this is the weight [out, in, 1, ...] of a convolution over pixels that is a projection of each."""
    return weight.dim() > 3 and set(weight.shape[2:]) == {1}


def _as_block(
    place: tuple[str, int | None], group: dict[str, Projection]
) -> tuple[tuple[str, int | None], dict[str, Projection]]:
    """A numbered place with an output projection of its own is one of several modules in a row, and no head."""
    if place[1] is None or "o" not in group:
        return place, group
    own = f"{place[0]}.{place[1]}".lstrip(".")
    return (own, None), {role: replace(p, head=None) for role, p in group.items()}


def _in_a_row(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Linears that stand in a list, of which the first three are those of q, k and v and the fourth is the output's.

    "linears.0.weight" -> q, "linears.3.weight" -> o; "linear_layers.2.weight" -> v beside an output of its own.
    """
    found: dict[str, str] = {}
    for row in ROWS:
        names = [
            n
            for n in parameters
            if n.split(".")[-3:-2] == [row] and n.endswith(".weight") and n.split(".")[-2].isdigit()
        ]
        if len(names) in (3, 4):
            found |= dict(zip(sorted(names), "qkvo", strict=False))
    return found


@lru_cache(maxsize=1024)
def _role(name: str) -> tuple[str, str, int | None]:
    """The role of a parameter by its name, where it stands, and the head that it is of, if it is of one.

    "self.query.weight" -> q, "self"; "to_out.0.weight" -> o; "heads.1.W_key" -> k, "heads", head 1.
    """
    parts = name.split(".")
    if parts[-1] in ("weight", "kernel"):
        parts = parts[:-1]
    if (
        len(parts) > 1
        and parts[-1].isdigit()
        and ROLE_OF.get(parts[-2].lower(), "") in ("o", "qkv", "q", "k", "v", "kv")
    ):
        parts = parts[:-1]  # nn.Sequential(linear, dropout)
    if not parts:
        return "", "", None
    role = _meant(parts[-1])
    if role == "o" and parts[-1] == "dense" and len(parts) > 1 and parts[-2] in ("intermediate", "pooler"):
        role = ""
    if len(parts) > 1 and not role:  # output.dense
        role = ROLE_OF.get(".".join(parts[-2:]).lower(), "")
    number = next((n for n, part in enumerate(parts[:-1]) if part.isdigit()), None)
    if number is not None:
        return role, ".".join(parts[:number]), int(parts[number])
    return role, ".".join(parts[:-1]), None


def _meant(word: str, beside: set[str] = BESIDE) -> str:
    """The role that one word of a name says, by its list or where all its other parts only say that it projects."""
    if beside is BESIDE and word.lower() in ROLE_OF:
        return ROLE_OF[word.lower()]
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", word)]
    left = [part for part in parts if part not in beside]
    return MEANT.get(left[0], "") if len(left) == 1 and len(parts) > 1 else ""


def _bias(parameters: Mapping[str, Tensor], name: str, role: str) -> Tensor | None:
    stem = name.removesuffix(".weight")
    if name.endswith(".weight") and f"{stem}.bias" in parameters:
        return parameters[f"{stem}.bias"]
    place, _, own = name.rpartition(".")
    weight = parameters[name]
    before = f"{place}." if place else ""
    if own == "q_proj_weight":
        return None
    for other in BIASES[role]:
        for spelt in (other, other.capitalize(), other[0] + other[1:].upper()):
            if f"{before}{spelt}" in parameters:
                return parameters[f"{before}{spelt}"]
    added = {"b", "bias", *BESIDE} - {"w", "weight", "weights"}
    for near, parameter in parameters.items():  # out_b beside out_w
        last = near[len(before) :]
        beside = near.startswith(before) and "." not in last and parameter.dim() < weight.dim()
        if beside and _meant(last, added) == role:
            return parameter
    return None


def _chosen(by_place: dict[tuple[str, int | None], dict[str, Projection]]) -> list[Projection]:
    """The place with the most of q, k and v; an output projection from anywhere, preferably beside them."""

    def worth(group: dict[str, Projection]) -> int:
        return len({"q", "k", "v"} & set(group)) + 3 * ("qkv" in group) + 2 * ("kv" in group)

    lists: dict[str, list[dict[str, Projection]]] = {}
    for (place, _), group in by_place.items():
        lists.setdefault(place, []).append(group)
    if not lists:
        return []
    place = max(lists, key=lambda p: worth(lists[p][0]))
    if not worth(lists[place][0]):
        return []
    found = [p for group in lists[place] for role, p in group.items() if role != "o" or len(lists[place]) == 1]
    if any(p.role == "qkv" for p in found):
        found = (
            [p for p in found if p.role not in ("q", "k", "v", "kv")]
            if not _separate(found)
            else [p for p in found if p.role != "qkv"]
        )
    if any(p.role == "kv" for p in found):
        found = [p for p in found if p.role not in ("k", "v")]
    if not any(p.role == "o" for p in found):
        near = [
            g["o"] for key, groups in lists.items() for g in groups if "o" in g and g["o"].head is None and key != place
        ]
        found += near[:1]
    return found


def _separate(found: list[Projection]) -> bool:
    return {"q", "k", "v"} <= {p.role for p in found}


def _complete(found: list[Projection]) -> Projections:
    roles = {p.role for p in found}
    covered = roles | ({"q", "k", "v"} if "qkv" in roles else set()) | ({"k", "v"} if "kv" in roles else set())
    missing = tuple(role for role in "qkv" if role not in covered)
    return Projections(tuple(found), missing)


def _declared(module: nn.Module, parameters: Mapping[str, Tensor], role: str, name: str) -> Projection:
    if role not in NAMES:
        raise TargetError(f"projections: {role!r} is not one of {', '.join(NAMES)}")
    for full in (name, f"{name}.weight", f"{name}.0.weight"):
        if full in parameters:
            return Projection(role, full, parameters[full], _bias(parameters, full, role))
    near = difflib.get_close_matches(name, [*parameters, *(n.removesuffix(".weight") for n in parameters)], n=1)
    hint = f"did you mean {near[0]}?" if near else f"the parameters are {', '.join(parameters)}"
    raise TargetError(f"projections: {role}: the module has no parameter {name!r}; {hint}")
