"""From a module's class and the sizes of a problem to a module, by the names of the constructor's arguments."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from attn_spec.adapters.implementation import described
from attn_spec.adapters.modules.configs import annotated, beside
from attn_spec.adapters.signature import TargetError

# what the name of a constructor's argument, or of a field of its config, stands for
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": (
        *("hidden_size", "embed_dim", "d_model", "dim", "n_embd", "d_in", "emb_dim", "embedding_dim", "model_dim"),
        *("query_dim", "in_features", "dim_in", "in_dim", "d_embed", "embed_size", "hidden_dim", "width", "n_state"),
        *("channels", "in_channels", "d_hidden", "d_emb", "input_dim", "model_size", "dmodel", "q_dim", "C", "d", "nx"),
        *("features", "num_features", "n_features", "feature_dim", "token_dim", "n_units", "units", "query_size"),
    ),
    "heads": (
        *("num_heads", "n_heads", "heads", "n_head", "num_attention_heads", "nhead", "num_q_heads", "n_q_heads"),
        *(
            "num_query_heads",
            "n_query_heads",
            "query_heads",
            "q_heads",
            "head",
            "nheads",
            "h",
            "nr_heads",
            "num_attn_heads",
        ),
    ),
    "kv_heads": (
        *("num_kv_heads", "num_key_value_heads", "n_kv_heads", "kv_heads", "n_kv_head", "num_kv_groups"),
        *("n_query_groups", "num_query_groups", "n_kv_groups", "nkv_heads"),
    ),
    "head_dim": ("head_dim", "dim_head", "d_head", "head_size", "d_k", "d_kv", "kv_channels", "dim_key", "d_qk"),
    "v_dim": ("d_out_v", "v_head_dim", "dim_value", "value_dim", "d_v", "dim_v", "v_dim"),
    "qk_out": ("d_out_kq", "d_out_qk", "d_kq", "kq_dim", "qk_dim", "dim_qk", "dim_kq"),
    "out": ("d_out", "out_dim", "dim_out", "output_dim", "out_features", "out_channels"),
    "kv_hidden": ("d_context", "context_dim", "kv_dim", "cross_attention_dim", "dim_context", "encoder_dim"),
    "context": (
        *("context_length", "block_size", "max_seq_len", "max_position_embeddings", "n_ctx", "max_len", "seq_len"),
        *("context_size", "max_seq_length", "ctx_len", "max_length", "n_positions", "seq_length", "max_context"),
        *(
            "max_positions",
            "max_seqlen",
            "maxlen",
            "max_position",
            "max_seq",
            "seqlen",
            "sequence_length",
            "num_tokens",
        ),
    ),
    "dropout": (
        *("dropout", "attn_drop", "attention_dropout", "attn_pdrop", "resid_pdrop", "proj_drop", "dropout_p", "p"),
        *("attn_dropout", "attention_probs_dropout_prob", "dropout_rate", "drop_rate", "drop", "embd_pdrop"),
        *("hidden_dropout_prob", "resid_dropout", "residual_dropout", "dropout_prob", "attn_dropout_p", "pdrop"),
    ),
    "bias": ("bias", "qkv_bias", "use_bias", "attention_bias", "out_bias", "proj_bias", "qk_bias"),
    "causal": ("causal", "is_causal", "use_causal_mask", "masked", "causal_mask"),
    "channels": ("rotary_dim", "query_pre_attn_scalar"),  # a number that is usually the channels of a head
    "scale": ("attention_multiplier",),
    "one": ("attention_downsample_rate", "downsample_rate"),  # by which the channels of a head are divided
    "layer": ("layer_idx", "layer_id", "layer_index"),
    "window": ("window", "window_size", "sliding_window", "local_window_size", "attention_window", "window_len"),
}
ROLE_OF = {name: role for role, names in NAMES.items() for name in names}
UNASKED = ("bias", "layer", "out", "kv_hidden", "window")  # fields of a config class that keep their defaults
CONFIGS = ("config", "cfg", "args", "model_args", "conf", "params", "hparams")


@dataclass(frozen=True)
class Sizes:
    """What a module is built for. hidden: channels of the hidden states; kv_hidden: of those that keys are made from.

    cross: whether keys are made from other states than queries, which then have a width of their own.
    reading: how sizes of which the names say too little are read, an index into `READINGS`.
    own_window: the keys that a window of the module's own leaves visible; 0: as many as there are positions.
    layer: which of several that share a cache.
    """

    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int = 8
    context: int = 128
    dropout: float = 0.0
    causal: bool | None = None
    cross: bool = False
    reading: int = 0
    own_window: int = 0
    layer: int = 0

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim + READINGS[self.reading][0]

    @property
    def kv_hidden(self) -> int:
        return self.hidden + 3 * self.cross

    @property
    def out(self) -> int:
        return self.head_dim * (self.heads if READINGS[self.reading][1] == "all heads" else 1)

    @property
    def channels(self) -> int:
        return self.head_dim

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def one(self) -> int:
        return 1

    @property
    def window(self) -> int:
        return self.own_window or self.context

    @property
    def words(self) -> dict[str, int]:
        """What `$hidden` and its like stand for in attn.yaml."""
        names = ("hidden", "heads", "kv_heads", "head_dim", "v_dim", "context", "kv_hidden")
        return {name: int(getattr(self, name)) for name in names}

    def of(self, role: str) -> Any:
        """The value of a constructor's argument of a role."""
        return self.head_dim if role == "qk_out" else True if role == "bias" else getattr(self, role)


