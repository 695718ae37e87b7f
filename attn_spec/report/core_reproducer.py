"""The scripts for violations between the projections: plain torch lets these give q, k, v, and keeps what comes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.implementation import GlobalState, Implementation
from attn_spec.adapters.modules.core import one_sample
from attn_spec.adapters.modules.inject import Inject, NotInjected, marked, order_of, silent_biases
from attn_spec.adapters.modules.projections import Projection
from attn_spec.adapters.modules.written import Making, Noted, NotWritten, Written, text_of
from attn_spec.engine import CheckResult
from attn_spec.law import Violation
from attn_spec.problem import Problem
from attn_spec.report.module_reproducer import NOT_RUN, ModuleScript, bias_name, in_order, picked
from attn_spec.report.snippets import Lines


@dataclass(frozen=True)
class Event:
    """One use of a projection: which, from where in its storage and from which column on, how wide, in which rows."""

    p: Projection
    offset: int
    start: int
    width: int
    batch_first: bool


@dataclass(eq=False)
class Noting(Inject):
    """Injects, and notes how each projection is used."""

    events: list[Event] = field(default_factory=list)

    def met(self, which: list[Projection], used: Tensor, given: Tensor, result: Tensor) -> Tensor:
        out = super().met(which, used, given, result)
        p = which[0]
        if p.role != "o":
            out_first = p.weight.shape[0] != used.shape[-1] or used.shape[0] != p.weight.shape[0]
            offset = int(used.storage_offset()) - int(p.weight.storage_offset())
            start = offset // max(p.weight.stride(0 if out_first else 1), 1)
            self.events.append(Event(p, offset, start, result.shape[-1], self._batch_first(given, p, result)))
        return out

    def _batch_first(self, given: Tensor, p: Projection, result: Tensor) -> bool:
        order = order_of(given)
        if order is None:
            return self.batch_first or result.dim() == 2
        rows = list(zip(*(x.tolist() for x in order), strict=True))
        if rows != sorted(rows) and rows != sorted(rows, key=lambda row: row[::-1]):
            raise NotWritten(f"the order of the rows that {p.name} is given")
        return rows == sorted(rows)


class CoreScript(ModuleScript):
    """A violation on q, k and v."""

    def __init__(
        self,
        implementation: Implementation,
        problem: Problem,
        violation: CheckResult | Violation,
        *,
        check: bool = True,
    ) -> None:
        super().__init__(implementation, problem, violation, check=check)
        a, f = self.arguments, self.f
        self.named = self.adapter.asked(a)
        causal = f._causal(self.named)
        h, q_len, d = a.q.shape[1:]
        self.lengths = q_len, a.k.shape[2]
        self.cross = f.forward.context_required or (bool(f.forward.context) and q_len != a.k.shape[2])
        self.sizes = f.sizes_for(h, a.k.shape[1], d, a.v.shape[3], max(self.lengths), causal=causal, cross=self.cross)
        self._observe()

    def _observe(self) -> None:
        """One injected run of a module built as the script builds it: how its projections are used, what it returns."""
        a, f = self.arguments, self.f
        self._making = Making(f, self.sizes, self.implementation.import_line)
        module = self._making.module().to(a.q.dtype).eval().requires_grad_(False)
        self.module, self.found = module, f._projections(module)
        self.batch = 1 if f.input == "SD" else len(a.q)
        q, k, v = (x[: self.batch] for x in (a.q, a.k, a.v))
        self.widths = f.widths(module, self.sizes)
        inputs = f._inputs(module, self.sizes, self.batch, *self.lengths, a.q.dtype, marked)
        noting = Noting(
            self.found, fill=f.orders.fill(q, k, v, self.found), orders=f.orders, batch_first=f.input != "SBD"
        )
        noted: Any = Noted()
        named = one_sample(self.named, 0, len(a.q)) if f.input == "SD" else self.named
        f._call(noted, self.sizes, dict(inputs), dict(named), q)
        self.given = {name: value for name, value in noted.given.items() if name not in inputs}
        self.output, self.expected, self.raised = "{}", None, ""
        before = GlobalState()
        try:
            with torch.no_grad(), silent_biases(self.found), noting:
                returned = f._call(module, self.sizes, inputs, dict(named), q)
            self.output = picked(f, returned)
            reached = noting.merged if noting.merged is not None else f.tensors(returned)[0]
            sizes = (self.batch, a.q.shape[1], self.lengths[0], a.v.shape[3])
            self.expected = f.orders.heads_of(reached, noting, sizes, f.input)
        except (NotWritten, NotInjected):
            raise
        except (Violation, Exception) as error:  # that is what the script shows
            self.raised = type(error).__name__
            if noting.merged is None and self.found.of("o"):
                noting.merged = a.q.new_empty(0)  # it raises on its way there
        finally:
            before.put_back()
        self.events, self.merged, self.inputs = noting.events, noting.merged, list(inputs)

    @property
    def making(self) -> Making:
        return self._making

    @cached_property
    def written(self) -> Written:
        return self._making.written()

    # the call

    @cached_property
    def call(self) -> str:
        a = self.arguments
        one = {"b": 0} if self.f.input == "SD" else {}
        names = {"q": a.q, "k": a.k, "v": a.v, "mask": a.mask, "heads": a.q.shape[1], **one}
        given = "".join(f", {name}={text_of(value, names)}" for name, value in self.given.items())
        given = given.replace(", heads, ", f", {a.q.shape[1]}, ")
        if one:
            return f"torch.cat([impl(q[b : b + 1], k[b : b + 1], v[b : b + 1]{given}) for b in range(len(q))])"
        return f"impl(q, k, v{given})"

    def code(self, body: Lines) -> Lines:
        return ["", *self.definitions, *super().code(body)]

    def imported(self) -> Lines:
        text, lines = "\n".join(self.definitions), super().imported()
        if "TorchFunctionMode" in text:
            lines.insert(0, "from torch.overrides import TorchFunctionMode")
        return ["from unittest import mock", *lines] if "mock." in text else lines

    @cached_property
    def definitions(self) -> Lines:
        """The lines that build the module and define `impl`: of the ways that there are, the first that agrees."""
        for way in (self._with_identity, self._with_patch, self._with_hooks, self._with_mode):
            body = way()
            if not body:
                continue
            made = [*self.seeded, f"module = {self.built}", *body]
            if not self.check or self.violation.merge in NOT_RUN or self._agrees(made):
                return made
        raise NotWritten("how the module's projections are used")

    def _agrees(self, made: Lines) -> bool:
        """Whether `impl` so defined gives what a module as new gives by our own injection, or raises as it does."""
        names, error = self._run([*made, *super().code([self.call]), f"out = {self.call}"])
        if self.expected is None:
            return error is not None and (self.raised in ("Violation", type(error).__name__))
        if error is not None or not isinstance(names.get("out"), Tensor):
            return False
        out, right = names["out"].detach()[: self.batch], self.expected.detach()
        return out.shape == right.shape and torch.allclose(out.double(), right.double(), 1e-3, 1e-5, equal_nan=True)

    def bodies(self) -> Iterator[Lines]:
        if self.implementation.positional:  # q and k are not multiplied as they are given: no formula says it
            for body in super().bodies():
                if not any(line.startswith("expected = ") for line in body):
                    yield body
            return
        yield from super().bodies()
        if not self.setup:  # each script begins with a new module
            yield self._after_another()

    # the ways

    @property
    def _inputs(self) -> str:
        """Zeros for the hidden states, as the arguments of forward."""
        width, kv_width = self.widths
        laid = {"BSD": "b, {}", "SBD": "{}, b", "SD": "{}"}[self.f.input]
        dtype = "" if self.problem.dtype == "float32" else ", dtype=q.dtype"
        x = f"torch.zeros({laid.format('n')}, {width}{dtype})"
        y = f"torch.zeros({laid.format('k.shape[2]')}, {kv_width}{dtype})"
        order = in_order(self.module, self.inputs)
        given = zip(self.inputs, (x, y, y), strict=False)
        return ", ".join(text if place < order else f"{name}={text}" for place, (name, text) in enumerate(given))

    def _flat(self, text: str, batch_first: bool) -> str:
        moved = f"{text}.permute(0, 2, 3, 1)" if self.f.orders.heads == "dh" else f"{text}.transpose(1, 2)"
        return f"{moved}.flatten(2)" + ("" if batch_first else ".transpose(0, 1)")

    def _joined(self, role: str, batch_first: bool, names: Mapping[str, str]) -> str:
        """What stands for the result of a projection, as an expression over q, k and v."""
        order = {"qkv": self.f.orders.qkv, "kv": self.f.orders.kv}.get(role, role)
        if "|" in order or len(role) == 1:
            parts = [names[part] for part in order.split("|")]
            if len(parts) == 1:
                return self._flat(parts[0], batch_first)
            return f"torch.cat([{self._flat('x', batch_first)} for x in ({', '.join(parts)})], -1)"
        rows = f"x.transpose(1, 2).unflatten(2, ({self.arguments.k.shape[1]}, -1))"
        given = ", ".join(names[part] for part in role)
        if order == "per-head":
            text = f"torch.cat([{rows}.flatten(3) for x in ({given})], -1).flatten(2)"
        else:
            text = f"torch.cat([{rows} for x in ({given})], 3).transpose(3, 4).flatten(2)"
        return text if batch_first else f"{text}.transpose(0, 1)"

    def _stands(self, event: Event) -> str:
        """What stands for one use of a projection."""
        p, role = event.p, event.p.role
        names = {part: part if p.head is None else f"{part}[:, {p.head}:{p.head + 1}]" for part in role}
        width = p.weight.shape[0] if event.width in p.weight.shape else event.width
        widths = {"q": self.arguments.q, "k": self.arguments.k, "v": self.arguments.v}
        whole = sum(widths[part].shape[1] * widths[part].shape[3] for part in role) if p.head is None else width
        if len(role) == 1 or p.head is not None or event.width == whole:
            return self._joined(role, event.batch_first, names)
        order = self.f.orders.qkv if role == "qkv" else self.f.orders.kv
        place, parts, start = 0, [], event.start
        for part in order.split("|"):
            one = widths[part].shape[1] * widths[part].shape[3]
            if start <= place and place + one <= start + event.width:
                parts.append(part)
            place += one
        if not parts:
            raise NotWritten(f"the part of {p.name} from {start} on")
        if len(parts) == 1:
            return self._flat(parts[0], event.batch_first)
        return f"torch.cat([{self._flat('x', event.batch_first)} for x in ({', '.join(parts)})], -1)"

    def _back(self, text: str) -> str:
        """What was kept as [B, H, S, Dv]."""
        n = self.merged if self.merged is not None and self.merged.numel() else None
        seq_first = n is None and self.f.input == "SBD"
        if n is not None and n.dim() == 3:
            b, s = self.batch, self.lengths[0]
            seq_first = n.shape[:2] == (s, b) and (s != b or self.f.input == "SBD")
        if n is not None and n.dim() != 3:
            inner = "-1, h" if self.f.orders.heads == "dh" else "h, -1"
            text = f"{text}.reshape(b, n, {inner})"
        else:
            inner = "(-1, h)" if self.f.orders.heads == "dh" else "(h, -1)"
            text = f"{text}{'.transpose(0, 1)' if seq_first else ''}.unflatten(-1, {inner})"
        return f"{text}.permute(0, 3, 1, 2)" if self.f.orders.heads == "dh" else f"{text}.transpose(1, 2)"

    @property
    def _outputs(self) -> list[Projection]:
        reached = self.merged is not None
        return [p for p in self.found.found if p.role == "o"] if reached else []

    def _impl(self, before: Lines, within: str, after: Lines, kept: str) -> Lines:
        """The definition of `impl`."""
        called = f"module({self._inputs}, **kwargs)"
        run = f"out = {self.output.format(called)}" if kept == "out" else called
        return [
            "\n",
            "def impl(q, k, v, **kwargs):",
            '    """The module between its projections, which give q, k and v: [B, H, S, D]; the heads come back."""',
            "    b, h, n, _ = q.shape",
            *(f"    {line}" for line in before),
            *([f"    {within}", f"        {run}"] if within else [f"    {run}"]),
            *(f"    {line}" for line in after),
            f"    return {self._back(kept)}",
        ]

    def _owner(self, p: Projection) -> str:
        """The name of the submodule whose weight a projection is; "" where it is a bare parameter."""
        owner, _, own = p.name.rpartition(".")
        return owner if owner and own == "weight" else ""

    def _silenced(self, but: list[str]) -> Lines:
        """Lines that put the biases out of the way which no hook stands for."""
        names = [bias_name(self.module, p) for p in self.found.found if p.role != "o" and self._owner(p) not in but]
        return [f"torch.nn.init.zeros_(module.get_parameter({name!r}))" for name in dict.fromkeys(names) if name]

    @property
    def _multihead(self) -> str | None:
        """The name of the nn.MultiheadAttention that holds the projections; None where there is none."""
        projected = {p.name for p in self.found.found}
        for name, inner in self.module.named_modules():
            own = f"{name}." if name else ""
            if isinstance(inner, nn.MultiheadAttention) and f"{own}in_proj_weight" in projected:
                return str(name)
        return None

    def _with_identity(self) -> Lines:
        """nn.MultiheadAttention by itself: with identities for weights, q, k and v go in as the hidden states."""
        if not self.f.multihead or self._multihead is None or len(self.inputs) != 3:
            return []
        seq, biased = self.f.input == "SBD", any(p.bias is not None for p in self.found.found)
        return [
            "eye, zeros = torch.eye(module.embed_dim), torch.zeros(3 * module.embed_dim)",
            "named = {'in_proj_weight': eye.repeat(3, 1), 'out_proj.weight': eye}",
            *(["named |= {'in_proj_bias': zeros, 'out_proj.bias': zeros[: len(eye)]}"] if biased else []),
            "module.load_state_dict(named, strict=False)",
            "\n",
            "def impl(q, k, v, **kwargs):",
            '    """nn.MultiheadAttention between its projections, which are identities."""',
            f"    q, k, v = ({self._flat('x', not seq)} for x in (q, k, v))",
            "    out = module(q, k, v, **kwargs)[0]",
            f"    return out{'.transpose(0, 1)' if seq else ''}.unflatten(-1, (module.num_heads, -1)).transpose(1, 2)",
        ]

    def _with_patch(self) -> Lines:
        """nn.MultiheadAttention inside another module: what projects its inputs is patched."""
        name = self._multihead
        if name is None:
            return []
        inner: Any = self.module.get_submodule(name)
        owner = f"module.get_submodule({name!r})" if name else "module"
        return [
            f"torch.nn.init.eye_({owner}.out_proj.weight)",
            *([f"torch.nn.init.zeros_({owner}.out_proj.bias)"] if inner.out_proj.bias is not None else []),
            *self._impl(
                [
                    f"given = [{self._flat('x', False)}.contiguous() for x in (q, k, v)]",
                    "kept = []",
                    f"hook = {owner}.register_forward_hook(lambda _, args, out: kept.append(out[0]))",
                ],
                'with mock.patch("torch.nn.functional._in_projection_packed", lambda *_: given):',
                ["hook.remove()"],
                "kept[0]" if getattr(inner, "batch_first", False) else "kept[0].transpose(0, 1)",
            ),
        ]

    def _with_hooks(self) -> Lines:
        """Submodules that project: hooks give q, k and v in the place of what they give."""
        found = [p for p in self.found.found if p.role != "o"]
        owners = [self._owner(p) for p in found]
        if not all(owners) or self._multihead is not None:
            return []
        used = {e.p.name: e for e in self.events}
        given = {}
        for p, owner in zip(found, owners, strict=True):
            event = used.get(p.name) or Event(p, 0, 0, 0, self.f.input != "SBD")
            given[owner] = self._stands(replace(event, width=event.width) if event.width else self._whole(event))
        kept = [self._owner(p) for p in self._outputs]
        if not all(kept):
            return []
        before = ["given = {", *(f"    {owner!r}: {text}," for owner, text in given.items()), "}"]
        before += [
            "hooks = [",
            "    module.get_submodule(name).register_forward_hook(lambda _, args, out, x=x: x.reshape(out.shape))",
            "    for name, x in given.items()",
            "]",
        ]
        if kept:
            keeps = "lambda _, args: kept.append(args[0])"
            before += [
                "kept = []",
                f"hooks.append(module.get_submodule({kept[0]!r}).register_forward_pre_hook({keeps}))",
            ]
        after = ["    for hook in hooks:", "        hook.remove()"]
        return [
            *self._silenced(owners),
            *self._impl(before, "try:", ["finally:", *after], "kept[0]" if kept else "out"),
        ]

    def _whole(self, event: Event) -> Event:
        parts = {"q": self.arguments.q, "k": self.arguments.k, "v": self.arguments.v}
        return replace(event, width=sum(parts[r].shape[1] * parts[r].shape[3] for r in event.p.role))

    def _with_mode(self) -> Lines:
        """Bare parameters: where a product takes one, q, k or v stands for what it gives."""
        if not self.events:
            return []
        places = {}
        for event in self.events:
            places[event.p.name, event.offset] = self._stands(event)
        mode = [
            "\n",
            "class Projections(TorchFunctionMode):",
            '    """Where a product takes a projection\'s parameter, or a view of it, q, k or v is what it gives."""',
            "",
            "    def __torch_function__(self, func, types, args=(), kwargs=None):",
            "        out = func(*args, **(kwargs or {}))",
            "        tensors = [x for x in args if isinstance(x, torch.Tensor)]",
            "        for x in tensors if len(tensors) > 1 else ():",
            "            for (name, offset), stands in self.given.items():",
            "                w = module.get_parameter(name)",
            "                if x.untyped_storage().data_ptr() == w.untyped_storage().data_ptr():",
            "                    if x.storage_offset() == w.storage_offset() + offset:",
            "                        return stands.reshape(out.shape)",
        ]
        outputs = self._outputs
        if outputs:
            storage = f"module.get_parameter({outputs[0].name!r}).untyped_storage().data_ptr()"
            mode += [
                f"            if x.untyped_storage().data_ptr() == {storage}:",
                "                self.kept.append(next(y for y in tensors if y is not x))",
            ]
        mode.append("        return out")
        before = ["mode = Projections()", "mode.kept, mode.given = [], {"]
        before += [*(f"    {place!r}: {text}," for place, text in places.items()), "}"]
        kept = "mode.kept[0]" if outputs else "out"
        return [*self._silenced([]), *mode, *self._impl(before, "with mode:", [], kept)]
