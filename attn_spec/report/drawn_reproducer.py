"""A violation of a law of dropout as a script of plain torch: it reads the weights off, seeds, and counts.

What a law judges by exact tails the script judges by standard deviations, eight of them, which is short and enough to
see what it shows.
"""

from __future__ import annotations

from collections.abc import Iterator

from attn_spec.law import THEMES
from attn_spec.report.reproducer import Script
from attn_spec.report.snippets import Lines

SIGMAS = 8


def of_dropout(code: str) -> bool:
    """Whether a law is one of dropout in calls, by its code."""
    return code[3:].isdigit() and THEMES.get(int(code[3:]) // 100) == "randomness" and int(code[3:]) < 1150


class DrawnScript(Script):
    """The pieces of the script for one violation of a law of dropout."""

    def bodies(self) -> Iterator[Lines]:
        """What shows the violation."""
        made = {
            "ATN1101": self._share,
            "ATN1102": self._scale,
            "ATN1104": self._alike,
            "ATN1105": self._copies,
            "ATN1106": self._off,
            "ATN1107": self._backward,
            "ATN1108": self._seeded,
            "ATN1109": self._next,
            "ATN1110": self._hidden,
            "ATN1111": self._all,
        }
        yield made[getattr(self.violation, "code", "")]()

    def call_only(self) -> Lines:
        return [*self._drawn(), "print(drawn(1))"]

    @property
    def _own_seed(self) -> str:
        """The parameter that takes a seed; "" where the function draws from torch's generator."""
        signature = getattr(self.implementation.adapter, "signature", None)
        return "" if signature is None else str(signature.roles.get("seed", ""))

    def _call_with(self, seed: str) -> str:
        """The call, with its own seed where it takes one."""
        return self.call.replace(f"{self._own_seed}=0", f"{self._own_seed}={seed}") if self._own_seed else self.call

    @property
    def _spread(self) -> str:
        p = self.problem.dropout
        return f"{SIGMAS * (p * (1 - p)) ** 0.5:.3g}"

    def _drawn(self) -> Lines:
        """A function that gives the weights of the n-th call after a seed: V = identity, in blocks of its width."""
        p = self.problem
        device = "" if p.device == "cpu" else f', device="{p.device}"'
        return [
            "",
            "",
            "def drawn(seed, n=1):",
            '    """The weights [B, H, Sq, Sk] of the n-th call after a seed: with V = identity the output is they."""',
            "    columns = []",
            f"    for start in range(0, {p.kv_len}, {p.v_dim}):",
            f"        v = torch.zeros({p.batch}, {p.kv_heads}, {p.kv_len}, {p.v_dim}, dtype=torch.{p.dtype}{device})",
            f"        for c in range(min({p.v_dim}, {p.kv_len} - start)):",
            "            v[:, :, start + c, c] = 1",
            *([] if self._own_seed else ["        torch.manual_seed(seed)"]),
            f"        for {'m' if self._own_seed else '_'} in range(n):",
            f"            out = {self._call_with('seed + m')}",
            "        columns.append(out.detach())",
            f"    return torch.cat(columns, -1)[..., :{p.kv_len}].double()",
            "",
            "",
        ]

    def _weights(self) -> Lines:
        """The lines that leave the right weights in `right`."""
        *logits, last = self._right()
        return [*logits, last.replace("expected = ", "right = ").rpartition(" @ v.double()")[0]]

    def _seen(self) -> Lines:
        return [*self._drawn(), *self._weights(), "seen = right > 1e-4", "dropped = (drawn(1) == 0) & seen"]

    def _share(self) -> Lines:
        p = self.problem.dropout
        return [
            *self._seen(),
            "for axes in ((0, 1, 2, 3), (2, 3), (0, 1, 3), (0, 1, 2)):  # of all, of each head, query, key",
            "    n = seen.sum(axes).clamp(min=1)",
            "    share = dropped.sum(axes) / n",
            f"    off = (share - {p}).abs() - {2.0**-8} - {self._spread} / n.sqrt()",
            f'    print(f"dropped: {{share.min():.3f}} to {{share.max():.3f}}, expected {p}")',
            '    assert off.max() <= 0, "not the share that was asked for"',
        ]

    def _scale(self) -> Lines:
        p = self.problem.dropout
        return [
            *self._seen(),
            "kept = seen & ~dropped",
            "factor = (drawn(1) / right)[kept]",
            f'print(f"kept weights: times {{factor.min():.4f}} to {{factor.max():.4f}}, expected {1 / (1 - p):.4f}")',
            f'assert ((factor * {1 - p} - 1).abs() < {self._coarse}).all(), "not divided by 1 - p"',
        ]

    @property
    def _coarse(self) -> float:
        return 1e-3 if self.problem.dtype in ("float32", "float64") else 0.1

    def _alike(self) -> Lines:
        if self.violation.merge == "dropout-shifted-alike":
            return self._shifted()
        return [
            *self._seen(),
            "m = dropped.double() - (dropped.sum() / seen.sum()) * seen",
            "for axis, name in ((1, 'head'), (2, 'query'), (3, 'key'), (0, 'sample')):",
            "    x, n = m.movedim(axis, 0).flatten(1), seen.movedim(axis, 0).flatten(1).double()",
            "    alike = x @ x.mT / (x.square() @ n.mT * (n @ x.square().mT)).sqrt()  # correlations",
            "    alike = alike.fill_diagonal_(0).nan_to_num() * (n @ n.mT).sqrt()",
            '    print(f"{name}: correlated by at most {alike.abs().max():.2f} standard deviations")',
            f'    assert alike.abs().max() < {SIGMAS}, f"one {{name}} drops what another drops"',
        ]

    def _shifted(self) -> Lines:
        """Each even line beside the next, moved: lines are those of queries, then those of keys."""
        return [
            *self._seen(),
            "m = dropped.double() - (dropped.sum() / seen.sum()) * seen",
            "found = []",
            "for lines in (m, m.mT):",
            "    even, odd = lines[:, :, 0::2], lines[:, :, 1::2]",
            "    even = even[:, :, : odd.shape[2]]",
            "    for s in range(1, lines.shape[-1]):",
            "        for x, y in ((even[..., s:], odd[..., :-s]), (even[..., :-s], odd[..., s:])):",
            "            spread = (x.square().sum() * y.square().sum() / x.numel()).sqrt()",
            "            found.append(((x * y).sum() / spread).nan_to_num().abs())",
            'print(f"moved lines: correlated by at most {max(found):.2f} standard deviations")',
            f'assert max(found) < {SIGMAS}, "one line drops what the next drops, moved"',
        ]

    def _copies(self) -> Lines:
        p = self.problem
        keys = min(p.kv_len, p.v_dim // 2)
        return [
            "v = torch.zeros_like(v)",
            f"v[:, :, :{keys}, :{keys}] = v[:, :, :{keys}, {keys}:{2 * keys}] = torch.eye({keys}, dtype=v.dtype)",
            "torch.manual_seed(1)",
            f"out = {self._call_with('1')}",
            f"one, other = out[..., :{keys}], out[..., {keys}:{2 * keys}]  # each is the weights",
            'assert torch.allclose(one, other, atol=1e-2), "dropped for one channel of V and not for another"',
        ]

    def _off(self) -> Lines:
        self.arguments = self.arguments.replace(dropout=0.0)
        return [
            "torch.manual_seed(1)",
            "before = torch.get_rng_state()",
            f"out = {self._call_with('1')}",
            *self._weights()[:-1],
            self._right()[-1],
            'assert torch.allclose(out.double(), expected, atol=1e-2), "not what it is without dropout"',
            'assert torch.equal(torch.get_rng_state(), before), "the generator was moved on"',
        ]

    def _backward(self) -> Lines:
        p = self.problem
        n = p.kv_len
        return [
            "v = torch.zeros_like(v)",
            f"v[:, :, :{n}, :{n}] = torch.eye({n}, dtype=v.dtype)",
            "q, k, v = (x.requires_grad_() for x in (q, k, v))",
            "torch.manual_seed(1)",
            f"out = {self._call_with('1')}",
            "torch.manual_seed(2)  # as other layers move it",
            "g = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))",
            "found = torch.autograd.grad(out, (q, k, v), g.to(out.dtype))",
            *self._weights(),
            f"kept = (out[..., :{n}] != 0).double() / {1 - p.dropout}",
            f"rows = v.double(){f'.repeat_interleave({p.heads // p.kv_heads}, dim=1)' * (p.heads > p.kv_heads)}",
            "expected = torch.autograd.grad(right * kept @ rows, (q, k, v), g)",
            "for name, got, wanted in zip('qkv', found, expected):",
            f"    tolerance = {self._coarse} * wanted.abs().max()",
            "    assert (got - wanted).abs().max() <= tolerance, f'd{name} is that of another mask'",
        ]

    def _seeded(self) -> Lines:
        return [
            *self._drawn(),
            'assert torch.equal(drawn(1) == 0, drawn(1) == 0), "after the same seed others are dropped"',
            'assert not torch.equal(drawn(1) == 0, drawn(2) == 0), "after another seed the same are dropped"',
        ]

    def _next(self) -> Lines:
        return [
            *self._drawn(),
            'assert not torch.equal(drawn(1) == 0, drawn(1, 2) == 0), "the next call drops the same"',
        ]

    def _hidden(self) -> Lines:
        return [*self._drawn(), *self._weights(), 'assert (drawn(1)[right == 0] == 0).all(), "a hidden key is seen"']

    def _all(self) -> Lines:
        return ["torch.manual_seed(1)", f"out = {self._call_with('1')}", 'assert (out == 0).all(), "not zeros"']
