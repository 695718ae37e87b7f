"""The adapter of functions of Hugging Face's attention interface, which take the module that calls them first.

    (module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs) -> (output, weights or None)

query, key and value are [B, H, S, D], masks have four axes, the output is [B, Sq, H, D]. A mask that is given holds
causality; where none is, `is_causal`, as an argument or an attribute of the module, asks for it in those that know it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attn_spec.adapters.signature import TargetError

FIRST = ("module", "query", "key", "value")


class Unknown(AttributeError):  # noqa: N818
    """An attribute that the module which stands in does not have."""


class CallingModule(nn.Module):
    """Stands for the module that calls such a function: it has the attributes that they read, and no parameters."""

    def __init__(self, query: Tensor, key: Tensor, is_causal: bool, **attributes: Any) -> None:
        super().__init__()
        groups = query.shape[1] // max(key.shape[1], 1)
        usual = {"num_key_value_groups": groups, "head_dim": query.shape[-1], "scaling": query.shape[-1] ** -0.5}
        usual |= {"is_causal": is_causal, "layer_idx": 0, "config": SimpleNamespace(), "sliding_window": None}
        for name, value in {**usual, **attributes}.items():
            setattr(self, name, value)
        self.eval()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise Unknown(name) from None


def is_interface(function: Any) -> bool:
    """Whether the names of a function's parameters are those of the interface."""
    if inspect.isclass(function) or not callable(function):
        return False
    try:
        names = tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[:4] == FIRST and "attention_mask" in names


def from_interface(function: Callable[..., Any], **module_attributes: Any) -> Callable[..., Any]:
    """A function (query, key, value, attention_mask=None, scaling=None, ...) that calls one of the interface.

    module_attributes: of the module that calls it, beside the usual ones or in their place.
    It takes `is_causal` where the function knows it, `dropout` where it names it (its module then trains), and
    `output_attentions` where the function returns its weights; what else the function takes keeps its name and default.
    The scale is D ** -0.5 where none is given. Its attribute `of_interface` is the function that it calls.
    Raises TargetError where the function is not of the interface, and in a call where its module lacks an attribute.
    """
    called = getattr(function, "__name__", type(function).__name__)
    if not is_interface(function):
        raise TargetError(
            f"{called}: is not of Hugging Face's attention interface, (module, query, key, value, attention_mask, ...)"
        )
    own = inspect.signature(function).parameters
    by_argument = "is_causal" in own

    def interface(query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **named: Any) -> Any:
        causal = bool(named.pop("is_causal", False))
        if causal and attention_mask is not None:
            raise NotImplementedError("is_causal beside a mask is not supported: the mask holds causality")
        if causal and query.shape[2] == 1 < key.shape[2]:
            raise NotImplementedError("is_causal is not supported for one query: it is the last, and sees every key")
        if named.get("scaling") is None:
            named["scaling"] = query.shape[-1] ** -0.5
        if by_argument:
            named["is_causal"] = causal
        if isinstance(attention_mask, Tensor):
            attention_mask = attention_mask[(None,) * (4 - attention_mask.dim())]
        module = CallingModule(query, key, causal, **module_attributes).train("dropout" in named)
        try:
            return function(module, query, key, value, attention_mask, **{"dropout": 0.0, **named})
        except Unknown as missing:
            why = f"{called}: reads {missing} of its module; give it: from_interface({called}, {missing}=...)"
            raise TargetError(why) from None
        except RuntimeError as error:
            if isinstance(attention_mask, Tensor) and attention_mask.dtype not in (query.dtype, torch.bool):
                why = f"a mask of {attention_mask.dtype} for inputs of {query.dtype} is not supported: {error}"
                raise NotImplementedError(why) from error  # callers of the interface give it the dtype of the query
            raise

    interface.__name__, interface.__doc__ = called, function.__doc__
    interface.__signature__ = _signature(function)  # type: ignore[attr-defined]
    interface.of_interface = function  # type: ignore[attr-defined]
    return interface


