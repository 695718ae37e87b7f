"""A violation as a script of plain torch that needs nothing of ours: paste it into a file, run it, see it fail.

The script carries the source of what draws the tensors (`attn_spec/values.py`, plain torch for this reason), calls the
implementation as its adapter does, and compares with the formula in float64 at the element that is furthest off. It is
run here before it is given out, with the callable that was judged in place of its import.
"""

from __future__ import annotations

import ast
import contextlib
import io
import textwrap
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch

from attn_spec import masks, oracle, values
from attn_spec.adapters.implementation import GlobalState, Implementation, described
from attn_spec.backward import NAMES
from attn_spec.engine import CheckResult
from attn_spec.invariants.differentiation import gradients
from attn_spec.law import Refused, Unsupported, Violation
from attn_spec.problem import TENSORS, Arguments, Problem
from attn_spec.report import beside
from attn_spec.report.formula import formula
from attn_spec.report.snippets import LAYOUTS, SNIPPETS, Lines, element, joined, source_of, unless
from attn_spec.tolerance import Precision, candidates

_in_tuples: WeakKeyDictionary[Implementation, bool] = WeakKeyDictionary()  # whether the output comes in a tuple


def reproducer(
    implementation: Implementation, problem: Problem, violation: CheckResult | Violation, *, check: bool = True
) -> str:
    """The shortest script that shows a violation; where no single comparison does, one that makes the call.

    check: run what is given out, so that it is sure to fail; without it the script is only the likeliest one.
    """
    if violation.reproducer:
        return violation.reproducer
    from attn_spec.report.drawn_reproducer import DrawnScript, of_dropout

    try:
        if of_dropout(getattr(violation, "code", "")):
            if implementation.is_module:
                return "# no short script shows this: the weights are read off between the projections\n"
            return DrawnScript(implementation, problem, violation, check=check).shortest()
        if implementation.is_module:
            from attn_spec.report.module_reproducer import module_reproducer

            return module_reproducer(implementation, problem, violation, check=check)
        return Script(implementation, problem, violation, check=check).shortest()
    except Unsupported as error:
        return f"# no short script shows this: {error}\n"
    except Exception as error:  # an error of ours here must not take the report with it
        return f"# attn-spec failed at writing a reproducer: {described(error)}\n"


def fails(code: Lines, implementation: Implementation) -> bool:
    """Whether the code fails when it is run on the callable that was judged."""
    function = getattr(implementation.adapter, "function", None)
    if function is None:
        return True  # an adapter of the user's own can't be run apart: its script has the benefit of the doubt
    before = GlobalState()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec("\n".join(code), {"torch": torch, "Tensor": torch.Tensor, "impl": function})
    except KeyboardInterrupt:
        raise
    except BaseException:  # an assertion of the script, or whatever the implementation raises
        return True
    finally:
        before.put_back()
    return False


