"""Every way to name a target, and the import line that a reproducer gets from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.nn.functional as F

from attn_spec.adapters import resolve as resolving
from attn_spec.adapters.resolve import resolve
from attn_spec.adapters.signature import TargetError
from attn_spec.reference import BUILTINS

SOURCE = """
def attn(q, k, v):
    return v


class Kernels:
    @staticmethod
    def fast(q, k, v):
        return v
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current directory with a package, a plain file, and files with awkward names."""
    package = tmp_path / "judged_pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sub" / "__init__.py").write_text("from judged_pkg.sub.attn import attn\n")
    (package / "sub" / "attn.py").write_text(SOURCE)
    (package / "sub" / "relative.py").write_text("from . import attn as found\n")
    for name in ("judged_plain.py", "judged-dash.py", "types.py"):
        (tmp_path / name).write_text(SOURCE)
    before, path = set(sys.modules), list(sys.path)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - before:
        if "judged" in name:
            del sys.modules[name]


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("judged_plain.attn", "attn"),
        ("judged_plain:attn", "attn"),
        ("judged_plain.py:attn", "attn"),
        ("judged_plain:Kernels.fast", "fast"),
        ("judged_plain.Kernels.fast", "fast"),
        ("judged_pkg.sub.attn", "attn"),  # the function, which stands before the module of the same name
        ("judged_pkg.sub.attn.attn", "attn"),
        ("judged_pkg/sub/attn.py:Kernels.fast", "fast"),
        ("judged_pkg/sub/relative.py:found", "found"),
        ("judged-dash.py:attn", "attn"),
        ("types.py:attn", "attn"),
        ("torch.nn.functional.scaled_dot_product_attention", "scaled_dot_product_attention"),
        ("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
def test_the_import_line_binds_the_same_function(folder: Path, target: str, name: str) -> None:
    found = resolve(target)
    assert (found.name, found.target) == (name, target)
    names: dict[str, object] = {}
    exec(found.import_line, names)
    assert getattr(names["impl"], "__qualname__", "") == getattr(found.object, "__qualname__", "")


@pytest.mark.parametrize("name", BUILTINS)
def test_built_in_names(name: str) -> None:
    """Their import lines need nothing of ours, but for flash-attn, whose package may not be there, and our kernels."""
    found = resolve(name)
    assert callable(found.object)
    if name in ("flash-attn", "triton"):
        return
    assert "attn_spec" not in found.import_line
    names: dict[str, object] = {}
    exec(found.import_line, names)
    assert callable(names["impl"])
    if name == "sdpa":
        assert found.object is F.scaled_dot_product_attention


def test_an_import_line_turns_the_interpreter_on_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = resolve("naive").import_line
    monkeypatch.setattr(resolving, "prepare", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    line = resolve("naive").import_line
    assert line.endswith(plain)
    assert line.startswith("import os\n\nos.environ['TRITON_INTERPRET'] = '1'")


def test_what_raises_on_import_shows_its_own_lines(folder: Path) -> None:
    (folder / "judged_raises.py").write_text("def inner():\n    return 1 / 0\n\n\ninner()\n")
    for target in ("judged_raises.attn", "judged_raises.py:attn"):
        with pytest.raises(TargetError) as caught:
            resolve(target)
        text = str(caught.value)
        assert 'judged_raises.py", line 2, in inner' in text
        assert "resolve.py" not in text
        assert "importlib" not in text


def test_a_module_that_is_missing_inside_is_not_taken_for_the_target(folder: Path) -> None:
    (folder / "judged_needs.py").write_text("import no_such_library\n")
    with pytest.raises(TargetError, match="raises ModuleNotFoundError when it is imported"):
        resolve("judged_needs.attn")


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("judged_pkg.sbu.attn", "no 'sbu' in judged_pkg; did you mean sub?"),
        ("judged_plan.attn", "did you mean judged_plain"),
        ("judged_plain.atn", "no 'atn' in judged_plain; did you mean attn?"),
        ("judged_plain.py", "names no function; write judged_plain.py:NAME, such as attn"),
        ("judged_pkg/sub/atn.py:attn", "no file judged_pkg/sub/atn.py; did you mean judged_pkg/sub/attn.py?"),
        ("judged_plain", "is a module; name a function in it, such as attn"),
        ("sdpa_mth", "did you mean sdpa-math"),
        ("", "is no target"),
    ],
)
def test_the_nearest_name_is_offered(folder: Path, target: str, said: str) -> None:
    with pytest.raises(TargetError) as caught:
        resolve(target)
    assert said in str(caught.value)


@pytest.mark.parametrize("target", ["judged_lazy.late.attn", "judged_lazy:late.attn"])
def test_a_package_that_imports_late_and_can_not_is_no_crash(folder: Path, target: str) -> None:
    (folder / "judged_lazy.py").write_text(
        "def __getattr__(name):\n"
        "    if name.startswith('__'):\n"
        "        raise AttributeError(name)\n"
        "    try:\n"
        "        import judged_missing_part\n"
        "    except ImportError as error:\n"
        "        raise ModuleNotFoundError('are its requirements met?') from error\n"
    )
    with pytest.raises(TargetError, match="No module named 'judged_missing_part'"):
        resolve(target)
