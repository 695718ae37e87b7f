"""A module with a cache, token by token: which way it keeps one, and the procedure that decodes with it.

object     an object that `update(k, v, layer)` writes to, given at each call: transformers' caches
returned   keys and values that come back beside the output and are given to the next call: `layer_past`, `cache=(k, v)`
inside     kept by the module itself once `use_cache=True` is said, until a method empties it
built      a submodule that `build_kv_cache` makes, written to at `input_pos`
positions  buffers of the module that are written to at `start_pos` or `input_pos`, whatever is asked
always     kept by the module itself at every call, whatever is asked, until a method empties it

Which one it is, is read off names; `cache:` in attn.yaml says what they can't.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.implementation import described
from attn_spec.adapters.modules.construct import Sizes, substituted
from attn_spec.adapters.modules.forward import BATCHED, MORE, POSITIONS, STARTS
from attn_spec.conventions import ROLES, Finding
from attn_spec.law import Unsupported, Violation

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

PARAMETERS = (
    *("past_key_values", "past_key_value", "layer_past", "past_kv", "kv_cache", "cache", "past", "kv_caches"),
    *("key_value_cache", "past_kvs", "prev_kv", "past_states", "layer_cache"),
)
SWITCHES = ("use_cache",)
RESETS = ("reset_cache", "reset_kv_cache", "clear_cache", "clear_kv_cache", "empty_cache", "reset")
BUFFERS = ("cache_k", "k_cache", "key_cache", "kv_cache", "cache_kv", "cache", "cached_keys", "cached_k")
SHORT = 2  # keys of a window of the module's own, in sessions: prompts are longer
MASKS = (*ROLES["mask"], *MORE["mask"])


@dataclass(frozen=True)
class Protocol:
    """How a module keeps its cache.

    kind: see above.  parameter: the argument that takes it.  switches: what each cached call gets besides.
    reset: the method that empties it.  made_of: the dotted name of the class of an object, "" for one of ours;
    arguments: what that class is given.  mask: the argument that must hide what is not filled, for `built`.
    """

    kind: str
    parameter: str = ""
    switches: tuple[str, ...] = ()
    reset: str = ""
    made_of: str = ""
    arguments: Mapping[str, Any] | None = None
    mask: str = ""
    declared: bool = False


def protocol_of(f: ModuleFunction) -> Protocol | None:
    """How the module keeps a cache; None where nothing says that it keeps one."""
    module, names = f.module, list(inspect.signature(f.module.forward).parameters)
    told = dict(f.declared.get("cache") or {})
    switches = tuple(name for name in SWITCHES if name in names)
    reset = reset_of(f)
    mask = next((name for name in MASKS if name in names), "")
    parameter = str(told.get("parameter") or next((name for name in PARAMETERS if name in names), ""))
    made_of, kept = str(told.get("class") or ""), any(hasattr(module, name) for name in BUFFERS)
    kind = str(told.get("kind") or "")
    if kind:
        parameter = parameter if kind in ("object", "returned") else ""
    elif parameter and _of_transformers(module):
        kind, made_of = "object", made_of or "transformers.DynamicCache"
    elif parameter:
        kind = "object" if made_of or _used_as_object(module, parameter) else "returned"
    elif callable(getattr(module, "build_kv_cache", None)) and hasattr(module, "kv_cache"):
        kind = "built"
    elif switches and (reset or kept):
        kind = "inside"
    elif kept and any(name in names for name in (*STARTS, *POSITIONS)):
        kind = "positions"
    elif f.resets:
        kind = "always"
    else:
        return None
    return Protocol(kind, parameter, switches, reset, made_of, told.get("arguments"), mask, declared=bool(told))


def reset_of(f: ModuleFunction) -> str:
    """The method that empties the cache of a module; "" where there is none."""
    told = (f.declared.get("cache") or {}).get("reset")
    return str(told or next((name for name in RESETS if callable(getattr(f.module, name, None))), ""))


def has_switch(f: ModuleFunction) -> bool:
    """Whether an argument of forward says that a cache is used, or where."""
    return bool({*SWITCHES, *PARAMETERS, *STARTS, *POSITIONS} & set(inspect.signature(f.module.forward).parameters))


def keeps_inside(f: ModuleFunction) -> bool:
    """Whether calls write to a cache in the module whatever is asked: it is for one sequence at a time."""
    found = protocol_of(f)
    return found is not None and found.kind in ("always", "positions")


def names_of(f: ModuleFunction) -> set[str]:
    """The arguments of forward that only calls with a cache are given."""
    found = protocol_of(f)
    return set() if found is None else {found.parameter, *found.switches, *STARTS, *POSITIONS, *BATCHED}


def facts(f: ModuleFunction) -> list[tuple[str, Finding]]:
    """How it keeps a cache, for the table of `describe`; nothing where it keeps none."""
    found = protocol_of(f)
    if found is None:
        return []
    words = [found.parameter, *found.switches, f"{found.reset}()" if found.reset else "", found.made_of]
    evidence = ", ".join(word for word in words if word) or "its attributes and arguments"
    return [("cache", Finding(found.kind, "declared" if found.declared else "assumed", evidence))]


def _of_transformers(module: nn.Module) -> bool:
    return any(owner.__module__.startswith("transformers.") for owner in type(module).__mro__)


def _used_as_object(module: nn.Module, parameter: str) -> bool:
    """Whether forward calls methods of what it is given."""
    try:
        source = inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
    return bool(re.search(rf"\b{parameter}\.(update|get_seq_length|get_usable_length)\(", source))


class Grown:
    """A cache that grows, for modules that call `update`: keys and values [B, Hkv, S, D] of each layer."""

    def __init__(self) -> None:
        self.layers: dict[Any, tuple[Tensor, Tensor]] = {}

    def update(self, k: Tensor, v: Tensor, layer_idx: Any = 0, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self.layers:
            old_k, old_v = self.layers[layer_idx]
            k, v = torch.cat([old_k, k], dim=-2), torch.cat([old_v, v], dim=-2)
        self.layers[layer_idx] = k, v
        return k, v

    def get_seq_length(self, layer_idx: Any = 0) -> int:
        return self.layers[layer_idx][0].shape[-2] if layer_idx in self.layers else 0


class Session:
    """A copy of a module, sequences that are decoded with it one after the other, and calls without a cache.

    capacity: the positions that a cache of fixed length is made for.
    """

    def __init__(self, f: ModuleFunction, protocol: Protocol, sizes: Sizes, x: Tensor, capacity: int) -> None:
        self.behind = protocol.kind == "object" and not protocol.made_of and "layer" in f.roles  # another layer
        sizes = replace(sizes, layer=1) if self.behind else sizes
        self.f, self.protocol, self.sizes, self.capacity = f, protocol, sizes, capacity
        self.module = copy.deepcopy(f.built(sizes, x.dtype))
        self.names = list(inspect.signature(self.module.forward).parameters)
        self.batch, self.dtype, self.begun = len(x), x.dtype, False
        self.cache: Any = None
        self.context: Tensor | None = None  # of which the keys are made, where they are not the module's own sequence

    def uncached(self, x: Tensor, named: Mapping[str, Any]) -> Tensor:
        """The output [B, S, width] of one call without a cache."""
        if self.protocol.kind == "always":
            self._begin(len(x))
        return self._output(self._call(x, named, 0, x.shape[1], {}))

    def decode(self, x: Tensor, cuts: Sequence[int], named: Sequence[Mapping[str, Any]]) -> Tensor:
        """A new sequence in parts, each in a call of its own with the cache of those before [B, S, width].

        named: the arguments of forward for each part. Raises Violation where a later part raises, Unsupported where
        the first does and nothing was declared.
        """
        self._begin(len(x))
        outputs = []
        for start, stop, more in zip(cuts, cuts[1:], named, strict=False):
            try:
                cache = self._cache_arguments(len(x), stop - start)
                returned = self._call(x[:, start:stop].contiguous(), more, start, stop, cache)
            except (Unsupported, Violation):
                raise
            except Exception as error:
                raise self._explained(error, start, stop) from None
            if self.protocol.kind == "returned":
                self.cache = self._handed_back(returned)
            outputs.append(self._output(returned))
        return torch.cat(outputs, dim=1)

    def _begin(self, batch: int) -> None:
        """Whatever begins a new sequence: a new cache, or the one that is there emptied."""
        kind, first = self.protocol.kind, not self.begun
        self.begun = True
        if kind == "object":
            self.cache = self._made(batch)
        elif kind == "returned":
            self.cache = None
        elif kind == "built":
            self.module.kv_cache = self.module.build_kv_cache(batch, self.capacity, dtype=self.dtype)  # type: ignore[operator]
        if self.protocol.reset and (not first or kind == "always"):
            getattr(self.module, self.protocol.reset)()

    def _made(self, batch: int) -> Any:
        if not self.protocol.made_of:
            return Grown()
        module, _, name = self.protocol.made_of.replace(":", ".").rpartition(".")
        try:
            kind = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise Unsupported(f"cache: {self.protocol.made_of!r} can't be imported: {error}") from None
        words = {**self.sizes.words, "batch": batch, "capacity": self.capacity}
        return kind(**substituted(self.protocol.arguments or {}, words))

    def _cache_arguments(self, batch: int, new: int) -> dict[str, Any]:
        given: dict[str, Any] = dict.fromkeys(self.protocol.switches, True)
        if self.behind:
            s = self.sizes
            k, v = (torch.full((batch, s.kv_heads, new, d), 3.0, dtype=self.dtype) for d in (s.head_dim, s.v_dim))
            self.cache.update(k, v, 0)  # the layer before has run already
        if self.protocol.parameter:
            given[self.protocol.parameter] = self.cache
        return given

    def _call(self, x: Tensor, named: Mapping[str, Any], start: int, stop: int, cache: Mapping[str, Any]) -> Any:
        """Call forward on the tokens from `start` to `stop`, of which x [B, S, width] are the hidden states."""
        f, forward = self.f, self.f.forward
        laid = x.transpose(0, 1).contiguous() if f.input == "SBD" else x
        inputs = dict.fromkeys(forward.inputs, laid)
        if self.context is not None:
            inputs[forward.context] = self.context.transpose(0, 1) if f.input == "SBD" else self.context
        table = stop if any(name in self.names for name in STARTS) else 0
        whole = max(table, self.capacity) if table else 0
        given = forward.extras(x, stop - start, self.sizes.head_dim, self.sizes.words, start=start, table=whole)
        given |= forward.zeros(laid, len(x))
        given |= {name: value for name, value in named.items() if not (value is None and name in forward.defaults)}
        by_position = self.protocol.kind == "positions" or bool(cache) or self.protocol.kind == "built"
        decoding = (
            bool(cache) or self.protocol.kind == "positions" or getattr(self.module, "kv_cache", None) is not None
        )
        if by_position and decoding:
            at = torch.arange(start, stop, device=x.device)
            given |= {name: start for name in STARTS if name in self.names}
            given |= {name: at for name in POSITIONS if name in self.names}
            given |= {name: at[None] for name in BATCHED if name in self.names}
        if self.protocol.kind == "built" and decoding and self.protocol.mask:
            given[self.protocol.mask] = self._over_capacity(given.get(self.protocol.mask), start, stop)
        if f.by_mask:
            mask = given.get(f.forward.roles["mask"])
            if mask is not None and mask.dim() == 4 and len(mask) == 1:  # some of transformers' look at the batch size
                given[f.forward.roles["mask"]] = mask.expand(len(x), -1, -1, -1)
            given = f._causal_mask(given, x[:, None], stop - start, stop)
        return self.module(**inputs, **{**given, **cache})

    def _over_capacity(self, mask: Tensor | None, start: int, stop: int) -> Tensor:
        """Which slots of the whole cache the tokens see [1 or B, 1, S, capacity], True = seen."""
        past = torch.ones(self.capacity, self.capacity, dtype=torch.bool).tril()[start:stop]
        if mask is None:
            return past[None, None]
        wide = torch.zeros(*mask.shape[:-1], self.capacity, dtype=torch.bool)
        wide[..., : mask.shape[-1]] = mask if mask.dtype == torch.bool else mask > -1
        return wide & past

    def _output(self, returned: Any) -> Tensor:
        out = self.f.tensors(returned)[0].detach()
        return out.transpose(0, 1) if self.f.input == "SBD" else out

    def _handed_back(self, returned: Any) -> Any:
        """The keys and values that came beside the output.

        Raises Violation where there are none though they were asked for, Unsupported where nothing asks for them.
        """
        values = list(returned.values()) if isinstance(returned, Mapping) else returned
        rest = list(values[1:]) if isinstance(values, (tuple, list)) else []
        kept = [x for x in rest if x is not None and not isinstance(x, (Tensor, int, float, str))]
        kept += [x for x in rest if isinstance(x, Tensor) and x.dim() >= 4]
        if kept:
            return kept[0]
        if self.protocol.switches or self.protocol.declared:
            raise Violation("asked for its cache, it gives none back beside the output", merge="cache-not-returned")
        raise Unsupported("gives no keys and values back beside the output; `call:` in attn.yaml asks it for them")

    def _explained(self, error: Exception, start: int, stop: int) -> Exception:
        """What an exception in a call with a cache is: a failure, unless our guess of the protocol may be wrong."""
        text = described(error)
        if not self.protocol.declared and (start == 0 or Grown.__name__ in text):
            return Unsupported(f"its cache could not be used: {text}; `cache:` in attn.yaml says how")
        what = f"the token {start}" if stop - start == 1 else f"the tokens {start} to {stop - 1}"
        return Violation(
            f"{what} with the {start} before in the cache: raises {text}",
            evidence={"raised": text, "tokens": [start, stop]},
            hint="a call with a cache has fewer queries than keys: its mask has S rows and len(cache) + S columns",
            merge="decoding-raises",
        )


def decode(f: ModuleFunction, plan: Sequence[Mapping[str, Any]], *, sizes: Sizes, capacity: int) -> list[Tensor]:
    """Calls and sequences, one after the other, with one copy of a module; their outputs [B, S, width].

    plan: each with `x` [B, S, width] and `named`; a sequence also with `cuts`, and then `named` for each part; where
    keys are made from a context also that, `context` [B, Sk, width].
    A procedure of `Implementation.perform`. Raises Unsupported where the module keeps no cache.
    """
    protocol = protocol_of(f)
    if protocol is None:
        raise Unsupported("it takes no cache")
    session = Session(f, protocol, sizes, plan[0]["x"], capacity)
    outputs = []
    with torch.no_grad():
        for item in plan:
            session.context = item.get("context")
            if "cuts" in item:
                outputs.append(session.decode(item["x"], item["cuts"], item["named"]))
            else:
                outputs.append(session.uncached(item["x"], item["named"]))
    return outputs
