"""What an implementation can be asked for, by a few small calls: it keeps random problems from being refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from attn_spec.adapters.implementation import Implementation, is_clear
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.masks import Alibi, Bias, Causal, Delivery, Form, KeyPadding, Part, Visible, Window
from attn_spec.problem import Problem

SIMPLE_FIRST = ("float32", "bfloat16", "float16", "float64")
FORMS: tuple[Form, ...] = ("bool", "additive", "key-padding")
MULTIPLES = ((1, 13), (16, 48), (32, 96), (64, 192), (128, 128))  # (a multiple, a number that is one and no larger one)


@dataclass(frozen=True)
class Capabilities:
    """What problems may hold. Without arguments: everything there is but windows, softcap, slopes and sinks.

    dtypes: of q, k and v.  forms: in which a mask tensor is taken.  causal: "flag", "always" or "never" as in the
    conventions.  with_causal: a mask beside the causal flag.  broadcast: masks smaller than [B, H, Sq, Sk].
    bias: an additive mask may hold any numbers.  empty_rows: rows with no visible key.  strided: q, k, v and masks that
    are not contiguous.  scale_edges: a scale of 0 or below.  head_multiple: of d_k, d_v.  length_multiple: of Sq, Sk.
    window: a pair of bounds.
    """

    dtypes: tuple[str, ...] = SIMPLE_FIRST
    grouped: bool = True
    value_width: bool = True
    cross: bool = True
    causal: str = "flag"
    causal_cross: bool = True
    forms: tuple[Form, ...] = FORMS
    with_causal: bool = True
    broadcast: bool = True
    bias: bool = True
    mask_dtype: bool = True
    scale: bool = True
    scale_edges: bool = True
    zero: bool = True
    empty_rows: bool = True
    strided: bool = True
    head_multiple: int = 1
    length_multiple: int = 1
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False

    def but(self, **limits: object) -> Capabilities:
        """These, with some of them set to something else."""
        return dataclasses.replace(self, **limits)  # type: ignore[arg-type]


_known: WeakKeyDictionary[Implementation, Capabilities] = WeakKeyDictionary()


def capabilities(implementation: Implementation) -> Capabilities:
    """What an implementation takes, by about 20 small calls, once. Whether its answers are right does not matter here.

    An axis is given up where it raises something that reads as a refusal, and where what was measured contradicts its
    conventions: that has a check of its own, and would hide everything else.
    """
    if implementation not in _known:
        _known[implementation] = _probed(implementation)
    return _known[implementation]


def _probed(implementation: Implementation) -> Capabilities:
    always = implementation.conventions.causal.value == "always"
    base = Problem(batch=1, q_len=128, kv_len=128, head_dim=64, v_dim=64, mask=(Causal(),) if always else ())

    def takes(problem: Problem) -> bool:
        try:
            implementation(problem.arguments(implementation.conventions.meaning.alignment))
        except Unsupported:
            return False
        except Refused as error:
            return not is_clear(error.error)  # a crash is for the laws to report
        except Violation:
            return True
        return True

    def multiple(*names: str) -> int:
        fits = (m for m, n in MULTIPLES if takes(base.replace(**dict.fromkeys(names, n))))
        return next(fits, 128)

    head, length = multiple("head_dim", "v_dim"), multiple("q_len", "kv_len")
    base = base.replace(head_dim=max(head, 8), v_dim=max(head, 8), q_len=max(length, 6), kv_len=max(length, 6))
    longer = {"kv_len": base.q_len + length}

    def masked(*parts: Part, form: Form = "bool", shape: str = "BHQK", **others: object) -> bool:
        how = Delivery(form, shape if form != "key-padding" else "", **others)  # type: ignore[arg-type]
        return takes(base.replace(mask=(*base.mask, *parts), delivery=how))

    padding, anything = KeyPadding((base.kv_len - 1,)), Visible("BHQK")
    forms = [f for f in FORMS if masked(padding if f == "key-padding" else anything, form=f)]
    full: Form = "bool" if "bool" in forms else "additive"
    flag = not always and takes(base.replace(mask=(Causal(),)))
    contradicted = {one.field for one in implementation.contradictions}
    for name, form in (("polarity", "bool"), ("padding_polarity", "key-padding")):
        forms = [f for f in forms if not (name in contradicted and f == form)]
    tensor = full in forms
    biased = base.replace(mask=(*base.mask, Bias("BHQK")), delivery=Delivery("additive", dtype="float32"))
    # a dtype whose precision was not measured can't be judged
    dtypes = [d for d in SIMPLE_FIRST if d in (implementation.precision or SIMPLE_FIRST)]
    return Capabilities(
        dtypes=tuple(d for d in dtypes if takes(base.replace(dtype=d))) or ("float32",),
        grouped="grouping" not in contradicted and takes(base.replace(heads=4)),
        value_width=takes(base.replace(v_dim=base.v_dim + head)),
        cross=takes(base.replace(**longer)),
        causal="always" if always else "flag" if flag and "causal" not in contradicted else "never",
        causal_cross="alignment" not in contradicted and takes(base.replace(mask=(Causal(),), **longer)),
        forms=tuple(forms),
        with_causal=always or (flag and tensor and masked(Causal(), anything, form=full)),
        broadcast=tensor and masked(Visible("QK"), form=full, shape="QK"),
        mask_dtype="additive" in forms and takes(biased.replace(dtype="bfloat16")),
        scale=takes(base.replace(scale=0.5)),
        scale_edges=takes(base.replace(scale=-0.5)),
        zero=takes(base.replace(q_len=0)) and takes(base.replace(kv_len=0)),
        empty_rows="empty_rows" not in contradicted,
        strided=takes(base.replace(layout="sliced")) and takes(base.replace(layout="transposed")),
        head_multiple=head,
        length_multiple=length,
        window=not contradicted & {"window", "window_alignment"}
        and takes(base.replace(mask=(*base.mask, Window(2, 1)))),
        softcap="softcap_order" not in contradicted and takes(base.replace(softcap=2.0)),
        alibi=not contradicted & {"alibi", "window_alignment"} and takes(base.replace(mask=(*base.mask, Alibi()))),
        sinks=takes(base.replace(sinks=True)),
    )
