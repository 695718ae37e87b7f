"""The numbers of a problem: plain torch, no names of this package, so that a reproducer can carry the source as it is.

Every kind draws q [B, H, Sq, D], k [B, Hkv, Sk, D] and v [B, Hkv, Sk, Dv] in float64 on the CPU, from a seed alone.
They are cast to the dtype of the problem afterwards, so the float32 and the bfloat16 form of a problem are the same
numbers, rounded.
"""

import torch
from torch import Tensor

Sizes = tuple[int, int, int, int, int, int, int]  # B, H, Hkv, Sq, Sk, D, Dv
VALUES = ("sharp", "mild", "large", "shared-key", "deep", "flat", "tiny", "huge", "repeated")


def draw(kind: str, sizes: tuple[int, int, int, int, int, int, int], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v for sizes (B, H, Hkv, Sq, Sk, D, Dv), float64 on the CPU.

    `sharp`: logits of spread 2.5, a decisive key in each block of 16, rows of V of different magnitude.
    `mild`: logits of spread 1.  `large`: logits of spread 60, whose exponentials overflow float32 unless the row
    maximum is taken off.  `shared-key`: as mild, with a component that all keys share (it cancels in the softmax).
    `deep`: as mild, every logit lowered by 30,000 (which cancels too).  `flat`: nearly equal weights.  `tiny`, `huge`:
    as mild, with values of 2^-20 and 2^10 times the size.  `repeated`: as mild, each key twice.
    """
    b, h, hkv, sq, sk, d, dv = sizes
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(b, h, sq, d, generator=g, dtype=torch.float64)
    k = torch.randn(b, hkv, sk, d, generator=g, dtype=torch.float64)
    v = torch.randn(b, hkv, sk, dv, generator=g, dtype=torch.float64)
    q = q * {"sharp": 2.5, "large": 60.0, "flat": 0.05}.get(kind, 1.0)
    v = v * {"tiny": 2.0**-20, "huge": 2.0**10}.get(kind, 1.0)
    if kind == "shared-key":
        k = k + 3.0 * torch.randn(b, hkv, 1, d, generator=g, dtype=torch.float64)
    if kind == "repeated":
        k[:, :, 1::2] = k[:, :, : sk // 2 * 2 : 2]
    if kind == "deep":
        q[..., 0], k[..., 0] = 100.0, -300.0 * d**0.5
    if kind == "sharp" and sq and sk and h:
        for j in sorted({0, sk - 1, *range(15, sk, 16)}):  # the decisive keys: first, last, one in each block
            toward = q[:, :: h // hkv, j * (sq - 1) // max(sk - 1, 1)]
            k[:, :, j] += 9.0 * d**0.5 * toward / toward.square().sum(-1, keepdim=True)
    magnitude = 2.0 ** (torch.arange(sk) % 5 - 2)
    return q, k, v * magnitude[:, None].to(torch.float64)


def random_visible(shape: tuple[int, ...], seed: int, density: float = 0.7, empty_rows: tuple[int, ...] = ()) -> Tensor:
    """A random bool mask [B|1, H|1, Sq|1, Sk], True = may be seen; each row sees a key, but for the empty ones."""
    g = torch.Generator().manual_seed(seed + 7919)
    visible = torch.rand(shape, generator=g, dtype=torch.float64) < density
    if shape[-1]:
        visible.scatter_(-1, torch.randint(shape[-1], (*shape[:-1], 1), generator=g), True)
    for row in empty_rows:
        visible[..., row, :] = False
    return visible


def random_bias(shape: tuple[int, ...], seed: int, spread: float = 2.0) -> Tensor:
    """A random additive bias [B|1, H|1, Sq|1, Sk|1], float64, in units of the logits."""
    g = torch.Generator().manual_seed(seed + 104729)
    return spread * torch.randn(shape, generator=g, dtype=torch.float64)


def random_slopes(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random ALiBi slopes [H] or [B, H] from 1/8 to 1, float32, the dtype that kernels take them in."""
    g = torch.Generator().manual_seed(seed + 15485863)
    return (2.0 ** (-3 * torch.rand(shape, generator=g, dtype=torch.float64))).float()


def standard_slopes(heads: int) -> Tensor:
    """The slopes of ALiBi [H], float32: 2^(-8 h / H) for h = 1 ... H where H is a power of two.

    Elsewhere those of the largest power of two below, then every other one of twice as many.
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-4 * h / below) for h in range(1, 2 * (heads - below), 2)]
    return torch.tensor(slopes)


def random_sinks(heads: int, seed: int) -> Tensor:
    """A random sink logit for each head [H], float64, some of them above the logits of most rows."""
    g = torch.Generator().manual_seed(seed + 32452843)
    return 2.0 + 3.0 * torch.randn(heads, generator=g, dtype=torch.float64)


def same_document(q_lengths: tuple[int, ...], kv_lengths: tuple[int, ...]) -> Tensor:
    """Whether a query and a key stand in the same document [Sq, Sk], documents being laid end to end."""
    n = torch.arange(len(q_lengths))
    of_query, of_key = (n.repeat_interleave(torch.tensor(x)) for x in (q_lengths, kv_lengths))
    return of_query[:, None] == of_key


def padded_keys(lengths: tuple[int, ...], kv_len: int, left: bool = False) -> Tensor:
    """Key padding [B, Sk], True = a real key: the first (or, padded on the left, the last) `lengths[b]` keys."""
    j, n = torch.arange(kv_len), torch.tensor(lengths)[:, None]
    return j >= kv_len - n if left else j < n