class Script:
    """The pieces of the script for one violation."""

    def __init__(
        self,
        implementation: Implementation,
        problem: Problem,
        violation: CheckResult | Violation,
        *,
        check: bool = True,
    ) -> None:
        self.implementation, self.problem, self.violation, self.check = implementation, problem, violation, check
        self.meaning = implementation.conventions.meaning
        setup = [line for line in violation.setup.splitlines() if line.strip()]
        self.asserted = [line for line in setup if "impl_output" in line]  # about the output, after the call
        self.setup = [line for line in setup if line not in self.asserted]
        self.arguments = self._arguments()

    def _arguments(self) -> Arguments:
        """The arguments of the call, with the setup applied."""
        arguments = self.problem.arguments(self.meaning.alignment)
        causal = self.violation.evidence.get("causal")  # of a law that asks for it in another way than the problem
        arguments = arguments if causal is None else arguments.replace(causal=bool(causal))
        if not self.setup:
            return arguments
        names = {name: getattr(arguments, name) for name in TENSORS} | {"torch": torch}
        with contextlib.suppress(Exception):  # then the script is given out as it is
            exec("\n".join([SNIPPETS["one_hot"], *self.setup]), names)
        mask: Any = names["mask"]
        form = arguments.form
        if mask is not None and form is None:
            form = "bool" if mask.dtype == torch.bool else "additive"
        return arguments.replace(q=names["q"], k=names["k"], v=names["v"], mask=mask, form=form)

    def shortest(self) -> str:
        """The script with the first body that shows the violation; with none, the call alone.

        Weights of nearly 0 and 1 hide a wrong scale: for the laws of the scale flatter ones are tried too.
        """
        flatter, about_scale = self.problem.replace(values="mild"), getattr(self.violation, "code", "")[:4] == "ATN3"
        others = [flatter] if about_scale and flatter != self.problem else []
        for problem in (self.problem, *others):
            same = problem is self.problem
            script = self if same else type(self)(self.implementation, problem, self.violation, check=self.check)
            for body in script.bodies():
                if not self.check or script.fails(body):
                    return script.text(body)
        return self.text(self.call_only())

    def fails(self, body: Lines) -> bool:
        """Whether the script fails on the callable that was judged."""
        return fails([*self.code(body), *body], self.implementation)

    @cached_property
    def call(self) -> str:
        """The call as an expression that gives the output, out of the tuple where it comes in one."""
        call = self.implementation.adapter.source(self.arguments)
        function, a = getattr(self.implementation.adapter, "function", None), self.arguments
        calls = [node for node in ast.walk(ast.parse(call)) if isinstance(node, ast.Call)]
        inner = next((ast.unparse(node) for node in calls if getattr(node.func, "id", "") == "impl"), "")
        if function is None or inner not in call:
            return call
        if self.implementation not in _in_tuples:
            with contextlib.suppress(Refused, Violation):
                names = {name: getattr(a, name) for name in TENSORS} | {"torch": torch, "impl": function}
                returned = self.implementation.shielded(eval, inner, names)
                _in_tuples[self.implementation] = isinstance(returned, (tuple, list))
        return call.replace(inner, f"{inner}[0]") if _in_tuples.get(self.implementation) else call

    # what comes before the comparison --------------------------------------------------------------------------------

    def text(self, body: Lines) -> str:
        """The whole script: what it shows, the imports, the tensors, the comparison."""
        v = self.violation
        about = f"{v.code} {v.name}: {v.message}" if isinstance(v, CheckResult) else v.message
        comments = [f"# {line}" for line in textwrap.wrap(about, 112, break_long_words=False)]
        code = self.code(body)
        imported = self.imported()
        imports = ["import torch"] + ["from torch import Tensor"] * any("Tensor" in line for line in code)
        rest = [line for line in imported if line not in imports]
        return "\n".join([*comments, *imports, *rest, *code, *body]) + "\n"

    def imported(self) -> Lines:
        """The lines that import the callable."""
        return (self.implementation.import_line or "impl = ...  # your function").splitlines()

    def made(self) -> Lines:
        """The lines that make q, k, v and the mask."""
        return [self.draw(self.problem.seed), *self._mask(), *self._variants(), *self.setup]

    def code(self, body: Lines) -> Lines:
        """The functions that are needed, and the lines that make the tensors."""
        made = self.made()
        needed = "\n".join([*made, *body])
        drawing = [values.draw, values.random_visible, values.random_bias, values.padded_keys]
        drawing += [values.same_document, values.random_slopes, values.standard_slopes, values.random_sinks]
        sources = [source_of(f, self.problem.values) for f in drawing if f"{f.__name__}(" in needed]
        sources += [text.strip() for name, text in SNIPPETS.items() if f"{name}(" in needed]
        return [*(f"\n\n{source}" for source in sources), "\n", *made]

    def draw(self, seed: int) -> str:
        p = self.problem
        sizes = (p.batch, p.heads, p.kv_heads, p.q_len, p.kv_len, p.head_dim, p.v_dim)
        x = LAYOUTS[p.layout].format(f"x.to(torch.{p.dtype})")
        drawn = f'q, k, v = ({x}{self._moved} for x in draw("{p.values}", {sizes}, seed={seed}))'
        return f"{drawn}\nk = k[:, :, :1].expand(k.shape)" if p.layout == "one-key" else drawn

    @property
    def _moved(self) -> str:
        return "" if self.problem.device == "cpu" else f'.to("{self.problem.device}")'

    def _mask(self) -> Iterator[str]:
        """The lines that make the mask tensor, as `attn_spec.masks.delivered` does."""
        p, how = self.problem, self.problem.delivery
        parts = [part for part in p.mask if not masks.by_parameter(part, how)]
        if not parts:
            return
        seen = [self._part(part, p.seed + n) for n, part in enumerate(parts) if not isinstance(part, masks.Bias)]
        added = [self._part(part, p.seed + n) for n, part in enumerate(parts) if isinstance(part, masks.Bias)]
        if how.form == "key-padding":
            padding = f"{joined(seen, ' & ')}.expand({p.batch}, 1, 1, {p.kv_len})[:, 0, 0]"
            yield f"mask = {padding}.contiguous(){self._moved}"
            return
        axes = how.shape or "".join(a if any(a in part.axes for part in parts) else "1" for a in masks.AXES)
        shape = masks.shape_over(axes, p.sizes)
        full = "" if len(parts) == 1 and masks.shape_over(parts[0].axes, p.sizes) == shape else f".expand{shape}"
        if how.form == "bool":
            made = f"{joined(seen, ' & ')}{full}"
        else:
            dtype = f"torch.{how.dtype or p.dtype}"
            made = f"{joined(added, ' + ')}{full}" if added else f"torch.zeros({shape}, dtype=torch.float64)"
            if added and how.dtype not in ("", p.dtype):  # exact in both dtypes
                made += f".to(torch.{p.dtype}).double()"
            if seen:
                low = {"-inf": "-torch.inf", "min": f"torch.finfo({dtype}).min"}.get(how.hidden, how.hidden)
                yield f"visible = {' & '.join(seen)}"
                made += f".masked_fill(~visible, {low})"
            made += f".to({dtype})"
        if len(axes) < 4:
            made += f".reshape({shape[4 - len(axes) :]})"
        yield f"mask = {made}{'.mT.contiguous().mT' if how.strided else '.contiguous()'}{self._moved}"

    def _variants(self) -> Iterator[str]:
        """The lines that make slopes and sinks."""
        p = self.problem
        if p.alibi is not None:
            shape = (p.batch, p.heads) if p.alibi.batched else (p.heads,)
            made = f"standard_slopes({p.heads})" if p.alibi.standard else f"random_slopes({shape}, {p.seed})"
            yield f"alibi = {made}{self._moved}"
        if p.sinks:
            yield f"sinks = random_sinks({p.heads}, {p.seed}).to(torch.{p.dtype}){self._moved}"

    def _part(self, part: masks.Part, seed: int) -> str:
        sizes = self.problem.sizes
        if isinstance(part, masks.Causal):
            offset = sizes[3] - sizes[2] if (part.alignment or self.meaning.alignment) == "bottom-right" else 0
            return f"torch.ones({sizes[2]}, {sizes[3]}, dtype=torch.bool).tril({offset or ''})[None, None]"
        if isinstance(part, masks.Documents):
            return f"same_document({part.q_lengths or part.lengths}, {part.lengths})[None, None]"
        if isinstance(part, masks.KeyPadding):
            left = ", left=True" if part.left else ""
            return f"padded_keys({part.lengths}, {sizes[3]}{left})[:, None, None, :]"
        assert isinstance(part, (masks.Bias, masks.Visible))
        shape = masks.shape_over(part.axes, sizes)
        if isinstance(part, masks.Bias):
            return f"random_bias({shape}, {seed}{unless(part.spread, 2.0, ', spread={}')})"
        density, empty = unless(part.density, 0.7, ", density={}"), unless(part.empty_rows, (), ", empty_rows={}")
        return f"random_visible({shape}, {seed}{density}{empty})"

    # the comparisons -------------------------------------------------------------------------------------------------

    def bodies(self) -> Iterator[Lines]:
        """What may show the violation, the most telling first."""
        special: dict[str, Callable[[], list[Lines]]] = {
            "inputs-modified": self._modified,
            "mask-modified": self._modified,
            "global-state": self._state,
            "aliasing": self._twice,
            "stateful": lambda: [*self._twice(), self._after_another()],
            "future-gradient": self._gradient,
            "hidden-influence": self._poisoned,
            **dict.fromkeys(("lse", "lse-empty"), self._lse),
            **{f"gradient-{name}": self._gradient_of for name in NAMES},
        }
        if self.asserted:
            yield [f"impl_output = {self.call}", *self.asserted]
        if self.violation.merge in special:
            yield from special[self.violation.merge]()
        if self.arguments.lengths is None:  # packed samples have no formula of a few lines
            yield [f"out = {self.call}", *self._right(), *self._compare(self.arguments)]

    def call_only(self) -> Lines:
        return ["# the law compares several calls; this is the first of them", f"out = {self.call}", "print(out)"]

    def _right(self) -> Lines:
        return formula(self.problem, self.arguments, self.meaning)

    def _compare(self, called: Arguments) -> Lines:
        """Compare at the element that is furthest off, where the implementation answers; else its shape."""
        a, known = self.arguments, self.violation.evidence
        if not self.check and not self.setup and {"index", "bound"} <= set(known):  # what the law saw
            return element(known["index"], known["bound"])
        try:
            output = self.implementation(called).output
            for precision in self.precisions():
                worst = oracle.answer(a, self.meaning, precision).compare(output)
                if not worst.holds:
                    break
        except Exception:  # it raises, or gives another shape: that is what the script shows
            return [f"assert out.shape == {(*a.q.shape[:3], a.v.shape[-1])}, out.shape"]
        if not worst.index:
            return [f"assert out.shape == {(*a.q.shape[:3], a.v.shape[-1])}, out.shape"]
        return element(worst.index, worst.bound)

    def precisions(self) -> list[Precision]:
        """The coarsest first, the one that was measured last.

        What is off by more than any honest rounding is said to be, so that the mended callable passes whatever it
        rounds; a precision measured on wrong numbers may be too fine for it.
        """
        return [*reversed(candidates(self.arguments.dtype)), self.implementation.precision_for(self.arguments.dtype)]

    def _modified(self) -> list[Lines]:
        inputs = "(q, k, v)" if self.arguments.mask is None else "(q, k, v, mask)"
        before, after = f"before = [x.clone() for x in {inputs}]", f"zip(before, {inputs})"
        same = f'assert all(torch.equal(a, b) for a, b in {after}), "an input was modified"'
        return [[before, f"out = {self.call}", same]]

    def _state(self) -> list[Lines]:
        return [["before = state()", f"out = {self.call}", 'assert state() == before, "global state was changed"']]

    def _twice(self) -> list[Lines]:
        first = [f"first = {self.call}", "kept, mine = first.clone(), (q, k, v)", self.draw(self.problem.seed + 1)]
        later = [f"out = {self.call}", 'assert first.equal(kept), "a later call wrote into an earlier output"']
        again = [
            "q, k, v = mine",
            f"again = {self.call}",
            'assert torch.allclose(again, kept), "the first call mattered"',
        ]
        return [[*first, *later, *again]]

    def _after_another(self) -> Lines:
        """A call after one with other inputs, which a cache may remember."""
        earlier = [self.draw(self.problem.seed + 1), f"earlier = {self.call}", self.draw(self.problem.seed)]
        return [*earlier, f"out = {self.call}", *self._right(), *self._compare(self.arguments)]

    def _gradient(self) -> list[Lines]:
        query, p = int(self.violation.evidence.get("query", 0)), self.problem
        first = query + 1 + (p.kv_len - p.q_len if self.meaning.alignment == "bottom-right" else 0)
        wanted = f"out[:, :, {query}].float().square().sum(), (k, v), allow_unused=True"
        return [
            [
                "k, v = k.requires_grad_(), v.requires_grad_()",
                f"out = {self.call}",
                f"for grad in torch.autograd.grad({wanted}):",
                f"    hidden = grad[:, :, {first}:].abs().max()  # of the keys after query {query}",
                '    assert hidden <= 1e-3 * grad.abs().max(), f"gradient of {hidden:.3g} to what is hidden"',
            ]
        ]

    def _lse(self) -> list[Lines]:
        known = self.violation.evidence
        call = beside.lse_call(self.implementation, self.arguments)
        if call is None or not {"index", "bound"} <= set(known):
            return []
        exact = beside.lse_lines(self.arguments, self.meaning, self._right())
        return [[f"lse = {call}", *exact, *element(known["index"], known["bound"], "lse", "expected_lse")]]

    def _gradient_of(self) -> list[Lines]:
        known, name = self.violation.evidence, self.violation.merge.removeprefix("gradient-")
        if not {"index", "bound"} <= set(known):  # it was seen by differences: look for the element by the formula
            found = gradients(self.implementation, self.problem)
            worst = found.right.compare(name, getattr(found.gradients, name))
            known = {"index": worst.index, "bound": worst.bound}
        lines = beside.gradient_lines(self.problem, self.arguments, name, self.call, self._right())
        return [[*lines, *element(known["index"], known["bound"], "got_gradient", "right_gradient")]]

    def _poisoned(self) -> list[Lines]:
        p, a = self.problem, self.arguments
        seen = f"(s > -torch.inf).any(2).unflatten(1, ({p.kv_heads}, -1)).any(2)"
        bodies = []
        for fill in (1e4, -1e4):
            lines = [*self._right(), f"hidden = ~{seen}[..., None]  # from every query"]
            names: dict[str, Any] = {"torch": torch} | {name: getattr(a, name) for name in TENSORS}
            exec("\n".join(lines), names)
            called = a.replace(k=a.k.masked_fill(names["hidden"], fill), v=a.v.masked_fill(names["hidden"], fill))
            lines.append(f"k, v = k.masked_fill(hidden, {fill}), v.masked_fill(hidden, {fill})")
            bodies.append([*lines, f"out = {self.call}", *self._compare(called)])
        return bodies
