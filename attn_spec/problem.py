"""A problem: one attention computation as data, which makes its own tensors."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from attn_spec import masks, values
from attn_spec.masks import Alibi, Alignment, Causal, Delivery, Form, Lengths, Part, Window
from attn_spec.values import Sizes

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, eq=False)
class Arguments:
    """What one call gets, in one canonical form whatever the implementation's own layout and names.

    q [B, H, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; mask: None, bool (True = may be seen) or additive, of a
    shape that broadcasts to [B, H, Sq, Sk], or a key padding [B, Sk] (True = a real key); scale None: the default.
    window (left, right): how many keys before and after its own position a query sees, None for no bound.
    softcap: logits become softcap * tanh(logits / softcap).  alibi: slopes [H] or [B, H], float32.  sinks: a further
    logit for each head [H], in the denominator alone.  lengths: queries and keys of each sample, where these are packed
    end to end; what stands beyond them is not handed over, and the output there is 0.  returns: "weights" or "lse",
    asked for beside the output.  dropout: the share of weights to drop, None where none is asked for.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    form: Form | None = None
    causal: bool = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    sinks: Tensor | None = None
    lengths: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    returns: str = ""
    dropout: float | None = None

    def replace(self, **changes: Any) -> Arguments:
        return dataclasses.replace(self, **changes)

    def to(self, device: str) -> Arguments:
        """The same arguments on another device."""
        given = {name: getattr(self, name) for name in TENSORS}
        return self.replace(**{name: x.to(device) for name, x in given.items() if x is not None})

    def double(self) -> Arguments:
        """The same numbers in float64, a bool mask as it is."""
        return self.cast(torch.float64)

    def cast(self, dtype: torch.dtype) -> Arguments:
        """The same arguments in another dtype, a bool mask as it is."""
        given = {name: getattr(self, name) for name in TENSORS}
        floating = {name: x for name, x in given.items() if x is not None and x.dtype != torch.bool}
        return self.replace(**{name: x.to(dtype) for name, x in floating.items()})

    def sample(self, n: int) -> Arguments:
        """One of the packed samples, by itself."""
        assert self.lengths is not None
        q_len, kv_len = self.lengths[0][n], self.lengths[1][n]
        q, k, v = self.q[n : n + 1, :, :q_len], self.k[n : n + 1, :, :kv_len], self.v[n : n + 1, :, :kv_len]
        slopes = self.alibi[n : n + 1] if self.alibi is not None and self.alibi.dim() == 2 else self.alibi
        return self.replace(q=q, k=k, v=v, alibi=slopes, lengths=None)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Sq, Sk."""
        return self.q.shape[0], self.q.shape[1], self.q.shape[2], self.k.shape[2]

    @property
    def dtype(self) -> str:
        return str(self.q.dtype).removeprefix("torch.")


TENSORS = ("q", "k", "v", "mask", "alibi", "sinks")  # the fields of `Arguments` that are tensors


@dataclass(frozen=True)
class Problem:
    """One attention computation as data: sizes, dtype, mask and how it is delivered, scale, values, seed.

    Sizes are counts of samples, query heads, key/value heads, queries, keys and channels. sinks: each head has a sink.
    dropout: the share of weights that are dropped.
    Raises ValueError, naming the field, where they do not fit. Equal problems make equal tensors, on every machine.
    """

    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    q_len: int = 7
    kv_len: int = 7
    head_dim: int = 8
    v_dim: int = 8
    dtype: str = "float32"
    mask: tuple[Part, ...] = ()
    delivery: Delivery = field(default_factory=Delivery)
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    values: str = "sharp"
    layout: str = "contiguous"
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "q_len", "kv_len"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is negative; give 0 or more")
        for name in ("heads", "kv_heads", "head_dim", "v_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is too small; give 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} does not divide heads = {self.heads}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.values not in values.VALUES:
            raise ValueError(f"values: {self.values!r} is not one of {', '.join(values.VALUES)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: {self.layout!r} is not one of {', '.join(LAYOUTS)}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap: {self.softcap} is not positive; leave it out for none")
        if not 0 <= self.dropout <= 1:
            raise ValueError(f"dropout: {self.dropout} is not a share; give a number from 0 to 1")
        masks.check(self.mask, self.delivery, self.sizes)

    # what it is

    @property
    def causal(self) -> Causal | None:
        return next((part for part in self.mask if isinstance(part, Causal)), None)

    @property
    def window(self) -> Window | None:
        return next((part for part in self.mask if isinstance(part, Window)), None)

    @property
    def alibi(self) -> Alibi | None:
        return next((part for part in self.mask if isinstance(part, Alibi)), None)

    @property
    def without_variants(self) -> bool:
        """Whether it has none of the variants that a function of q, k, v, mask and scale knows nothing of."""
        return not (self.window or self.alibi or self.softcap or self.sinks or self.lengths)

    @property
    def lengths(self) -> Lengths | None:
        return next((part for part in self.mask if isinstance(part, Lengths)), None)

    @property
    def causal_by_flag(self) -> bool:
        return self.causal is not None and self.delivery.flag

    @property
    def masked(self) -> bool:
        """Whether a mask tensor is handed over."""
        return any(not masks.by_parameter(p, self.delivery) for p in self.mask)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Sq, Sk."""
        return self.batch, self.heads, self.q_len, self.kv_len

    @property
    def sizes_in_full(self) -> tuple[int, ...]:
        """All seven sizes."""
        return self._drawn_sizes

    @property
    def cost(self) -> int:
        """Multiplications of the forward pass, to order problems by size."""
        return self.batch * self.heads * self.q_len * self.kv_len * (self.head_dim + self.v_dim)

    def in_dtypes(self, dtypes: Collection[str]) -> Problem | None:
        """The problem where its dtype is one of these."""
        return self if self.dtype in dtypes else None

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        words = [f"B{self.batch}"]
        words.append(f"H{self.heads}" if self.heads == self.kv_heads else f"H{self.heads}:{self.kv_heads}")
        words.append(f"S{self.q_len}" if self.q_len == self.kv_len else f"Sq{self.q_len}-Sk{self.kv_len}")
        words.append(f"D{self.head_dim}" if self.head_dim == self.v_dim else f"D{self.head_dim}-Dv{self.v_dim}")
        words += [str(part) for part in self.mask]
        if self.masked:
            words.append(str(self.delivery))
        if self.causal is not None and not self.delivery.flag:
            words.append("in-mask")
        if self.scale is not None:
            words.append(f"scale{self.scale:g}")
        if self.softcap is not None:
            words.append(f"softcap{self.softcap:g}")
        if self.sinks:
            words.append("sinks")
        if self.dropout:
            words.append(f"dropout{self.dropout:g}")
        for name, usual in (("values", "sharp"), ("layout", "contiguous"), ("device", "cpu")):
            if getattr(self, name) != usual:
                words.append(str(getattr(self, name)))
        words.append({"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16"}[self.dtype])
        if self.seed:
            words.append(f"seed{self.seed}")
        return "-".join(words)

    # YAML both ways

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML and JSON: the fields that differ from the defaults, sizes always."""
        data: dict[str, Any] = {}
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name == "mask":
                if value:
                    data["mask"] = [{"kind": part.kind, **_fields(part)} for part in value]
            elif f.name == "delivery":
                if value != Delivery():
                    data["delivery"] = _fields(value)
            elif value != f.default or f.name in SIZES:
                data[f.name] = value
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Problem:
        """The problem that `to_dict` gave; ValueError names a key that is unknown or a value that does not fit."""
        known = {f.name for f in dataclasses.fields(cls)}
        for key in data:
            if key not in known:
                raise ValueError(f"{key}: not a field of a problem; the fields are {', '.join(sorted(known))}")
        fields_ = dict(data)
        if "mask" in fields_:
            fields_["mask"] = tuple(_part(part) for part in fields_["mask"])
        if "delivery" in fields_:
            fields_["delivery"] = Delivery(**fields_["delivery"])
        try:
            return cls(**fields_)
        except TypeError as error:
            raise ValueError(f"problem: {error}") from None

    def to_yaml(self) -> str:
        import yaml

        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, text: str) -> Problem:
        import yaml

        data = yaml.safe_load(text)
        if not isinstance(data, dict):
            raise ValueError(f"problem: expected a YAML mapping of fields, got {type(data).__name__}")
        return cls.from_dict(data)

    # its tensors

    def arguments(self, alignment: Alignment = "top-left") -> Arguments:
        """Fresh tensors on the CPU: drawn in float64 from the seed, then cast. `Implementation` moves them.

        `alignment` is the one that a causal part without its own takes when it is rendered into the mask tensor.
        """
        q, k, v = _drawn(self.values, (*self._drawn_sizes,), self.seed)
        dtype = self.torch_dtype
        lay = LAYOUTS[self.layout]
        q, k, v = (lay(x.to(dtype)) for x in (q, k, v))
        if self.layout == "one-key":  # all keys are the first, behind a stride of 0; the values stay
            k = k[:, :, :1].expand(k.shape)
        mask_dtype = DTYPES[self.delivery.dtype] if self.delivery.dtype else dtype
        mask = masks.delivered(self.mask, self.delivery, self.sizes, self.seed, alignment, mask_dtype, dtype)
        form = None if mask is None else self.delivery.form
        dropout = self.dropout or None
        if self.without_variants:
            return Arguments(q, k, v, mask, form, self.causal_by_flag, self.scale, dropout=dropout)
        window, slopes, lengths = self.window, self.alibi, self.lengths
        return Arguments(
            *(q, k, v, mask, form, self.causal_by_flag, self.scale),
            window=None if window is None else (window.left, window.right),
            softcap=self.softcap,
            alibi=None if slopes is None else self._slopes(slopes),
            sinks=values.random_sinks(self.heads, self.seed).to(dtype) if self.sinks else None,
            lengths=None if lengths is None else (lengths.q_lengths, lengths.kv_lengths),
            dropout=dropout,
        )

    def _slopes(self, slopes: Alibi) -> Tensor:
        if slopes.standard:
            return values.standard_slopes(self.heads)
        return values.random_slopes((self.batch, self.heads) if slopes.batched else (self.heads,), self.seed)

    @property
    def _drawn_sizes(self) -> Sizes:
        return self.batch, self.heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim, self.v_dim

    def fingerprint(self) -> str:
        """A hash of the inputs' bytes, so that a replay can tell whether it got the same numbers."""
        digest = hashlib.sha256()
        arguments = self.arguments()
        for tensor in (getattr(arguments, name) for name in TENSORS):
            if tensor is not None:
                raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
                digest.update(bytes(raw.tolist()))
        return digest.hexdigest()[:16]


SIZES = ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim", "v_dim")


FEW = 1 << 14  # numbers of what is kept by the hundreds: 128 KiB in float64; most problems have fewer


def _drawn(kind: str, sizes: Sizes, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    b, h, kv_heads, q_len, kv_len, d, d_v = sizes
    few = b * (h * q_len * d + kv_heads * kv_len * (d + d_v)) <= FEW
    return (_few_drawn if few else _many_drawn)(kind, sizes, seed)


_few_drawn = lru_cache(maxsize=512)(values.draw)
_many_drawn = lru_cache(maxsize=32)(values.draw)


def _contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _transposed(x: Tensor) -> Tensor:
    """Stored as [B, S, H, D], seen as [B, H, S, D]: what comes out of a projection."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _sliced(x: Tensor) -> Tensor:
    """A slice of a larger tensor, with junk on either side in every row."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 6), 1e4, dtype=x.dtype)
    wide[..., 3:-3] = x
    return wide[..., 3:-3]


def _guarded(x: Tensor) -> Tensor:
    """Contiguous in the middle of a storage that is NaN before and after."""
    guard = x.new_full((64,), torch.nan)
    return torch.cat([guard, x.flatten(), guard])[64 : 64 + x.numel()].view(x.shape)


def _stepped(x: Tensor) -> Tensor:
    """Every other channel of a tensor that is twice as wide, with junk in between."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 1e4, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _expanded(x: Tensor) -> Tensor:
    """The first sample for all of them, behind a stride of 0."""
    return x[:1].expand(x.shape)


LAYOUTS = {
    "guarded": _guarded,
    "stepped": _stepped,
    "expanded": _expanded,
    "one-key": _contiguous,
    "contiguous": _contiguous,
    "transposed": _transposed,
    "sliced": _sliced,
}


def _fields(record: Any) -> dict[str, Any]:
    out = {}
    for f in dataclasses.fields(record):
        value = getattr(record, f.name)
        if value != f.default:
            out[f.name] = list(value) if isinstance(value, tuple) else value
    return out


def _part(data: dict[str, Any]) -> Part:
    data = dict(data)
    kind = data.pop("kind", None)
    if kind not in masks.PARTS:
        raise ValueError(f"mask: kind {kind!r} is not one of {', '.join(masks.PARTS)}")
    for name in ("lengths", "empty_rows", "q_lengths", "kv_lengths"):
        if name in data:
            data[name] = tuple(data[name])
    try:
        part: Part = masks.PARTS[kind](**data)
    except TypeError as error:
        raise ValueError(f"mask: {kind}: {error}") from None
    return part
