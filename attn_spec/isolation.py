"""What a judged run collects: our suites and nothing else, whatever the user's own tests are set up to do.

Each of these was seen to go wrong in a run that shared the user's settings: their `python_files` or `python_functions`
collected nothing of ours, an autouse fixture of theirs errored every check, an `attention` fixture in their conftest
replaced ours without a word, `addopts = tests` judged nothing and was green. So the suites are collected by path, under
node ids that are the same in every project, and conftest files are not loaded.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SUITES = Path(__file__).parent / "suites"
SETTINGS: dict[str, list[str]] = {
    "python_files": ["test_*.py"],
    "python_classes": [],
    "python_functions": ["test_"],
    "usefixtures": [],
    "filterwarnings": [],
}


@dataclass
class Selection:
    """What the command line selects of our suites; `ignored`: what it names that is none of ours, with the reason."""

    arguments: list[str] = field(default_factory=list)
    whole: bool = True
    ignored: list[str] = field(default_factory=list)


def without_conftests(early_config: pytest.Config) -> None:
    """Before conftest files are looked for: load none, and let the tree of collectors begin at our own files."""
    namespace = early_config.known_args_namespace
    namespace.noconftest = True
    namespace.confcutdir = str(SUITES / "__init__.py")  # nothing above a suite is looked at


def isolate(config: pytest.Config) -> Selection:
    """Make a configured run collect our suites, or what the command line selects of them."""
    option = config.option
    typed_here = {str(argument) for argument in config.invocation_params.args}
    for argument in option.file_or_dir:
        path = argument.partition("::")[0]
        if argument in typed_here and "suites" not in Path(path).parts and not Path(path).exists():
            raise pytest.UsageError(f"{argument}: no such file; a judged run takes attn_spec/suites/test_NAME.py")
    replayed = [str(SUITES / "test_replay.py")] if option.attn_replay else []
    selection = select([*option.file_or_dir, *replayed], option.attn_suite)
    if option.attn_replay:
        selection.arguments = selection.arguments[-1:]
    config.args = selection.arguments
    config.args_source = type(config.args_source).ARGS
    option.importmode = "importlib"
    option.pyargs = option.doctestmodules = False
    for name, value in SETTINGS.items():
        config.getini(name)[:] = value  # as Config.addinivalue_line does: the list is the setting
    typed = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.invocation_params.args]
    for flag, letter, name in (("-k", "k", "keyword"), ("-m", "m", "markexpr")):
        if getattr(option, name) and not _typed(typed, f"-[a-zA-Z]*{letter}.*"):
            selection.ignored.append(f"{flag} {getattr(option, name)} (of the project's addopts)")
            setattr(option, name, "")
    if not _typed(typed, "--deselect(=.*)?"):
        option.deselect = []
    if not _typed(typed, "(-W|--pythonwarnings).*"):
        config.known_args_namespace.pythonwarnings = option.pythonwarnings = []
    if quiet(config):
        option.tbstyle = "no"
    if not _typed(typed, "-[a-zA-Z]*r.*"):
        option.reportchars = ""
    return selection


def quiet(config: pytest.Config) -> bool:
    """Whether our summary stands in for pytest's tracebacks: unless the command line asks for them."""
    return not _typed(map(str, config.invocation_params.args), "--tb(=.*)?|--full-trace|--pdb")


def _typed(arguments: Iterable[Any], pattern: str) -> bool:
    return any(re.fullmatch(pattern, str(argument), re.DOTALL) for argument in arguments)


def select(arguments: list[str], suite: str = "") -> Selection:
    """Which of our files or node ids the positional arguments name, whatever folder they are given relative to.

    suite: the suite apart that they are of.
    """
    selection = Selection()
    for argument in arguments:
        path, colons, rest = argument.partition("::")
        parts = path.replace("\\", "/").rstrip("/").split("/")
        if parts[-1] == "suites" and not (Path(path).is_dir() and Path(path).resolve() != SUITES.resolve()):
            selection.arguments += files(suite)
        elif len(parts) > 1 and parts[-2] == (suite or "suites"):
            selection.arguments.append(f"{_file(parts[-1], argument, suite)}{colons}{rest}")
        else:
            selection.ignored.append(argument)
    if not selection.arguments:
        selection.arguments = files(suite)
    selection.whole = not suite and set(selection.arguments) == set(files())
    return selection


def files(suite: str = "") -> list[str]:
    return [str(path) for path in sorted((SUITES / suite).glob("test_*.py"))]


def _file(name: str, argument: str, suite: str) -> str:
    path = SUITES / suite / name
    if not path.is_file():
        names, folder = [Path(file).name for file in files(suite)], f"suites/{suite}".rstrip("/")
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {folder}/{near[0]}?" if near else f"the suites are {', '.join(names)}"
        raise pytest.UsageError(f"{argument}: attn-spec has no suite {name}; {hint}")
    return str(path)


class SuiteModule(pytest.Module):
    """A module of suites: its node id does not depend on the project, its tests not on the project's settings."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        for value in vars(self.obj).values():  # for `collect_imported_tests = false`
            if hasattr(value, "problems"):
                value.__module__ = self.obj.__name__
        return super().collect()

    def funcnamefilter(self, name: str) -> bool:
        return name.startswith("test_")

    def classnamefilter(self, name: str) -> bool:
        return False


def suite_module(path: Path, parent: pytest.Collector) -> SuiteModule | None:
    """The collector of one of our files; None for any other."""
    if SUITES not in (path.parent, path.parent.parent):
        return None
    place = path.relative_to(SUITES).as_posix()
    module: SuiteModule = SuiteModule.from_parent(parent, path=path, nodeid=f"attn_spec/suites/{place}")
    return module
