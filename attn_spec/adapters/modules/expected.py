"""What a module is expected to do before it is run: the conventions that its names, its source and its buffers tell."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules import sessions
from attn_spec.adapters.modules.construct import ROLE_OF
from attn_spec.adapters.modules.forward import LENGTHS
from attn_spec.conventions import Finding

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

BY_LENGTH = ("context_length", "block_size", "context_size", "n_ctx", "ctx_len")  # constructor names that imply causal
TRIANGLE = r"\b(tril|triu)\s*\(|is_causal\s*=\s*True|causal\s*=\s*True"
# positions of keys beside those of queries, of which one has an axis more: `j <= i[:, None]`
COMPARED = r"\w+ (?:<=?|>=?) (?!len|size)\w+(?:\[0\])?\[(?::|\.\.\.), None\]"


def expectations(f: ModuleFunction) -> dict[str, Finding]:
    """The conventions that a module's names and buffers stand for."""
    found = {"layout": Finding("BHSD", "assumed", "between its projections")}
    found["layout_out"] = Finding("BHSD", "assumed", "between its projections")
    names = set(f.forward.roles.values())
    wraps = any(isinstance(m, nn.MultiheadAttention) for m in f.module.modules())
    layer = {"src_mask", "src_key_padding_mask"} <= names
    if f.multihead or layer or {"key_padding_mask", "attn_mask" if wraps else "need_weights"} <= names:
        why = f"nn.{'TransformerEncoderLayer' if layer else 'MultiheadAttention'}'s names: True = hidden"
        found |= {name: Finding("masked", "assumed", why) for name in ("polarity", "padding_polarity")}
    if names & set(LENGTHS):
        found["padding_polarity"] = Finding("attend", "assumed", "lengths count the keys that may be seen")
    built_causal = [n for n, v in f.declared.get("construct", {}).items() if ROLE_OF.get(n) == "causal" and v is True]
    if built_causal and "causal" not in f.forward.roles and not f.by_mask:
        found["causal"] = Finding("always", "declared", f"construct: {built_causal[0]}: true")
        return found
    triangle = triangle_of(f.module) if f.by_mask else ""
    if triangle:
        found["causal"] = Finding("always", "assumed", f"the buffer {triangle} is triangular")
        return found
    if "causal" in f.forward.roles or f.causal_by:
        how = {"constructor": "the constructor's flag", "mask": "the triangle goes in with the mask"}.get(f.causal_by)
        found["causal"] = Finding("flag", "assumed", how or f"parameter {f.forward.roles.get('causal')}")
        return found
    why = _why_causal(f)
    if why:
        found["causal"] = Finding("always", "assumed", why)
    else:
        found["causal"] = Finding(
            "never", "assumed", "treated as bidirectional: no flag, no triangle, no name says causal"
        )
    return found


def _why_causal(f: ModuleFunction) -> str:
    """Why a module is expected to be causal; "" where nothing says so.

    A mask parameter leaves causality to the caller, but where the module keeps a cache of its own sequence and hides
    the future itself, or makes a triangle whatever it was built with.
    """
    names = [type(f.module).__name__, f.__name__]
    told = next((n for n in names if re.search(r"causal|decoder", n, re.IGNORECASE) and "non" not in n.lower()), "")
    if told and not re.search(r"cross|encoder", told, re.IGNORECASE) and not f.takes_context:
        return f"the name {told} says so"
    masked = bool(f.forward.roles.get("mask"))
    keeps = not f.takes_context and sessions.protocol_of(f) is not None
    code = code_of(f.module)
    said = code if keeps or not masked else unconditional(code)
    found = re.search(TRIANGLE, said) or (re.search(COMPARED, code) if keeps else None)
    compared = found.group(0).strip("( ") if found else positions_compared(said)
    if compared:
        return f"its source says {compared}"
    if keeps and not masked:
        return "it keeps a cache and takes no mask"
    if triangle := triangle_of(f.module):
        return f"the buffer {triangle} is triangular"
    if f.constructor is not None and not masked:
        by_length = [p.name for p in f.constructor.parameters() if p.name in BY_LENGTH]
        if by_length:
            return f"the constructor takes {by_length[0]}"
    return ""


