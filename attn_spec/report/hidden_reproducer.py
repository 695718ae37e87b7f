"""The scripts for violations on hidden states: the module is built and called, and the law stands in a few lines."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attn_spec import tolerance, whole
from attn_spec.adapters.implementation import GlobalState, Implementation
from attn_spec.adapters.modules.building import draw_weights
from attn_spec.adapters.modules.core import one_sample
from attn_spec.adapters.modules.hidden import HiddenCall, hidden_call
from attn_spec.adapters.modules.layouts import CHANNELS_FIRST
from attn_spec.adapters.modules.variants import taken_from
from attn_spec.adapters.modules.written import Making, Noted, NotWritten, Written, text_of
from attn_spec.engine import CheckResult
from attn_spec.invariants.decoding import chunks
from attn_spec.law import Unsupported, Violation
from attn_spec.masks import KeyPadding
from attn_spec.problem import Problem
from attn_spec.report.answer_reproducer import AnswerScript
from attn_spec.report.module_reproducer import bias_name, in_order, picked
from attn_spec.report.session_reproducer import in_parts
from attn_spec.report.snippets import Lines, element
from attn_spec.tolerance import roundoff
from attn_spec.values import padded_keys


class HiddenScript(AnswerScript):
    """A violation on hidden states: the call, and the law in a few lines.

    `run(x, ...)` in the script is the module on hidden states, batch first.
    """

    def __init__(
        self,
        implementation: Implementation,
        problem: Problem,
        violation: CheckResult | Violation,
        *,
        check: bool = True,
    ) -> None:
        super().__init__(implementation, problem, violation, check=check)
        self.code_of_law = getattr(violation, "code", "")
        with_context = self.code_of_law == "ATN652"
        self.hidden: HiddenCall = hidden_call(implementation, problem, with_context=with_context)
        if self.code_of_law == "ATN1150":
            self.hidden = self.hidden.with_dropout(0.5) or self.hidden
        self._making = Making(self.f, self.hidden.sizes, implementation.import_line)
        self.module = self._making.module()
        self.found = self.f._projections(self.module)
        self.drawn = [name for p in self.found.found for name in (p.name, bias_name(self.module, p)) if name]
        if self.f.instance is None:
            draw_weights(self.found)
        self.module = self.module.to(self.hidden.x.dtype).eval().requires_grad_(False)
        if self.f.input in CHANNELS_FIRST:
            raise NotWritten("hidden states whose channels come first")
        self.output = "{}"
        self.expected: Tensor | None = None
        before = GlobalState()
        inputs, given = self._given(self.hidden)
        try:
            with torch.no_grad():
                returned = self.module(**inputs, **given)
            self.output = picked(self.f, returned)
            out = self.f.tensors(returned)[0]
            self.expected = out.transpose(0, 1) if self.f.input == "SBD" else out
        except (Violation, Exception) as error:  # that is what the script shows
            self.raised = type(error).__name__
        finally:
            before.put_back()

    @property
    def making(self) -> Making:
        return self._making

    @cached_property
    def written(self) -> Written:
        return self._making.written()

    def _given(self, call: HiddenCall) -> tuple[dict[str, Any], dict[str, Any]]:
        """What forward gets in a call: its inputs, and the rest; for the first sample where it takes no batch."""
        noted: Any = Noted()
        named, x, context = dict(call.named), call.x, call.context
        named.pop("query", None)
        if taken_from(named, self.f.variants)[1] is not None:
            raise NotWritten("the sinks, which are a parameter of the module")
        if self.f._causal_of_constructor:
            named.pop("is_causal", None)
        if self.f.input == "SD":
            named = one_sample(named, 0, len(x))
            x, context = x[:1], context if context is None else context[:1]
        with contextlib.suppress(Violation):
            self.f._whole(noted, call.sizes, x, context, named)
        of_input = {*self.f.forward.inputs, self.f.forward.context}
        parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        for name, value in noted.given.items():
            parts[name not in of_input][name] = value
        return parts

    def _definition(self, call: HiddenCall, name: str = "run") -> Lines:
        """`run(x, ...)`: the module on hidden states as the call asks it."""
        f = self.f
        inputs, given = self._given(call)
        laid = {"BSD": "{}", "SBD": "{}.transpose(0, 1)", "SD": "{}[b]"}[f.input]
        x, context = laid.format("x"), laid.format("context")
        names: dict[str, Any] = {"x": call.x, "mask": call.like.mask, "heads": call.sizes.heads}
        if f.input == "SD":
            names["b"] = 0
        order = in_order(self.module, list(inputs))
        args = []
        for place, parameter in enumerate(inputs):
            text = x if place == 0 or call.context is None else context
            args.append(text if place < order else f"{parameter}={text}")
        texts = {parameter: text_of(value, names) for parameter, value in given.items()}
        args += [f"{parameter}={text}" for parameter, text in texts.items()]
        called = self.output.format(f"module({', '.join(args)})").replace(", heads, ", f", {call.sizes.heads}, ")
        if f.input == "SD":
            called = f"torch.stack([{called} for b in range(len(x))])"
        masked = any(re.search(r"\bmask\b", text) for text in texts.values())
        parameters = ["x"] + ["context"] * (call.context is not None) + ["mask"] * masked
        defaults = [p if p == "x" else f"{p}={p}" for p in parameters]
        back = ".transpose(0, 1)" if f.input == "SBD" else ""
        return ["\n", f"def {name}({', '.join(defaults)}):", f"    return {called}{back}", "\n"]

    @property
    def building(self) -> Lines:
        """The lines that build the module, with weights and biases drawn so that neither hides the other."""
        lines = [*self.seeded, f"module = {self.built}.requires_grad_(False)"]
        if self.f.instance is not None or not self.drawn:
            return lines
        cast = "" if self.problem.dtype == "float32" else "  # rounded to the module's dtype"
        return [
            *lines,
            "g = torch.Generator().manual_seed(7)",
            f"for name in {self.drawn}:",
            f"    p = module.get_parameter(name){cast}",
            "    drawn = torch.randn(p.shape, generator=g)",
            "    p.copy_(drawn * max(p.shape) ** -0.5 * 1.5 if p.dim() > 1 else drawn * 0.5)",
        ]

    def made(self) -> Lines:
        c, p = self.hidden, self.problem
        size = {"flat": 0.3, "large": 4.0, "mild": 0.7}.get(p.values, 1.3)

        def drawn(x: Tensor) -> str:
            cast = f".to({x.dtype})" if x.dtype != torch.float64 else ""
            sizes = ", ".join(map(str, x.shape))
            return f"({size} * torch.randn({sizes}, generator=g, dtype=torch.float64)){cast}"

        lines = [*self._mask(), f"g = torch.Generator().manual_seed({p.seed + 17})", f"x = {drawn(c.x)}"]
        if c.context is not None:
            lines.append(f"context = {drawn(c.context)}")
        return [*self.building, *lines, *self._definition(c)]

    def agrees(self) -> bool:
        """Whether the script makes the hidden states of the law, and its call gives what a module as new gives."""
        names, error = self._run([*self.code(["run(x)"]), "out = run(x)"])
        c = self.hidden
        if not isinstance(names.get("x"), Tensor) or not torch.equal(names["x"], c.x):
            return False
        if self.expected is None:
            return error is not None and self.raised in ("Violation", type(error).__name__)
        if self.code_of_law == "ATN1150":  # it may differ from call to call
            return error is None
        if error is not None:
            return False
        out = names["out"][0] if self.f.input == "SD" else names["out"]
        same = out.shape == self.expected.shape
        return same and torch.allclose(out.double(), self.expected.double(), 1e-3, 1e-5, equal_nan=True)

    def call_only(self) -> Lines:
        return ["out = run(x)", "print(out)  # to be looked at: the law compares it with what no short script gives"]

    def bodies(self) -> Iterator[Lines]:
        merge = self.violation.merge
        if merge == "raises":
            yield ["run(x)"]
        elif merge == "returns":
            yield ["assert isinstance(run(x), torch.Tensor)"]
        elif merge in ("output-shape", "output-shape-flat"):
            batch, length = self.hidden.x.shape[:2]
            yield [
                "out = run(x)",
                f"assert out.dim() == 3 and out.shape[:2] == ({batch}, {length}), out.shape  # [B, S, width]",
            ]
        if merge not in ("raises", "returns", "required"):
            yield from getattr(self, f"_{self.code_of_law.lower()}", lambda: ())()

    # the laws

    def _same(self, got: str, expected: str, why: str, indent: str = "") -> Lines:
        """An assertion that two outputs are equal but for rounding."""
        share = 16 * roundoff(self.problem.dtype)
        return [
            f"{indent}off, size = ({got} - {expected}).abs().max(), {expected}.abs().max()",
            f'{indent}assert off <= {share:.2g} * size, f"{{off:.3g}} off: {why}"',
        ]

    def _atn150(self) -> Iterator[Lines]:
        yield ["out = run(x)", "assert out.dtype == x.dtype, out.dtype"]
        yield ["out = run(x)", "assert out.shape[-1] == x.shape[-1], out.shape"]

    def _atn651(self) -> Iterator[Lines]:
        if self.hidden.shared_by_heads:
            weight = f"module.get_parameter({self.hidden.shared_by_heads!r})"
            yield [f"assert {weight}.shape[0] == x.shape[-1], {weight}.shape  # [heads * head_dim, hidden]"]
            return
        first, second = (f"module.get_parameter({name!r})" for name in self.hidden.shared_projections)
        yield [f'assert {first} is not {second}, "one parameter under two names"']

    def _atn250(self) -> Iterator[Lines]:
        n, seed = self.hidden.x.shape[1], self.problem.seed + 5
        yield [
            f"perm = torch.randperm({n}, generator=torch.Generator().manual_seed({seed}))",
            "before, after = run(x)[:, perm], run(x[:, perm])",
            *self._same("after", "before", "the tokens in another order give other outputs"),
        ]

    def _atn450(self) -> Iterator[Lines]:
        n = self.hidden.x.shape[1]
        cuts = tuple(sorted({1, n // 2, n - 1} - {0}))
        context = "" if self.hidden.context is None else ", context=changed"
        yield [
            "before = run(x)",
            f"for cut in {cuts}:",
            "    changed = x.clone()",
            "    changed[:, cut:] = 3.0 - 2.0 * x[:, cut:]",
            f"    earlier = run(changed{context})[:, :cut]",
            *self._same("earlier", "before[:, :cut]", "later hidden states reach earlier outputs", "    "),
        ]

    def _hidden(self) -> str:
        hidden = self.hidden.hidden_tokens(self.problem)
        for part in self.problem.mask:
            if not isinstance(part, KeyPadding):
                continue
            text = f"~{self._part(part, 0)}[:, 0, 0]"
            names = {"padded_keys": padded_keys, "torch": torch}
            if torch.equal(eval(text, names).expand(hidden.shape), hidden):
                return f"hidden = ~padded_keys({part.lengths}, {hidden.shape[1]}{', left=True' * part.left})"
        return f"hidden = torch.tensor({hidden.tolist()})"

    def _atn550(self) -> Iterator[Lines]:
        which = "x" if self.hidden.context is None else "context"
        real = "[~hidden]" if which == "x" else ""
        given = "changed" if which == "x" else "x, context=changed"
        yield [
            f"{self._hidden()}  # the padding",
            f"changed = {which}.clone()",
            "changed[hidden] += 50.0",
            f"before, after = run(x){real}, run({given}){real}",
            *self._same("after", "before", "padding reaches other outputs"),
        ]

    def _atn950(self) -> Iterator[Lines]:
        yield [
            f"{self._hidden()}  # the padding",
            "x.requires_grad_()",
            "(grad,) = torch.autograd.grad(run(x)[~hidden].float().square().sum(), x)",
            "leaked, size = grad[hidden].abs().max(), grad.abs().max()",
            'assert leaked <= 1e-3 * size, f"a gradient of {leaked:.3g} to the padding"',
        ]

    def _atn951(self) -> Iterator[Lines]:
        projected = [p.name for p in self.found.found]
        others = [name for name, _ in self.module.named_parameters() if name not in projected]
        yield [
            "module.requires_grad_(True)",
            f"projections, others = {projected}, {[] if self.hidden.optional_context else others}",
            "weights = [module.get_parameter(name) for name in projections + others]",
            "out, g = run(x), torch.Generator().manual_seed(11)",
            "cotangent = torch.randn(out.shape, generator=g).to(out.dtype)",
            "grads = torch.autograd.grad(out, weights, cotangent, allow_unused=True)",
            "for name, grad in zip(projections + others, grads):",
            '    assert grad is not None and (name in others or grad.abs().max() > 0), f"no gradient reaches {name}"',
        ]

    def _atn1150(self) -> Iterator[Lines]:
        yield ["first, second = run(x), run(x)", *self._same("second", "first", "two calls in eval mode differ")]
        plain = HiddenScript(self.implementation, self.problem, Violation(""), check=False)
        yield [
            "dropping = run(x)",
            *plain.building,
            *self._same("dropping", "run(x)", "in eval mode the module with dropout differs from that without"),
        ]

    def _atn1151(self) -> Iterator[Lines]:
        yield [
            "evaluated = run(x)",
            "module.train()",
            "trained = run(x)",
            *self._same("trained", "evaluated", "without dropout, training mode differs from eval mode"),
        ]

    def _atn1250(self) -> Iterator[Lines]:
        one, names = "x[n : n + 1]", ["context"] * (self.hidden.context is not None)
        given = "".join(f", {name}={name}[n : n + 1]" for name in names)
        sample, mask = self.hidden.sample(0), self.hidden.like.mask
        sliced = any(
            isinstance(value, Tensor) and isinstance(self.hidden.named[name], Tensor)
            and value.shape != self.hidden.named[name].shape
            for name, value in sample.named.items()
        )  # fmt: skip
        if sliced and mask is not None:
            given += ", mask=mask[n : n + 1]"
        yield [
            "together = run(x)",
            "for n in range(len(x)):",
            f"    alone = run({one}{given})",
            *self._same(
                "alone", "together[n : n + 1]", "sample {n} alone differs from sample {n} in the batch", "    "
            ),
        ]

    def _atn1251(self) -> Iterator[Lines]:
        if self.violation.merge == "inputs-changed":
            yield [
                "before = x.clone()",
                "run(x)",
                'assert torch.equal(x, before), "the hidden states are changed in place"',
            ]
            return
        lines, p = ["first = run(x).clone()"], self.problem
        for length in (max(1, p.q_len - 2), p.q_len + 3):
            other = p.replace(q_len=length, kv_len=length, mask=(), delivery=type(p.delivery)())
            with contextlib.suppress(Unsupported):
                call = hidden_call(self.implementation, self.implementation.fit(other))
                if call.sizes == self.hidden.sizes:
                    lines += self._definition(call, f"of_{length}")[1:3]
                    sizes = [x.shape for x in (call.x, call.context) if x is not None]
                    lines.append(f"of_{length}({', '.join(f'torch.randn{tuple(s)}.to(x.dtype)' for s in sizes)})")
        again = self._same("run(x)", "first", "the same call after calls of other lengths gives something else")
        yield [*lines, *again]

    def _atn1252(self) -> Iterator[Lines]:
        grads = ["x.requires_grad_()", "slow = run(x).detach()"]
        yield ["fast = run(x)", *grads, *self._same("fast", "slow", "with and without gradients it differs")]
        asked = self.hidden.asking_for_weights()
        if asked is not None:
            outputs = self.output
            self.output = self._output_of(asked)
            define = self._definition(asked, "with_weights")[1:3]
            self.output = outputs
            yield [*define, *grads, *self._same("with_weights(x)", "slow", "asked for its weights it differs")]

    def _atn1050(self) -> Iterator[Lines]:
        yield from in_parts(self, range(self.hidden.x.shape[1] + 1))

    def _atn1051(self) -> Iterator[Lines]:
        for cuts in chunks(self.hidden.x.shape[1]):
            yield from in_parts(self, cuts)

    def _atn1052(self) -> Iterator[Lines]:
        length = self.hidden.x.shape[1]
        yield from in_parts(self, [0, *range(max(1, length // 2), length + 1)])

    def _output_of(self, call: HiddenCall) -> str:
        inputs, given = self._given(call)
        with torch.no_grad(), contextlib.suppress(Exception):
            return picked(self.f, self.module(**inputs, **given))
        return "{}"

    # the formula

    def _atn652(self) -> Iterator[Lines]:
        yield from self._atn650()

    def _atn650(self) -> Iterator[Lines]:
        c, meaning = self.hidden, self.meaning
        weights = {} if self.implementation.positional else c.weights()
        if not weights:
            return
        out = c.run()[0].detach()
        for precision in self.precisions():
            right = whole.answer(c.x, c.context, weights, c.like, meaning, precision)
            if out.shape != right.output.shape or not tolerance.worst(out, right.output, right.bound).holds:
                break
        formula = self._formula(weights)
        names, error = self._run([*self.code(formula), *formula])
        if error is not None or not torch.allclose(names["expected"], right.output, 1e-9, 1e-12, equal_nan=True):
            return
        if out.shape != right.output.shape:
            yield ["out = run(x)", *formula, "assert out.shape == expected.shape, out.shape"]
            return
        worst = tolerance.worst(out, right.output, right.bound)
        yield ["out = run(x)", *formula, *element(worst.index, worst.bound)]
