"""From what was typed on the command line to a callable: the names a target can have, and what can be wrong with it."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from attn_spec.adapters.signature import TargetError
from attn_spec.interpreter import VARIABLE, interpreted, prepare
from attn_spec.reference import BUILTINS

FORMS = "give pkg.mod.attr, pkg.mod:attr, path/file.py:attr or a built-in name"


@dataclass(frozen=True, eq=False)
class Target:
    """A callable found by its name.

    name: a short one, fit for a test id.  target: as it was given.  object: the callable.
    import_line: plain Python that binds the callable to `impl`, for a reproducer.
    """

    name: str
    target: str
    object: Any
    import_line: str


def resolve(target: str) -> Target:
    """Find the callable that a target names; the current directory is importable.

    `pkg.mod.attr` (attributes may be nested), `pkg.mod:attr`, `path/file.py:attr`, or a name of `BUILTINS`.
    Raises TargetError where it does not exist (the nearest names are offered), raises on import (with its own
    traceback, short), is not callable, or is a class that is no nn.Module.
    """
    found = _found(target)
    if not interpreted():
        return found
    line = f"import os\n\nos.environ[{VARIABLE!r}] = '1'  # before triton is imported\n{found.import_line}"
    return replace(found, import_line=line)


def _found(target: str) -> Target:
    if interpreted():
        with suppress(ImportError):  # without triton there is nothing to prepare
            prepare()
    if target in BUILTINS:
        return _builtin(target)
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    path, _, attribute = target.rpartition(":")
    if path.endswith(".py") or (target.endswith(".py") and not path):
        return _from_file(target, Path(path or target), attribute if path else "")
    if not target or not all(part.isidentifier() for part in target.replace(":", ".").split(".")):
        raise TargetError(f"{target!r} is no target; {FORMS}: {', '.join(BUILTINS)}")
    return _from_module(target)


# a built-in name -----------------------------------------------------------------------------------------------------


def _builtin(name: str) -> Target:
    module_name, _, attribute = BUILTINS[name].partition(":")
    module = importlib.import_module(module_name)
    line = f"from {module_name} import {attribute} as impl"
    if module_name.startswith("attn_spec."):
        line = _standing_alone(module, attribute) or line
    return Target(name, name, getattr(module, attribute), line)


def _standing_alone(module: ModuleType, attribute: str) -> str:
    """The source of a function of ours with all it needs of its module, for a reproducer; "" where that needs us."""
    source = inspect.getsource(module)
    nodes = [node for node in ast.parse(source).body if getattr(node, "module", "") != "__future__"]
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    defined = {name: node for node in nodes for name in _names_bound(node) if node not in imports}
    wanted, needed = [attribute], set()
    while wanted:
        node = defined.get(wanted.pop())
        if node is not None and node not in needed:
            needed.add(node)
            wanted += [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    used = {inner.id for node in needed for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    for node in imports:
        if used & set(_names_bound(node)):
            needed.add(node)
    pieces = [ast.get_source_segment(source, _with_decorators(node)) or "" for node in nodes if node in needed]
    if any("attn_spec" in piece for piece in pieces):
        return ""
    head = [piece for piece in pieces if piece.startswith(("import ", "from "))]
    rest = [piece for piece in pieces if piece not in head]
    return "\n".join(head) + "".join(f"\n\n\n{piece}" for piece in rest) + f"\n\n\nimpl = {attribute}"


def _names_bound(node: ast.stmt) -> list[str]:
    """The names that a statement at the top of a module binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [alias.asname or alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _with_decorators(node: ast.stmt) -> ast.stmt:
    """The same piece of source from its first decorator on."""
    decorators = getattr(node, "decorator_list", [])
    if not decorators:
        return node
    first = decorators[0]
    whole = ast.Pass(lineno=first.lineno, col_offset=first.col_offset - 1)
    whole.end_lineno, whole.end_col_offset = node.end_lineno, node.end_col_offset
    return whole


# pkg.mod.attr and pkg.mod:attr ---------------------------------------------------------------------------------------


def _from_module(target: str) -> Target:
    module_name, colon, attribute = target.partition(":")
    if colon:
        module = _import(module_name, target)
        names = attribute.split(".")
    else:
        module, names = _longest_module(target)
        if not names:
            raise TargetError(f"{target}: is a module; name a function in it{_functions(module)}")
    found = _attribute(module, names, target)
    _check_callable(found, target)
    return Target(names[-1], target, found, _import_line(module, names))


def _longest_module(target: str) -> tuple[ModuleType, list[str]]:
    """The module at the head of a dotted target, and the attributes that are left."""
    parts = target.split(".")
    module = _import(parts[0], target)
    for place, part in enumerate(parts[1:], start=1):
        last = place == len(parts) - 1
        found = _lazily(module, part, target)
        if last and found is not None and not isinstance(found, ModuleType):
            return module, parts[place:]
        dotted = ".".join(parts[: place + 1])
        if _is_submodule(module, dotted):
            module = _import(dotted, target)
        elif isinstance(found, ModuleType):
            module = found
        else:
            return module, parts[place:]
    return module, []


def _lazily(module: ModuleType, name: str, target: str) -> Any:
    """An attribute of a module, which may be imported only now; None where there is none."""
    try:
        return getattr(module, name, None)
    except Exception as error:  # whose cause is what was raised inside, where the package says it anew
        raise TargetError(_raised(target, error.__cause__ or error)) from None


def _is_submodule(parent: ModuleType, dotted: str) -> bool:
    if dotted in sys.modules:
        return True
    if not hasattr(parent, "__path__"):
        return False
    try:
        return importlib.util.find_spec(dotted) is not None
    except (ImportError, ValueError):
        return False


def _import(name: str, target: str) -> ModuleType:
    """Import a module; TargetError tells one that does not exist from one that raises."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise TargetError(_no_module(error.name, target)) from None
        raise TargetError(_raised(target, error)) from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's own code, which may even call sys.exit
        raise TargetError(_raised(target, error)) from None


def _no_module(name: str, target: str) -> str:
    parent, _, last = name.rpartition(".")
    if parent:
        module = sys.modules.get(parent)
        near = _nearest(last, _module_names(getattr(module, "__path__", [])))
        return f"{target}: no module {last!r} in {parent}{_offer([f'{parent}.{n}' for n in near])}"
    builtin = "" if "." in target or ":" in target else f"; built-in names are {', '.join(BUILTINS)}"
    near = _nearest(target, list(BUILTINS)) if builtin else []
    near += _nearest(name, _module_names([os.getcwd()])) or _nearest(name, _importable(), cutoff=0.8)
    return f"{target}: no module {name!r} on the path or in {os.getcwd()}{_offer(near)}{builtin}"


def _module_names(folders: Any) -> list[str]:
    """The modules and packages that lie in some folders."""
    names = []
    for folder in folders:
        for entry in Path(folder).iterdir() if os.path.isdir(folder) else []:
            if entry.suffix == ".py" or (entry / "__init__.py").is_file():
                names.append(entry.stem)
    return names


def _importable() -> list[str]:
    """The packages that a misspelt first part may have meant: those in use already."""
    return sorted({name.partition(".")[0] for name in sys.modules if not name.startswith("_")})


def _attribute(module: ModuleType, names: list[str], target: str) -> Any:
    found: Any = module
    for place, name in enumerate(names):
        try:
            found = getattr(found, name)
        except ImportError as error:
            raise TargetError(_raised(target, error.__cause__ or error)) from None
        except AttributeError:
            where = ".".join([module.__name__, *names[:place]])
            known = [n for n in dir(found) if not n.startswith("_")]
            near = _nearest(name, known + _module_names(getattr(found, "__path__", [])))
            there = _offer(near) or (_functions(found) if isinstance(found, ModuleType) else "")
            raise TargetError(f"{target}: no {name!r} in {where}{there}") from None
    return found


# path/file.py:attr ---------------------------------------------------------------------------------------------------


def _from_file(target: str, path: Path, attribute: str) -> Target:
    if not path.is_file():
        folder = path.parent if path.parent.is_dir() else Path()
        near = _nearest(path.name, [p.name for p in folder.glob("*.py")])
        raise TargetError(f"{target}: no file {path}{_offer([str(folder / n) for n in near])}")
    path = path.resolve()
    module, root, dotted = _load(path, target)
    if not attribute:
        raise TargetError(f"{target}: names no function; write {target}:NAME{_functions(module)}")
    names = attribute.split(".")
    found = _attribute(module, names, target)
    _check_callable(found, target)
    line = f"import sys\n\nsys.path.insert(0, {str(root)!r})\n"
    if dotted.isidentifier() or "." in dotted:
        return Target(names[-1], target, found, line + _plain_import(dotted, names))
    line += "import importlib.util\n\n"
    line += f"spec = importlib.util.spec_from_file_location({path.stem!r}, {str(path)!r})\n"
    line += "module = importlib.util.module_from_spec(spec)\nspec.loader.exec_module(module)\n"
    return Target(names[-1], target, found, line + f"impl = module.{attribute}")


def _load(path: Path, target: str) -> tuple[ModuleType, Path, str]:
    """Load a file, as part of its package where it lies in one: the module, the folder to import from, the name."""
    root, names = path.parent, [path.stem]
    while (root / "__init__.py").is_file() and root.name.isidentifier():
        names.insert(0, root.name)
        root = root.parent
    dotted = ".".join(names)
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    present = sys.modules.get(dotted)
    if present is not None and getattr(present, "__file__", None) == str(path):
        return present, root, dotted
    if len(names) > 1 and present is None:
        return _import(dotted, target), root, dotted
    name = dotted if present is None else f"{path.stem}_judged"  # a file may be called what a library is called
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # the user's own code, which may even call sys.exit
        del sys.modules[name]
        raise TargetError(_raised(target, error)) from None
    return module, root, dotted if present is None else ""


# what is said about it -----------------------------------------------------------------------------------------------


def _check_callable(found: Any, target: str) -> None:
    torch = sys.modules.get("torch")
    module_type = torch.nn.Module if torch is not None else ()
    if inspect.isclass(found) and not issubclass(found, module_type or ()):
        raise TargetError(
            f"{target}: is a class and no nn.Module; name a function of q, k and v, a module, or write a function that "
            f"makes an instance and calls it: def attention(q, k, v): ..."
        )
    if not callable(found):
        raise TargetError(
            f"{target}: is a {type(found).__name__}, which can't be called; name a function f(q, k, v, ...) or an "
            f"nn.Module"
        )


def _raised(target: str, error: BaseException) -> str:
    """That a target raises on import, with the last frames that are in the user's own files."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and not frame.filename.startswith("<frozen") and "importlib" not in frame.filename
    ]
    lines = traceback.format_list(frames[-3:]) + traceback.format_exception_only(error)
    shown = "".join(lines).rstrip().replace("\n", "\n  ")
    return f"{target}: raises {type(error).__name__} when it is imported:\n  {shown}"