def code_of(module: nn.Module) -> str:
    """The code of a module's forward, of the methods that it calls, inherited ones too, and of functions beside them.

    Without comments, docstrings and defaults. Methods of torch and transformers are left out. "": none can be read.
    """
    owners = [k for k in type(module).__mro__ if k.__module__.partition(".")[0] not in ("torch", "transformers")]
    parts: list[str] = []
    called: dict[str, Any] = {}
    wanted, seen = [("forward", False)], set[Any]()
    while wanted:
        name, above = wanted.pop()
        found = [vars(owner)[name] for owner in owners if name in vars(owner)]
        for method in found if above else found[:1]:
            function = inspect.unwrap(getattr(method, "__func__", method)) if callable(method) else method
            if not inspect.isfunction(function) or function in seen:
                continue
            seen.add(function)
            parts.append(_bare(function))
            wanted += [(n, bool(of)) for of, n in re.findall(r"(?:self|(super)\(\))\.(\w+)\(", parts[-1])]
            known = {n: function.__globals__.get(n) for n in re.findall(r"(?<![\w.])([A-Za-z_]\w*)\(", parts[-1])}
            called |= {n: f for n, f in known.items() if inspect.isfunction(f) and f.__module__ == function.__module__}
    return "\n".join([*parts, *(_bare(function) for function in called.values())])


def unconditional(code: str) -> str:
    """The code without what is run only where a flag says so: an attribute (`if self.causal:`) or an argument."""
    return ast.unparse(_Always().visit(ast.parse(code)))


def _flag(test: ast.expr) -> bool:
    """Whether a test is more than one of sizes (`length > 1`) or of what is given (`mask is None`)."""
    if isinstance(test, ast.BoolOp):
        return any(_flag(one) for one in test.values)
    return not isinstance(test, ast.Compare) or "self." in ast.unparse(test)


class _Always(ast.NodeTransformer):
    """Takes out what lies behind a flag."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if _flag(node.test):
            return [self.visit(one) for one in node.orelse] or ast.Pass()
        return self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self.visit(node.orelse) if _flag(node.test) else self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        return ast.Constant(None) if _flag(node) else self.generic_visit(node)


def positions_compared(code: str) -> str:
    """The first comparison of the positions of keys with those of queries, `j <= i[:, None]`; "" where there is none.

    Both sides have to be made by `arange`, so that lengths are none, and no window may be taken off.
    """
    tree = ast.parse(code)
    ranges = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and "arange(" in ast.unparse(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def position(side: ast.expr) -> bool:
        if isinstance(side, ast.BinOp) and isinstance(side.op, ast.Add):  # j <= i + (kv_len - q_len)
            return position(side.left) and isinstance(side.right, ast.BinOp) and isinstance(side.right.op, ast.Sub)
        if isinstance(side, ast.Subscript):
            return position(side.value)
        if isinstance(side, ast.Call):
            of = side.func.value if isinstance(side.func, ast.Attribute) else None
            return "arange" in ast.unparse(side.func) or (
                of is not None and position(of)
            )  # i.unsqueeze(1), i.view(-1, 1)
        return isinstance(side, ast.Name) and side.id in ranges

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            ordered = isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE))
            if ordered and position(left) and position(right):
                return ast.unparse(node)
    return ""


def _bare(function: Any) -> str:
    """The body of a function without comments and docstring; "" where its source can't be read."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.args = ast.arguments([], [], None, [], [], None, [])
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def source_of(module: nn.Module, of: str = "") -> str:
    """The source of a module's class, or of one of its methods; "" where it can't be read."""
    kind = type(module)
    try:
        return inspect.getsource(getattr(kind, of) if of else kind)
    except (OSError, TypeError):  # a class that was renamed can't be found by its name
        return "" if of else f"{kind.__doc__ or ''}\n{source_of(module, of='forward')}"


def triangle_of(module: nn.Module) -> str:
    """The name of a triangular buffer; "" where there is none."""
    return next((name for name, buffer in module.named_buffers() if _is_triangle(buffer)), "")


def _is_triangle(buffer: Tensor) -> bool:
    if buffer.dim() < 2 or buffer.shape[-1] < 3 or buffer.shape[-1] != buffer.shape[-2]:
        return False
    x = buffer.reshape(-1, *buffer.shape[-2:])[0].double()
    ones = torch.ones_like(x)
    for diagonal in (0, 1, -1):  # one that is shifted is meant as one too
        above, below = x[ones.triu(1 + diagonal) == 1], x[ones.triu(1 + diagonal) == 0]
        if bool((above == above[0]).all() and (below == below[0]).all() and above[0] != below[0]):
            return True
    return False
