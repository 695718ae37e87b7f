"""The choices on which correct attention libraries differ, and what each parameter name stands for.

An implementation is judged by what it declares, by what its parameter names mean in torch or flash-attn, and, where
neither speaks, by what was measured (layout, value of empty rows, LSE base). Polarity, alignment and grouping are never
taken over from measurement: they are what people get wrong.

| field      | torch SDPA | flash-attn 2 | nn.MultiheadAttention | Hugging Face | keras, jax.nn |
|------------|------------|--------------|-----------------------|--------------|---------------|
| layout     | BHSD       | BSHD         | SBE or BSE            | BHSD, out BSHD | BSHD        |
| polarity   | attend     | no mask      | masked                | attend       | attend        |
| alignment  | top-left   | bottom-right | in the mask           | in the mask  | top-left      |
| empty_rows | zero       | zero         | nan or zero           | mean or zero | mean          |
| grouping   | contiguous | contiguous   | no groups             | contiguous   | contiguous    |
| window     | no windows | pair         | no windows            | count        | pair (jax), count-both (keras) |
| softcap_order | no cap  | first        | no cap                | first        | first         |
| alibi      | no slopes  | distance     | no slopes             | no slopes    | no slopes     |
| lse_base   | none       | e            | none                  | none         | e             |
| scale      | 1/sqrt(d_k) | 1/sqrt(d_k) | 1/sqrt(d_k)           | 1/sqrt(d_k), T5: 1 | 1/sqrt(d_k) |
| lse_empty  | none       | +inf         | none                  | none         | none          |

window: `pair` is (left, right), the keys before and after, its own not counted, no bound where negative or None;
`count` one number, the keys up to its own, that one counted; `count-both` the same in both directions; `left` one
number, its own not counted; `left-both` the same in both directions. window_alignment holds for windows and for the
distances of ALiBi. alibi: `signed` is slope * (j - i), as in flashinfer. lse_empty: of a row with no visible key;
flash-attn 3 gives -inf.

Sources: torch/nn/functional.py and torch/nn/modules/activation.py (2.13), flash_attn/flash_attn_interface.py and
softmax.h (2.8), transformers/masking_utils.py and integrations/sdpa_attention.py (5.x), jax/_src/nn/functions.py,
keras/src/ops/nn.py; the grouping and the torch rows were also run.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

Layout = Literal["BHSD", "BSHD", "SBHD", "NSD", "SD"]
How = Literal["measured", "declared", "assumed"]

CHOICES: dict[str, tuple[str, ...]] = {
    "layout": ("BHSD", "BSHD", "SBHD", "NSD", "SD"),
    "layout_out": ("BHSD", "BSHD", "SBHD", "NSD", "SD"),
    "mask_form": ("both", "bool", "additive"),
    "polarity": ("attend", "masked"),
    "padding_polarity": ("attend", "masked"),
    "alignment": ("top-left", "bottom-right"),
    "causal": ("flag", "always", "never"),
    "empty_rows": ("zero", "mean", "nan"),
    "grouping": ("contiguous", "tiled"),
    "window": ("pair", "count", "count-both", "left", "left-both"),
    "window_alignment": ("top-left", "bottom-right"),
    "softcap_order": ("first", "after-bias"),
    "alibi": ("distance", "signed"),
    "lse_base": ("e", "2", "10", "none"),
    "lse_empty": ("-inf", "+inf"),
    "lse_sinks": ("included", "excluded"),
    "lse_layout": ("BHS", "BSH"),
    "scale": ("1/sqrt(d_k)", "1"),
}

# fields that mean something only where there is a parameter of one of these roles
OF_ROLES: dict[str, tuple[str, ...]] = {
    "window": ("window",),
    "window_alignment": ("window", "alibi"),
    "softcap_order": ("softcap",),
    "alibi": ("alibi",),
    "lse_base": ("lse", "probs"),
    "lse_empty": ("lse", "probs"),
    "lse_sinks": ("sinks",),
    "lse_layout": ("lse", "probs"),
}


@dataclass(frozen=True)
class Meaning:
    """The conventions on which the right answer depends."""

    alignment: Literal["top-left", "bottom-right"] = "top-left"
    empty_rows: Literal["zero", "mean", "nan"] = "zero"
    grouping: Literal["contiguous", "tiled"] = "contiguous"
    scale: Literal["1/sqrt(d_k)", "1"] = "1/sqrt(d_k)"
    window_alignment: Literal["top-left", "bottom-right"] = "top-left"
    softcap_order: Literal["first", "after-bias"] = "first"
    alibi: Literal["distance", "signed"] = "distance"
    lse_sinks: Literal["included", "excluded"] = "included"


@dataclass(frozen=True)
class Finding:
    """One row of the table: what holds, how it is known, and the evidence."""

    value: str
    how: How
    evidence: str

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Conventions:
    """Every field with how it is known. `contradictions` lists what was measured against what is expected."""

    layout: Finding = Finding("BHSD", "assumed", "torch's order")
    layout_out: Finding = Finding("BHSD", "assumed", "as the input")
    causal: Finding = Finding("never", "assumed", "no causal parameter")
    alignment: Finding = Finding("top-left", "assumed", "torch's is_causal")
    mask_form: Finding = Finding("both", "assumed", "a mask may be bool or additive, as in torch's SDPA")
    polarity: Finding = Finding("attend", "assumed", "torch's attn_mask")
    padding_polarity: Finding = Finding("masked", "assumed", "nn.MultiheadAttention's key_padding_mask")
    empty_rows: Finding = Finding("zero", "assumed", "torch's value")
    grouping: Finding = Finding("contiguous", "assumed", "as torch, flash-attn, jax and ONNX do")
    window: Finding = Finding("pair", "assumed", "keys before and after, itself not counted, as in flash-attn")
    window_alignment: Finding = Finding("top-left", "assumed", "as the causal mask")
    softcap_order: Finding = Finding("first", "assumed", "the cap comes before mask and bias, as in flash-attn")
    alibi: Finding = Finding("distance", "assumed", "-slope * |distance|, as in flash-attn")
    lse_base: Finding = Finding("none", "assumed", "no LSE is returned")
    lse_empty: Finding = Finding("-inf", "assumed", "the logarithm of an empty sum")
    lse_sinks: Finding = Finding("included", "assumed", "the sink is a term of the sum")
    lse_layout: Finding = Finding("BHS", "assumed", "as flash-attn returns it; jax's is BSH")
    scale: Finding = Finding("1/sqrt(d_k)", "assumed", "the default of every library but a few, such as T5's 1")

    @property
    def meaning(self) -> Meaning:
        names = [f.name for f in dataclasses.fields(Meaning)]
        return Meaning(**{name: getattr(self, name).value for name in names})

    def rows(self) -> list[tuple[str, Finding]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]

    def to_dict(self) -> dict[str, Any]:
        return {name: dataclasses.asdict(finding) for name, finding in self.rows()}

    def replace(self, **changes: Finding) -> Conventions:
        return dataclasses.replace(self, **changes)


# what parameter names stand for --------------------------------------------------------------------------------------

ROLES: dict[str, tuple[str, ...]] = {
    "q": ("q", "query", "queries", "xq"),
    "k": ("k", "key", "keys", "xk"),
    "v": ("v", "value", "values", "xv"),
    "mask": ("attn_mask", "mask", "attention_mask"),
    "key_padding": ("key_padding_mask", "padding_mask"),
    "bias": ("bias", "attn_bias"),
    "causal": ("is_causal", "causal"),
    "scale": ("scale", "softmax_scale", "sm_scale", "scaling"),
    "dropout": ("dropout_p", "dropout", "p"),
    "seed": ("seed", "dropout_seed", "rng_seed", "random_seed", "philox_seed"),
    "window": ("window_size", "window", "sliding_window", "local_window_size"),
    "softcap": ("softcap", "logits_soft_cap", "attn_logits_soft_cap"),
    "alibi": ("alibi_slopes", "slopes"),
    "sinks": ("sinks", "s_aux", "learnable_sink"),
    "gqa": ("enable_gqa",),
    "lengths": ("packed_lengths",),  # of what `attn_spec.adapters.packed` makes of a packed function
    "k_cache": ("k_cache", "key_cache", "cache_k", "kcache", "paged_k_cache"),  # see `attn_spec.adapters.cached`
    "v_cache": ("v_cache", "value_cache", "cache_v", "vcache", "paged_v_cache"),
    "cache_lengths": (
        *("cache_seqlens", "seq_lens", "context_lens", "cache_lens", "kv_lens", "seqlens_k", "seqused_k"),
        *("cache_lengths", "context_lengths", "sequence_lengths"),
    ),
    "block_table": ("block_table", "block_tables", "page_table", "page_tables"),
    "cache_rows": ("cache_batch_idx", "batch_idx", "cache_rows"),
    "lse": ("return_lse", "return_softmax_lse"),
    "weights": ("need_weights", "return_weights", "return_attn_weights", "output_attentions"),
    "probs": ("return_attn_probs",),  # flash-attn's: the log-sum-exp, and weights that are for testing only
    "ignored": ("deterministic", "training"),
}
ROLE_OF = {name: role for role, names in ROLES.items() for name in names}

# the meaning of a name in the library that made it known: (field, value, where from)
NAMED: dict[str, tuple[tuple[str, str, str], ...]] = {
    "is_causal": (("alignment", "top-left", "`is_causal` is torch's name, and torch aligns to the top left"),),
    "causal": (
        ("alignment", "bottom-right", "`causal` is flash-attn's name, and flash-attn aligns to the bottom right"),
    ),
    "attn_mask": (
        ("polarity", "attend", "`attn_mask` of torch's SDPA: True = may be seen"),
        ("empty_rows", "zero", "torch's SDPA gives zeros for a row with no visible key"),
    ),
    "mask": (("polarity", "attend", "True = may be seen, as in torch's SDPA"),),
    "attention_mask": (("polarity", "attend", "True = may be seen, as in Hugging Face"),),
    "key_padding_mask": (
        ("padding_polarity", "masked", "`key_padding_mask` is nn.MultiheadAttention's name: True = hidden"),
    ),
    "padding_mask": (("padding_polarity", "masked", "as `key_padding_mask`: True = hidden"),),
    "softmax_scale": (("empty_rows", "zero", "flash-attn gives zeros for a row with no visible key"),),
    "window_size": (
        ("window", "pair", "`window_size` is flash-attn's name: (keys before, keys after)"),
        ("window_alignment", "bottom-right", "flash-attn's windows are aligned to the bottom right"),
    ),
    "sliding_window": (
        ("window", "count", "`sliding_window` is Hugging Face's name: a number of keys, its own counted"),
    ),
    "local_window_size": (("window", "pair", "`local_window_size` is jax's name: (keys before, keys after)"),),
    "alibi_slopes": (
        ("alibi", "distance", "`alibi_slopes` is flash-attn's name: -slope * |distance|"),
        ("window_alignment", "bottom-right", "flash-attn's distances are aligned to the bottom right"),
    ),
    "softcap": (("softcap_order", "first", "flash-attn caps before it masks and before it adds slopes"),),
    "return_softmax_lse": (("lse_base", "e", "flash-attn's log-sum-exp is a natural logarithm"),),
    "return_attn_probs": (("lse_base", "e", "flash-attn's log-sum-exp is a natural logarithm"),),
}