def declared_conventions(function: Callable[..., Any]) -> dict[str, str]:
    """The conventions of the interface, as attn.yaml has them; the form of masks is read from the function's code."""
    declared = {"layout": "BHSD", "layout_out": "BSHD", "polarity": "attend", "grouping": "contiguous"}
    declared["causal"] = "flag" if _knows_causality(function) else "never"
    if _adds_mask(function):
        declared["mask_form"] = "additive"
    return declared


def import_source(line: str, function: Callable[..., Any]) -> str:
    """Python that binds `impl` to a function of q, k and v, from a line that binds it to one of the interface."""
    own = inspect.signature(function).parameters
    causal = ", is_causal=is_causal" if "is_causal" in own else ""
    takes_causal = "is_causal=False, " if _knows_causality(function) else ""
    takes_dropout = "dropout=None, " if "dropout" in own else ""
    rate, training = ("dropout or 0.0", "dropout is not None") if takes_dropout else ("0.0", "False")
    return f"""{line}
from types import SimpleNamespace

interface = impl


class CallingModule(torch.nn.Module):
    pass


def impl(query, key, value, attention_mask=None, scaling=None, {takes_causal}{takes_dropout}**named):
    module = CallingModule().train({training})
    module.num_key_value_groups = query.shape[1] // key.shape[1]
    module.is_causal, module.head_dim = {"is_causal" if takes_causal else "False"}, query.shape[-1]
    module.layer_idx, module.config, module.sliding_window = 0, SimpleNamespace(), None
    scaling = module.scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is not None:
        attention_mask = attention_mask[(None,) * (4 - attention_mask.dim())]
    return interface(module, query, key, value, attention_mask, scaling=scaling, dropout={rate}{causal}, **named)"""


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Its own parameters without the module and what is None or False for all that is judged."""
    own = inspect.signature(function).parameters
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, named) for name in FIRST[1:]]
    parameters += [inspect.Parameter(name, named, default=None) for name in ("attention_mask", "scaling")]
    if _knows_causality(function):
        parameters.append(inspect.Parameter("is_causal", named, default=False))
    if "dropout" in own:
        parameters.append(inspect.Parameter("dropout", named, default=0.0))
    taken = {*FIRST, "attention_mask", "scaling", "dropout", "is_causal"}
    rest = [p for p in own.values() if p.name not in taken and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    parameters += [p.replace(kind=p.KEYWORD_ONLY) for p in rest]
    if "output_attentions" not in own and _returns_weights(function):
        parameters.append(inspect.Parameter("output_attentions", inspect.Parameter.KEYWORD_ONLY, default=False))
    return inspect.Signature(parameters)


# what only its code tells ---------------------------------------------------------------------------------------------


def _source(function: Callable[..., Any]) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return None


def _words(tree: ast.AST) -> set[str]:
    """Every name, attribute and text in it."""
    found = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    found |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return found | {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def _knows_causality(function: Callable[..., Any]) -> bool:
    """Whether it takes `is_causal`, or reads it of its module."""
    tree = _source(function)
    return "is_causal" in inspect.signature(function).parameters or (tree is not None and "is_causal" in _words(tree))


def _returns_weights(function: Callable[..., Any]) -> bool:
    """Whether the second thing that it returns is called weights or probabilities."""
    tree = _source(function)
    if tree is None:
        return False
    pairs = [node.value.elts for node in ast.walk(tree) if _returns_pair(node)]  # type: ignore[attr-defined]
    return bool(pairs) and all(
        isinstance(second, ast.Name) and re.search(r"weight|prob", second.id) for _, second, *_ in pairs
    )


def _returns_pair(node: ast.AST) -> bool:
    return isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and len(node.value.elts) >= 2


def _adds_mask(function: Callable[..., Any]) -> bool:
    """Whether it adds the mask to the logits, and never tells a bool mask from another."""
    tree = _source(function)
    if tree is None or {"bool", "masked_fill", "masked_fill_", "where"} & _words(tree):
        return False
    added = [side for node in ast.walk(tree) for side in _summands(node)]
    return any("mask" in word for side in added for word in _words(side))


def _summands(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [node.left, node.right]
    return [node.value] if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) else []
