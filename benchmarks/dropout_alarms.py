"""How often the laws of dropout accuse what is right, on many seeds: never is what they promise.

    python benchmarks/dropout_alarms.py [--repetitions 200] [--only sdpa,counter]

Every check of the theme on `quick`, as often as is said, each time with other seeds: of q and k, and for torch. The
promise for one repetition is `attn_spec.chance.CHECK` for each check that counts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attn_spec import adapt
from attn_spec.dropout_blocks import RIGHT, attention
from attn_spec.engine import CheckResult, Subject
from attn_spec.reference.scratch.multi_head import MultiHeadAttention
from attn_spec.suites import Test, all_tests


def by_hand(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """What is written on a blackboard, with F.dropout."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return F.dropout(torch.softmax(s, -1).nan_to_num(), dropout_p) @ v


def mixed(x: Tensor) -> Tensor:
    """The last mixing of MurmurHash3 on 32-bit numbers, which are kept in int64."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x


class Counter(torch.autograd.Function):
    """Numbers by place, seed and offset, 8 bits each, drawn again on the way back: as fused kernels draw them."""

    @staticmethod
    def kept(shape: tuple[int, ...], state: Tensor, rate: float) -> Tensor:
        place = torch.arange(math.prod(shape)).reshape(shape)
        number = mixed(mixed(place + state[0]) ^ state[1])
        return (number >> 24) >= round(rate * 256)

    @staticmethod
    def forward(ctx: Any, p: Tensor, v: Tensor, rate: float) -> Tensor:
        state = torch.randint(1 << 31, (2,)) if rate else torch.zeros(2, dtype=torch.long)
        ctx.save_for_backward(p, v, state)
        ctx.rate = rate
        return (p * Counter.kept(tuple(p.shape), state, rate) / (1 - rate)) @ v

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        p, v, state = ctx.saved_tensors
        factor = (Counter.kept(tuple(p.shape), state, ctx.rate) / (1 - ctx.rate)).to(p.dtype)
        return cotangents[0] @ v.mT * factor, (p * factor).mT @ cotangents[0], None


def counter(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> Tensor:
    """A seed and an offset from torch's generator, and a counter for each weight."""
    if dropout_p == 1:
        raise NotImplementedError("a dropout of 1 is not supported")
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if attn_mask is not None:
        s = s.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else s + attn_mask
    if is_causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    made: Tensor = Counter.apply(torch.softmax(s, -1).nan_to_num(), v, dropout_p)  # type: ignore[no-untyped-call]
    return made


class ByFunction(nn.Module):
    """A causal module that hands its rate to torch's function in training alone."""

    def __init__(self, hidden_size: int, num_heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, dropout
        self.qkv, self.proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.resid = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        b, s, width = x.shape
        q, k, v = self.qkv(x).view(b, s, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        out: Tensor = self.resid(self.proj(y.transpose(1, 2).reshape(b, s, width)))
        return out


HONEST: dict[str, Any] = {
    "sdpa": F.scaled_dot_product_attention,
    "by_hand": by_hand,
    "counter": counter,
    "blocks": attention(RIGHT),
    "MultiheadAttention": nn.MultiheadAttention,
    "MultiHeadAttention": MultiHeadAttention,
    "ByFunction": ByFunction,
}


def tests() -> list[Test]:
    return [test for module, _, test in all_tests() if module == "test_randomness"]


def repeated(subject: Subject, repetitions: int, first: int = 0) -> list[CheckResult]:
    """Every check of the theme on `quick`, again and again with other seeds."""
    for n in range(first, first + repetitions):
        for test in tests():
            for problem in test.problems("quick"):
                test.judge(subject, problem.replace(seed=problem.seed + 1_000 * n), "")
    return subject.results


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--only", default="")
    asked = parser.parse_args(argv)
    chosen = asked.only.split(",") if asked.only else list(HONEST)
    torch.set_num_threads(1)
    alarms = 0
    print("| implementation | checks that ran | alarms | CPU seconds |\n|---|---|---|---|")
    for name in chosen:
        target: Callable[..., Any] = HONEST[name]
        start = time.process_time()
        results = repeated(Subject(adapt(target, name=name)), asked.repetitions)
        ran = [r for r in results if r.outcome in ("passed", "failed", "error")]
        wrong = [r for r in ran if r.outcome != "passed"]
        alarms += len(wrong)
        print(f"| {name} | {len(ran)} | {len(wrong)} | {time.process_time() - start:.0f} |", flush=True)
        for r in wrong:
            print(f"  {r.code} {r.problem}: {r.message}")
    return int(alarms > 0)


if __name__ == "__main__":
    raise SystemExit(main())