def _nearest(word: str, words: list[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(word, sorted(set(words)), n=3, cutoff=cutoff)


def _offer(names: list[str]) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(names))}?" if names else ""


def _functions(module: ModuleType) -> str:
    own = [n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    public = [n for n in own if not n.startswith("_")][:8]
    return f", such as {', '.join(public)}" if public else ""


def _import_line(module: ModuleType, names: list[str]) -> str:
    """Python that imports the attribute as `impl`, from wherever the reproducer is kept."""
    line = _plain_import(module.__name__, names)
    file = getattr(sys.modules.get(module.__name__.partition(".")[0]), "__file__", None)
    here = Path.cwd()
    if file is None:
        return line
    top = Path(file).resolve().parent
    if "." in module.__name__ or Path(file).name == "__init__.py":
        top = top.parent
    if top == here.resolve() and "site-packages" not in top.parts:
        return f"import sys\n\nsys.path.insert(0, {str(here)!r})\n{line}"
    return line


def _plain_import(module: str, names: list[str]) -> str:
    real = getattr(sys.modules.get(module), "__spec__", None) is not None  # torch.ops.aten can't be imported from
    if not real:
        return f"import {module.partition('.')[0]}\n\nimpl = {'.'.join([module, *names])}"
    if len(names) == 1:
        return f"from {module} import {names[0]} as impl"
    return f"from {module} import {names[0]}\n\nimpl = {'.'.join(names)}"
