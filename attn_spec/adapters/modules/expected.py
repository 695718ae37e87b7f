"""What a module is expected to do before it is run: the conventions that its names, its source and its buffers tell."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.modules import sessions
from attn_spec.adapters.modules.constructor_names import ROLE_OF
from attn_spec.adapters.modules.forward import LENGTHS
from attn_spec.conventions import Finding

if TYPE_CHECKING:
    from attn_spec.adapters.modules.core import ModuleFunction

BY_LENGTH = ("context_length", "block_size", "context_size", "n_ctx", "ctx_len")  # constructor names that imply causal
TRIANGLE = r"\b(tril|triu)_?\s*\(|is_causal\s*=\s*True|causal\s*=\s*True"
# positions of keys beside those of queries, of which one has an axis more: `j <= i[:, None]`
COMPARED = r"\w+ (?:<=?|>=?) (?!len|size)\w+(?:\[0\])?\[(?::|\.\.\.), None\]"


def expectations(f: ModuleFunction) -> dict[str, Finding]:
    """The conventions that a module's names and buffers stand for."""
    found = {"layout": Finding("BHSD", "assumed", "between its projections")}
    found["layout_out"] = Finding("BHSD", "assumed", "between its projections")
    names = set(f.forward.roles.values())
    if f.variants.get("window") == "sliding_window":
        found["window"] = Finding("count", "assumed", "`sliding_window` is Hugging Face's name: keys, its own counted")
    wraps = any(isinstance(m, nn.MultiheadAttention) for m in f.module.modules())
    layer = {"src_mask", "src_key_padding_mask"} <= names
    if f.multihead or layer or {"key_padding_mask", "attn_mask" if wraps else "need_weights"} <= names:
        why = f"nn.{'TransformerEncoderLayer' if layer else 'MultiheadAttention'}'s names: True = hidden"
        found |= {name: Finding("masked", "assumed", why) for name in ("polarity", "padding_polarity")}
    found |= {} if f.by_mask else documented(f.module)
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


HIDDEN = (
    r"hid(?:den|es?)|mask(?:ed|s)(?: out)?|ignored?|pad(?:ded|ding|s)?|blocked|excluded"
    r"|not (?:be )?(?:attend|seen|allowed)\w*"
)
SEEN = r"keep|kept|attend(?:ed|s)?|seen|visible|valid|real|allowed|(?:may|can|to) (?:be )?(?:attend|see)\w*"
MEANS = r"\bTrue\b(?:`|\s|=|:|-|->|means?|marks?|where|is|are|for|at|in|a|an|the|may|be|positions?|tokens?|keys?|to)*"


def documented(module: nn.Module) -> dict[str, Finding]:
    """The polarity of bool masks that the docstrings of a module state: "True = hidden", "True where padded"."""
    told: dict[str, set[str]] = {"polarity": set(), "padding_polarity": set()}
    words = [inspect.getdoc(owner) or "" for owner in (type(module), type(module).forward) if owner.__doc__]
    for clause in re.split(r"[;.\n]", "\n".join(words)):
        found = re.search(rf"{MEANS}\b(?:({HIDDEN})|({SEEN}))\b", clause)
        if found is None:
            continue
        value = "masked" if found.group(1) else "attend"
        padding = re.search(r"\w*pad\w*mask|\w*key_mask", clause)
        if padding:
            told["padding_polarity"].add(value)
        if re.search(r"mask", re.sub(r"\w*(?:pad|key_)\w*", "", clause)):
            told["polarity"].add(value)
    return {
        name: Finding(next(iter(values)), "assumed", "a docstring says what True means")
        for name, values in told.items()
        if len(values) == 1
    }


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
    """The first comparison of the positions of keys with those of queries: `j <= i[:, None]`, `i - j >= 0` in a mask.

    Both sides have to be made by `arange`, so that lengths are none, and no window may be taken off. "": there is none.
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

    def distance(side: ast.expr) -> bool:
        return (
            isinstance(side, ast.BinOp)
            and isinstance(side.op, ast.Sub)
            and position(side.left)
            and position(side.right)
        )

    apart = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and distance(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def beyond(side: ast.expr, other: ast.expr) -> bool:  # i - j >= 0
        between = distance(side) or (isinstance(side, ast.Name) and side.id in apart)
        return between and isinstance(other, ast.Constant) and other.value == 0

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = node.left, node.comparators[0]
            if not isinstance(node.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
                continue
            if position(left) and position(right):
                return ast.unparse(node)
            if (beyond(left, right) or beyond(right, left)) and _hides(tree, node):
                return ast.unparse(node)
    return ""


def _hides(tree: ast.AST, condition: ast.expr) -> bool:
    """Whether a condition, or what it is assigned to, is what logits are hidden by."""
    names: set[str] = set()

    def holds(node: ast.AST) -> bool:
        return any(n is condition or (isinstance(n, ast.Name) and n.id in names) for n in ast.walk(node))

    for _ in range(2):  # ok = i - j >= 0; mask = ok & near
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and holds(node.value) and isinstance(node.targets[0], ast.Name):
                made_by = {ast.unparse(call.func) for call in ast.walk(node.value) if isinstance(call, ast.Call)}
                names |= set() if made_by else {node.targets[0].id}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    return any(
        holds(argument)
        for call in calls
        if call.func.attr in ("masked_fill", "masked_fill_", "scaled_dot_product_attention")  # type: ignore[attr-defined]
        or (call.func.attr == "where" and re.search(r"inf|min", ast.unparse(call)))  # type: ignore[attr-defined]
        for argument in [*call.args, *(k.value for k in call.keywords)]
    )


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
        return inspect.getsource(getattr(kind, of)) if of else class_source(kind)
    except (OSError, TypeError):  # a class that was renamed can't be found by its name
        return "" if of else f"{kind.__doc__ or ''}\n{source_of(module, of='forward')}"


def triangle_of(module: nn.Module) -> str:
    """The name of a triangular buffer; "" where there is none."""
    return next((name for name, buffer in module.named_buffers() if _is_triangle(buffer)), "")


def class_source(kind: type) -> str:
    """As inspect.getsource, which until Python 3.13 parses the whole file for it, however long it is.

    Raises OSError or TypeError where it can't be read.
    """
    module = sys.modules.get(kind.__module__)
    if module is None:
        return inspect.getsource(kind)
    lines, _ = inspect.findsource(module)
    begins = re.compile(rf"\s*class {kind.__name__}\b")
    found = [n for n, line in enumerate(lines) if begins.match(line)]
    return "".join(inspect.getblock(lines[found[0] :])) if len(found) == 1 else inspect.getsource(kind)


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
