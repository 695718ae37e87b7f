"""A module's right answer through its own weights, written out in plain torch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules.hidden import HiddenCall
from attn_spec.adapters.modules.projections import Projection, Projections
from attn_spec.adapters.modules.written import NotWritten
from attn_spec.report.module_reproducer import ModuleScript, bias_name
from attn_spec.report.snippets import Lines


class AnswerScript(ModuleScript):
    """A script that can say what attention gives on hidden states x (and context) through the module's projections."""

    hidden: HiddenCall
    module: nn.Module
    found: Projections

    def _formula(self, weights: Mapping[str, Tensor]) -> Lines:
        """q, k and v through the module's own weights, attention, and its output projection, in float64."""
        s, context = self.hidden.sizes, "x" if self.hidden.context is None else "context"
        lines, dh = [], self.f.orders.heads == "dh"
        back = "unflatten(-1, (-1, {})).permute(0, 3, 1, 2)" if dh else "unflatten(-1, ({}, -1)).transpose(1, 2)"
        heads = {"q": s.heads, "k": s.kv_heads, "v": s.kv_heads}
        if self.found.single_heads:
            for role in dict.fromkeys(p.role for p in self.found.found if p.head is not None):
                ones = [self._product(p, context if "q" not in p.role else "x", weights) for p in self.found.of(role)]
                if len(role) > 1:
                    raise NotWritten("fused projections of single heads")
                lines.append(f"{role} = torch.stack([{', '.join(ones)}], 1)")
        for p in self.found.found if not self.found.single_heads else ():
            if p.role == "o":
                continue
            if len(p.role) == 1:
                product = self._product(p, "x" if p.role == "q" else context, weights)
                lines.append(f"{p.role} = ({product}).{back.format(heads[p.role])}")
                continue
            sources = {"x": "q", context: "kv"} if "q" in p.role and context != "x" else {context: p.role}
            for source, roles in sources.items():
                lines += self._parts(p, self._product(p, source, weights), roles)
            lines += [f"{role} = {role}.{back.format(heads[role])}" for role in p.role]
        *scores, last = self._right()
        expected = last.removeprefix("expected = ")
        merged = ".permute(0, 2, 3, 1).flatten(2)" if dh else ".transpose(1, 2).flatten(2)"
        lines += [*scores, f"y = ({expected}){merged}"]
        outputs = self.found.of("o")
        lines.append(f"expected = {self._product(outputs[0], 'y', weights)}" if outputs else "expected = y")
        return lines

    def _parts(self, p: Projection, product: str, wanted: str) -> Lines:
        """The line that takes what a fused projection gives apart; parts that are not wanted go to `_`."""
        s = self.hidden.sizes
        order = self.f.orders.qkv if p.role == "qkv" else self.f.orders.kv
        group, parts = s.heads // s.kv_heads, list(order.split("|") if "|" in order else p.role)
        names = ", ".join(part if part in wanted else "_" for part in parts)
        if "|" in order:
            widths = {"q": s.heads * s.head_dim, "k": s.kv_heads * s.head_dim, "v": s.kv_heads * s.v_dim}
            return [f"{names} = ({product}).split({[widths[part] for part in parts]}, -1)"]
        if order == "per-head":
            sizes = [{"q": group * s.head_dim, "k": s.head_dim, "v": s.v_dim}[part] for part in parts]
            split = f"({product}).unflatten(-1, ({s.kv_heads}, -1)).split({sizes}, -1)"
        else:
            sizes = [group if part == "q" else 1 for part in parts]
            split = f"({product}).unflatten(-1, ({s.kv_heads}, {s.head_dim}, -1)).mT.split({sizes}, 3)"
        return [f"{names} = (y.flatten(2) for y in {split})"]

    def _product(self, p: Projection, source: str, weights: Mapping[str, Tensor]) -> str:
        """What a projection gives, in float64, by its parameters."""
        w = p.weight.detach().to(self.hidden.x.dtype).double()
        name = f"module.get_parameter({p.name!r})"
        s = self.hidden.sizes
        one = p.head is not None
        if p.role == "o":
            place = {"o": self.f.orders.columns("v", s.heads, s.heads, s.head_dim, s.v_dim)["v"]}
        else:
            counts = (1, 1) if one else (s.heads, s.kv_heads)
            place = self.f.orders.columns(p.role, *counts, s.head_dim, s.v_dim)
        role, columns = next(iter(place.items()))
        for matrix, text in ((w.mT, ".mT"), (w, "")):
            part = (matrix[columns] if self.f.orders.heads == "dh" else matrix) if p.role == "o" else None
            with contextlib.suppress(IndexError):
                part = matrix[:, columns] if part is None else part
                start = p.head * len(columns) if p.head is not None else 0
                used = weights[role] if p.role == "o" else weights[role][:, start : start + len(columns)]
                if used.shape == part.shape and torch.equal(used, part):
                    bias = bias_name(self.module, p)
                    added = f" + module.get_parameter({bias!r}).double()" if bias else ""
                    return f"{source}.double() @ {name}.double(){text}{added}"
        raise NotWritten(f"the matrix that {p.name} is used as")