# (channels of the hidden states beyond heads * head_dim, what an output size without more in its name counts)
READINGS = ((5, "all heads"), (0, "all heads"), (5, "one head"), (0, "one head"))


class _Named:
    """A config of which each field is answered by its name: attributes, items and `get`."""

    def __init__(self, sizes: Sizes, given: Mapping[str, Any], asked: dict[str, str], parameter: str) -> None:
        self.__dict__.update(given)
        self.__dict__["_attn_spec"] = (sizes, given, asked, parameter)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        sizes, _, asked, parameter = self.__dict__["_attn_spec"]
        role = ROLE_OF.get(name, "")
        if not role or (role == "causal" and sizes.causal is None):
            asked[name] = parameter
            raise AttributeError(f"config has no {name}")
        asked.setdefault(f"+{role}", name)
        return sizes.of(role)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def __contains__(self, name: str) -> bool:
        return hasattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True, eq=False)
class Constructor:
    """How modules of a class (or from a factory) are built.

    make: the class or factory.  declared: the values of `construct:` in attn.yaml.  roles: which roles its arguments,
    or the fields of its config, have; what is not among them is the same for all sizes.
    """

    make: Callable[..., Any]
    name: str
    declared: Mapping[str, Any]

    def parameters(self) -> list[inspect.Parameter]:
        try:
            every = list(inspect.signature(self.make).parameters.values())
        except (TypeError, ValueError):
            raise TargetError(f"{self.name}: its constructor's signature can't be read; name a factory") from None
        return [p for p in every if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    def roles(self) -> set[str]:
        """The roles that can be asked for through the constructor."""
        found = set()
        for p in self.parameters():
            if p.name in self.declared and not _is_built(self.declared[p.name]):
                found |= {word for word in Sizes().words if f"${word}" == self.declared[p.name]}
                continue
            if p.name in CONFIGS:
                found |= self._config_roles(p)
            elif p.name in ROLE_OF and self._is_asked(p):
                found.add(ROLE_OF[p.name])
        return found

    def _is_asked(self, p: inspect.Parameter) -> bool:
        """Whether an argument is given by its role: a window only where there is one unasked, counted in keys."""
        if ROLE_OF[p.name] != "window":
            return True
        number = isinstance(p.default, int) and not isinstance(p.default, bool) and p.default > 0
        return (number or p.default is p.empty) and not self._of_planes

    @property
    def _of_planes(self) -> bool:
        """Whether its window is one of a plane, with a table of relative positions."""
        try:
            return "relative_position" in inspect.getsource(self.make)
        except (OSError, TypeError):
            return False

    def _config_roles(self, p: inspect.Parameter) -> set[str]:
        kind = self._config_class(p)
        if kind is not None:
            return {ROLE_OF[name] for name in _fields(kind) if name in ROLE_OF} - {"bias", "window"}
        asked: dict[str, str] = {}  # what the constructor asks a config for
        sizes = Sizes(causal=False)
        with contextlib.suppress(TargetError):
            self._call({p.name: _Named(sizes, self._given(p.name), asked, p.name)}, sizes, asked)
        return {key[1:] for key in asked if key.startswith("+")}

    def _given(self, parameter: str) -> dict[str, Any]:
        given = self.declared.get(parameter)
        return dict(given) if isinstance(given, Mapping) else {}

    def _config_class(self, p: inspect.Parameter) -> type | None:
        given = self._given(p.name).get("class")
        if given:
            return _imported(str(given), f"{self.name}: construct: {p.name}: class")
        owner = self.make.__init__ if inspect.isclass(self.make) else self.make
        known = getattr(owner, "__globals__", {})
        named = [kind for kind in annotated(p.annotation, known) if _fields(kind)]
        if not named and p.annotation is p.empty and inspect.isclass(self.make):
            named = [kind for kind in beside(self.make.__name__, known) if _fields(kind)]
        whole = [kind for kind in named if any(ROLE_OF.get(field) == "heads" for field in _fields(kind))]
        return next(iter([*whole, *named]), None)  # one of parts, each with a config of its own, has no heads

    def build(self, sizes: Sizes) -> nn.Module:
        """A module for the sizes. Raises TargetError where the constructor needs what names can't give, or raises."""
        asked: dict[str, str] = {}
        values: dict[str, Any] = {}
        for p in self.parameters():
            required = p.default is p.empty
            if p.name in self.declared and not _is_built(self.declared[p.name]):
                values[p.name] = substituted(self.declared[p.name], sizes.words)
            elif p.name in CONFIGS and (required or _is_built(self.declared.get(p.name)) or self._config_class(p)):
                values[p.name] = self._config(p, sizes, asked)
            elif p.name in ROLE_OF and self._is_asked(p):
                role = ROLE_OF[p.name]
                if role == "bias" and not required:
                    continue
                if role == "kv_hidden" and not sizes.cross and not required:
                    continue
                if role == "causal" and sizes.causal is None:
                    if required:
                        values[p.name] = False
                    continue
                values[p.name] = sizes.of(role)
            elif required:
                known = {q.name for q in self.parameters()}
                raise TargetError(
                    f"{self.name}: its constructor requires {p.name!r}, whose meaning can't be told from the name (the "
                    f"arguments are {', '.join(sorted(known))}); give it in attn.yaml: `construct: {{{p.name}: ...}}`"
                )
        unknown = set(self.declared) - {p.name for p in self.parameters()}
        if unknown and not self._takes_any():
            word = sorted(unknown)[0]
            names = [p.name for p in self.parameters()]
            near = difflib.get_close_matches(word, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(names)}"
            raise TargetError(f"{self.name}: construct: {word!r} is no argument of its constructor; {hint}")
        values.update({name: substituted(self.declared[name], sizes.words) for name in unknown})
        return self._call(values, sizes, asked)

    def _takes_any(self) -> bool:
        return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(self.make).parameters.values())

    def _call(self, values: dict[str, Any], sizes: Sizes, asked: dict[str, str]) -> nn.Module:
        full = dict(values)
        if len(values) < len(self.parameters()):  # a trial of the config alone
            for p in self.parameters():
                if p.name not in full and p.default is p.empty and p.name in ROLE_OF:
                    full[p.name] = sizes.of(ROLE_OF[p.name])
        args = [full.pop(p.name) for p in self.parameters() if p.kind is p.POSITIONAL_ONLY]
        try:
            module = self.make(*args, **full)
        except Exception as error:
            missing = next((key for key in asked if not key.startswith("+")), None)
            if missing is not None and missing in str(error):
                raise TargetError(
                    f"{self.name}: its constructor asks {asked[missing]} for {missing!r}, whose meaning can't be told "
                    f"from the name; give it in attn.yaml: `construct: {{{asked[missing]}: {{{missing}: ...}}}}`"
                ) from error
            shown = ", ".join(f"{key}={_shown(value)}" for key, value in full.items() if not isinstance(value, _Named))
            raise TargetError(
                f"{self.name}: its constructor raises {described(error)} (called "
                f"with {shown or 'no argument'}); `construct:` in attn.yaml sets its arguments"
            ) from error
        if not isinstance(module, nn.Module):
            raise TargetError(f"{self.name}: gave a {type(module).__name__}, not an nn.Module")
        return module

    def _config(self, p: inspect.Parameter, sizes: Sizes, asked: dict[str, str]) -> Any:
        kind, given = self._config_class(p), substituted(self._given(p.name), sizes.words)
        given.pop("class", None)
        if kind is None:
            return _Named(sizes, given, asked, p.name)
        values = dict(given)
        for name in _fields(kind):
            role = ROLE_OF.get(name, "")
            if role and role not in UNASKED and name not in values:
                if role == "causal" and sizes.causal is None:
                    continue
                values[name] = sizes.of(role)
        try:
            return kind(**values)
        except Exception as error:
            raise TargetError(
                f"{self.name}: {kind.__name__} raises {type(error).__name__}: {' '.join(str(error).split())}; "
                f"`construct: {{{p.name}: {{...}}}}` in attn.yaml sets its fields"
            ) from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"{type(value).__name__}(...)"


