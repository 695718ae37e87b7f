"""Pieces of plain torch of which reproducers are made."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from typing import Any

SNIPPETS = {
    "one_hot": '''
def one_hot(v):
    """V = the identity, so that the output is the weights."""
    n = v.shape[2]
    return torch.eye(n, max(n, v.shape[3]), dtype=v.dtype).expand(*v.shape[:2], -1, -1).contiguous()
''',
    "sliced": '''
def sliced(x):
    """A slice of a larger tensor, with junk on either side in every row."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 6), 1e4, dtype=x.dtype)
    wide[..., 3:-3] = x
    return wide[..., 3:-3]
''',
    "stepped": '''
def stepped(x):
    """Every other channel of a tensor that is twice as wide, with junk in between."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), 1e4, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]
''',
    "guarded": '''
def guarded(x):
    """Contiguous in the middle of a storage that is NaN before and after."""
    guard = x.new_full((64,), torch.nan)
    return torch.cat([guard, x.flatten(), guard])[64 : 64 + x.numel()].view(x.shape)
''',
    "state": """
def state():
    modes = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return *modes, torch.get_num_threads(), torch.get_rng_state().tolist()
""",
}
LAYOUTS = {
    "contiguous": "{}",
    "transposed": "{}.transpose(1, 2).contiguous().transpose(1, 2)",
    "sliced": "sliced({})",
    "guarded": "guarded({})",
    "stepped": "stepped({})",
    "expanded": "{}[:1].expand(x.shape)",
    "one-key": "{}",
}
Lines = list[str]


def element(index: Sequence[int], bound: float, got: str = "out", right: str = "expected") -> Lines:
    element = ", ".join(map(str, index))
    return [
        f"got, right = {got}[{element}].item(), {right}[{element}].item()",
        'print(f"got {got:.6g}, expected {right:.6g}")',
        f'assert abs(got - right) <= {bound:.3g}, "more than rounding explains"',
    ]


def joined(terms: list[str], operator: str) -> str:
    return terms[0] if len(terms) == 1 else f"({operator.join(terms)})"


def unless(value: Any, usual: Any, text: str) -> str:
    return "" if value == usual else text.format(value)


def source_of(function: Any, kind: str) -> str:
    """The source of a function without its docstring, and without the branches for other kinds of values."""
    source = inspect.getsource(function)
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    lines: list[str | None] = list(source.splitlines())
    for place, statement in enumerate(definition.body):
        test = ast.unparse(statement.test) if isinstance(statement, ast.If) else ""
        docstring = place == 0 and ast.get_docstring(definition) is not None
        if docstring or ("kind == " in test and f"kind == {kind!r}" not in test):
            assert statement.end_lineno is not None
            for n in range(statement.lineno - 1, statement.end_lineno):
                lines[n] = None
    return "\n".join(line for line in lines if line is not None)
