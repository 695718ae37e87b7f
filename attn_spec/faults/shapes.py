"""Faults of shapes: tails of blocks, lengths and widths taken from the wrong tensor."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from attn_spec.faults.fault import Fault, add, fault
from attn_spec.problem import Arguments

SIZES = (16, 32, 64, 128)


# the last, partial block ---------------------------------------------------------------------------------------------


def _keys_dropped(size: int) -> Fault:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        whole = max(s.shape[-1] // size, 1) * size
        s = s.masked_fill(torch.arange(s.shape[-1]) >= whole, -torch.inf)
        for seen in (visible, past):
            if seen is not None:
                s = s.masked_fill(~seen, -torch.inf)
        return s

    return Fault(
        f"tail-keys-dropped-{size}",
        f"the keys after the last whole block of {size} are dropped",
        {"hide": hide},
        sources=("huggingface/diffusers#8837", "66RING/tiny-flash-attention#12"),
        advice="Round the number of key blocks up, and mask what lies beyond Sk.",
    )


def _short_keys_dropped(size: int) -> Fault:
    def hide(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
        whole = s.shape[-1] // size * size
        s = s.masked_fill(torch.arange(s.shape[-1]) >= whole, -torch.inf)
        for seen in (visible, past):
            if seen is not None:
                s = s.masked_fill(~seen, -torch.inf)
        return s

    return Fault(
        f"short-and-tail-keys-dropped-{size}",
        f"the keys after the last whole block of {size} are dropped, all of them where there are fewer than {size}",
        {"hide": hide},
        sources=("huggingface/diffusers#8837", "OpenNLPLab/lightning-attention#28"),
        advice="Round the number of key blocks up, and mask what lies beyond Sk.",
    )


def _keys_padded(size: int) -> Fault:
    def normalise(s: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(s, (0, -s.shape[-1] % size))
        return torch.softmax(padded, dim=-1)[..., : s.shape[-1]]

    return Fault(
        f"tail-keys-padded-{size}",
        f"the keys are padded with zeros to a multiple of {size}, and the padding is attended to",
        {"normalise": normalise},
        sources=("pytorch/pytorch#159247", "flashinfer-ai/flashinfer#5090", "tenstorrent/tt-metal#6832"),
        advice="Set the logits of padded keys to -inf.",
    )


def _keys_padded_beyond_mask(size: int) -> Fault:
    def arrange(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size)) for x in (k, v))
        return q, k, v

    def arrange_mask(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
        beyond = 0 if mask.shape[-1] == 1 else -k.shape[2] % size
        return torch.nn.functional.pad(mask, (0, beyond), value=0.0 if form == "additive" else True)

    return Fault(
        f"tail-keys-padded-unless-causal-{size}",
        f"the keys are padded with zeros to a multiple of {size}, and attended to unless they count as the future",
        {"arrange": arrange, "arrange_mask": arrange_mask},
        sources=("pytorch/pytorch#159247", "hw-native-sys/simpler#72"),
        advice="Set the logits of padded keys to -inf.",
    )


def _keys_padded_in_place(size: int) -> Fault:
    def heed(a: Arguments) -> Arguments:
        beyond, (left, right) = -a.k.shape[2] % size, a.window or (None, None)
        k, v = (pad(x, (0, 0, 0, beyond)) for x in (a.k, a.v))
        mask = None if a.mask is None else pad(a.mask, (0, beyond), value=float(a.form != "additive"))
        right = right if not a.causal else 0 if right is None else min(right, 0)
        near = (None if left is None else left + beyond, None if right is None else right - beyond)
        return a.replace(k=k, v=v, mask=mask, causal=False, window=None if near == (None, None) else near)

    return Fault(
        f"tail-keys-unmasked-{size}",
        f"the last block of {size} keys is taken for a whole one: zeros beyond the keys are attended to, where the "
        "diagonal at the bottom right or a window does not hide them",
        {"heed": heed},
        sources=("pytorch/pytorch#159247",),
        advice="Set the logits of keys from Sk upwards to -inf, whatever else is hidden.",
    )


def _keys_padded_unmasked(size: int) -> Fault:
    def arrange(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % size)) for x in (k, v))
        return q, k, v

    def arrange_mask(mask: Tensor, form: str | None, q: Tensor, k: Tensor, flag: bool) -> Tensor | None:
        beyond = 0 if mask.shape[-1] == 1 else -k.shape[2] % size
        return torch.nn.functional.pad(mask, (0, beyond), value=-torch.inf if form == "additive" else False)

    return Fault(
        f"tail-keys-padded-unless-masked-{size}",
        f"the keys are padded with zeros to a multiple of {size}, and attended to unless a mask is given or they count"
        " as the future",
        {"arrange": arrange, "arrange_mask": arrange_mask},
        sources=("leejet/stable-diffusion.cpp#736", "pytorch/pytorch#159247"),
        advice="Set the logits of padded keys to -inf, with and without a mask.",
    )


def _queries_dropped(size: int) -> Fault:
    def merge(o: Tensor, q: Tensor) -> Tensor:
        whole = max(o.shape[2] // size, 1) * size
        return o.masked_fill(torch.arange(o.shape[2])[:, None] >= whole, 0.0)

    return Fault(
        f"tail-queries-dropped-{size}",
        f"the queries after the last whole block of {size} get no output",
        {"merge": merge},
        sources=("LMCache/LMCache#3092", "meta-pytorch/attention-gym#50", "triton-lang/triton#1975"),
        advice="Round the number of query blocks up, and store the rows below Sq.",
    )


def _short_queries_dropped(size: int) -> Fault:
    def merge(o: Tensor, q: Tensor) -> Tensor:
        whole = o.shape[2] // size * size
        return o.masked_fill(torch.arange(o.shape[2])[:, None] >= whole, 0.0)

    return Fault(
        f"short-and-tail-queries-dropped-{size}",
        f"the queries after the last whole block of {size} get no output, none of them where there are fewer",
        {"merge": merge},
        sources=("OpenNLPLab/lightning-attention#28", "LMCache/LMCache#3092"),
        advice="Round the number of query blocks up, and store the rows below Sq.",
    )


for _family in (
    _keys_dropped,
    _short_keys_dropped,
    _keys_padded,
    _keys_padded_in_place,
    _keys_padded_beyond_mask,
    _keys_padded_unmasked,
    _queries_dropped,
    _short_queries_dropped,
):
    for _size in SIZES:
        add(_family(_size))


def _channels_dropped(size: int) -> Fault:
    def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
        whole = q.shape[-1] // size * size
        return q[..., :whole] @ k[..., :whole].mT * scale

    return Fault(
        f"tail-channels-dropped-{size}",
        f"the channels of q and k after the last whole {size} are dropped",
        {"score": score},
        sources=("66RING/tiny-flash-attention#12",),
        advice="Load the last, partial vector of channels too.",
    )


for _size in (4, 8, 16, 32):
    add(_channels_dropped(_size))


# off by one ----------------------------------------------------------------------------------------------------------


@fault(
    "hide",
    "the last key is never seen",
    sources=("facebookresearch/xformers#1122", "octo-models/octo#75"),
    advice="Run over all Sk keys.",
)
def last_key_dropped(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    s = s.masked_fill(torch.arange(s.shape[-1]) == s.shape[-1] - 1, -torch.inf)
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


@fault(
    "hide",
    "the first key is never seen",
    sources=("XunhaoLai/native-sparse-attention-triton#18", "octo-models/octo#75"),
    advice="Start at key 0.",
)
def first_key_dropped(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    s = s.masked_fill(torch.arange(s.shape[-1]) == 0, -torch.inf)
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


@fault(
    "merge",
    "the last query gets no output",
    sources=("meta-pytorch/attention-gym#50", "LMCache/LMCache#3092"),
    advice="Run over all Sq queries.",
)
def last_query_dropped(o: Tensor, q: Tensor) -> Tensor:
    return o.masked_fill(torch.arange(o.shape[2])[:, None] == o.shape[2] - 1, 0.0)


# from the wrong tensor -----------------------------------------------------------------------------------------------


@fault(
    "hide",
    "the number of keys is taken from q: keys beyond Sq are not seen",
    sources=("pytorch/pytorch#193728", "AMD-AGI/TraceLens#5", "NVIDIA/FasterTransformer#270"),
    advice="Take the number of keys from k.",
)
def keys_counted_by_queries(s: Tensor, visible: Tensor | None, past: Tensor | None) -> Tensor:
    s = s.masked_fill(torch.arange(s.shape[-1]) >= s.shape[-2], -torch.inf)
    for seen in (visible, past):
        if seen is not None:
            s = s.masked_fill(~seen, -torch.inf)
    return s


@fault(
    "settle",
    "the number of queries is taken from k: queries beyond Sk get no output",
    sources=("AMD-AGI/TraceLens#5", "pytorch/pytorch#193728"),
    advice="Take the number of queries from q.",
)
def queries_counted_by_keys(
    p: Tensor, s: Tensor, visible: Tensor | None, past: Tensor | None, empty_rows: str
) -> Tensor:
    return p.masked_fill(torch.arange(p.shape[-2])[:, None] >= p.shape[-1], 0.0)


@fault(
    "arrange",
    "d_v is taken to be d_k: further channels of v are lost",
    sources=("apple/coreai-torch#117", "NVIDIA/Megatron-LM#1412"),
    advice="Take the channels of the output from v.",
)
def v_channels_counted_by_q(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k, v.masked_fill(torch.arange(v.shape[-1]) >= q.shape[-1], 0.0)


@fault(
    "arrange",
    "every sample reads the keys and values of the first",
    sources=("pytorch/pytorch#150408", "vllm-project/flash-attention#176"),
    advice="Read k and v with their batch stride.",
)
def kv_of_first_sample(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k[:1].expand_as(k), v[:1].expand_as(v)


@fault(
    "merge",
    "every sample gets the output of the first",
    sources=("vllm-project/flash-attention#176",),
    advice="Store the output with its batch stride.",
)
def output_of_first_sample(o: Tensor, q: Tensor) -> Tensor:
    return o[:1].expand_as(o)


@fault(
    "merge",
    "every head gets the output of the first",
    sources=("vllm-project/vllm#41142", "pytorch/pytorch#150408"),
    advice="Store the output with its head stride.",
)
def output_of_first_head(o: Tensor, q: Tensor) -> Tensor:
    return o[:, :1].expand_as(o)


@fault(
    "merge",
    "only the first sample gets an output",
    sources=("vllm-project/flash-attention#176",),
    advice="Run over all samples.",
)
def later_samples_dropped(o: Tensor, q: Tensor) -> Tensor:
    return torch.cat([o[:1], torch.zeros_like(o[1:])])