def _is_built(value: Any) -> bool:
    """Whether a declared value is a config to build rather than a plain value."""
    return isinstance(value, Mapping)


def _fields(kind: type) -> list[str]:
    """The names that the constructor of a config class takes."""
    names: list[str] = []
    for owner in kind.__mro__:
        names += [n for n in getattr(owner, "__annotations__", {}) if n not in names]
    with contextlib.suppress(TypeError, ValueError):
        names += [n for n in inspect.signature(kind).parameters if n not in names]
    names += [n for n in getattr(kind, "attribute_map", {}) if n not in names]
    taken = getattr(kind, "attribute_map", {})  # transformers: a general name for the config's own
    return [n for n in names if not (n in taken and taken[n] in names)]


def _imported(name: str, where: str) -> type:
    module, _, attribute = name.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TargetError(f"{where}: {name!r} can't be imported: {error}") from None
    if not inspect.isclass(found):
        raise TargetError(f"{where}: {name!r} is a {type(found).__name__}, not a class")
    return found


def substituted(value: Any, words: Mapping[str, Any]) -> Any:
    """A declared value in which `$hidden` and its like are the sizes in use."""
    if isinstance(value, str) and value.startswith("$") and value[1:] in words:
        return words[value[1:]]
    if isinstance(value, Mapping):
        return {key: substituted(item, words) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [substituted(item, words) for item in value]
    return value


def is_factory(target: Any) -> bool:
    """Whether a function reads as one that makes a module: by its annotation, or by arguments that are sizes."""
    if inspect.isclass(target) or not callable(target):
        return False
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return False
    kind = signature.return_annotation
    if inspect.isclass(kind) and issubclass(kind, nn.Module):
        return True
    if isinstance(kind, str) and "Module" in kind:
        return True
    required = [p.name for p in signature.parameters.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    roles = [ROLE_OF.get(name, "") for name in required if len(name) > 1]
    if not required and getattr(target, "__name__", "").startswith(("make", "build", "create", "new", "get")):
        return True
    return bool(set(roles) & {"hidden", "heads"})


def sizes_of(module: nn.Module, names: Mapping[str, int]) -> Iterator[tuple[str, int, str]]:
    """The sizes that an instance's attributes state: (role, value, attribute), the outermost module first."""
    for role in ("heads", "kv_heads", "head_dim", "hidden", "v_dim"):
        if role in names:
            yield role, names[role], "attn.yaml"
            continue
        for owner in (*module.modules(),):
            holders = (owner, *(getattr(owner, c, None) for c in CONFIGS))
            found = next(
                (
                    (value, name)
                    for holder in holders
                    if holder is not None
                    for name in NAMES[role]
                    if isinstance(value := getattr(holder, name, None), int) and not isinstance(value, bool)
                ),
                None,
            )
            if found is not None:
                yield role, *found
                break
