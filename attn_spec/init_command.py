"""`attn-spec init`: a first attn.yaml, written from what was understood of an implementation."""

from __future__ import annotations

import argparse
import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from attn_spec.config import SCHEMA, ConfigError, ImplementationConfig, json_schema

if TYPE_CHECKING:
    from attn_spec.adapters.implementation import Implementation

WIDTH = 116
EXAMPLES = """
require: [gqa, bfloat16]        # a refusal of these is red
strict: true                    # so is bad input that is taken without complaint
known_failures:                 # an entry that no longer fails is red
  - {check: ATN107, problem: "*Sk0*", reason: why it fails, link: "https://..."}
"""
FOR_MODULES = """
construct: {width: $hidden, config: {class: mypkg.Config}}   # what names can't tell its constructor
call: {position_ids: $positions}                             # what forward is given at each call
projections: {q: q_proj, k: k_proj, v: v_proj, o: out_proj}  # by dotted name
"""


def run(options: argparse.Namespace) -> Iterator[str]:
    """Write the file and tell of it, or print the schema.

    Raises ConfigError where no target is given or the file can't be written, TargetError for a target that can't be
    judged; nothing is written then.
    """
    if options.schema:
        yield json.dumps(json_schema(), indent=2)
        return
    if not options.target:
        raise ConfigError("init: names no target; give pkg.mod.attr, path/file.py:attr or a built-in name")
    path = Path(options.out)
    _check_free(path, options.force)
    from attn_spec.subjects import choose

    (chosen,) = choose([options.target], None)
    implementation = chosen.subject.implementation
    text = "\n".join(document(implementation, path)) + "\n"
    _check_free(path, options.force)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {path} can't be written: {error.strerror}") from None
    yield f"wrote {path}: what was understood of {implementation.target}"
    for one in implementation.contradictions:
        yield f"decide on {one.field}: {one.measured.value} is measured, {one.expected.value} is expected"
    config = "" if path == Path("attn.yaml") else f" --attn-config={path}"
    yield f"judge it: pytest --attn-impl={implementation.target}{config}"


def document(implementation: Implementation, path: Path) -> Iterator[str]:
    """The lines of a file at a path that declares nothing but what is to be decided upon."""
    yield f"# yaml-language-server: $schema={_schema_from(path)}"
    yield from _comment(
        f"What attn-spec understood of {implementation.target}. A line in comments holds as it stands; without "
        "its # it is declared, and what is measured must agree with it. `attn-spec describe` tells the same."
    )
    yield "implementations:"
    yield f"  {_scalar(implementation.name)}:"
    yield f"    target: {_scalar(implementation.target)}"
    yield ""
    for line in _conventions(implementation):
        yield f"    {line}"
    for title, lines in _more(implementation):
        yield ""
        yield from (f"    {line}" for line in _comment(title))
        yield from (f"    # {line}" for line in lines)


def _conventions(implementation: Implementation) -> Iterator[str]:
    open_ = {one.field: one for one in implementation.contradictions}
    module = bool(implementation.facts)
    for name, finding in implementation.conventions.rows():
        if name not in ImplementationConfig.model_fields or (module and name.startswith("layout")):
            continue
        if name in open_:
            one = open_[name]
            yield from _comment(
                f"To decide: {name} is measured as {one.measured.value} ({one.measured.evidence}), and expected to be "
                f"{one.expected.value} ({one.expected.evidence}). Write {one.measured.value} if that is meant."
            )
            yield f"{name}: {_scalar(one.expected.value)}"
        else:
            line = f"# {name}: {_scalar(finding.value)}"
            yield f"{line:28}  # {finding.how}: {_one_line(finding.evidence)}"
    for dtype in ("bfloat16", "float16"):
        if dtype in implementation.precision:
            precision = implementation.precision[dtype]
            fields = {key: getattr(precision, key) for key in ("scores", "weights", "accumulate")}
            finer = [f"{key}: {value}" for key, value in fields.items() if value != dtype]
            if finer:
                yield f"# precision: {{{', '.join(finer)}}}  # measured: on {dtype}"
            return


def _more(implementation: Implementation) -> Iterator[tuple[str, list[str]]]:
    """What else there is to say, and the keys to say it by."""
    if implementation.facts:
        found = [
            f"{name}: {finding.value} ({finding.how}: {finding.evidence})" for name, finding in implementation.facts
        ]
        yield "What was found out about the module:", [line for text in found for line in _wrapped(text)]
        yield "What can be said about it:", FOR_MODULES.strip().splitlines()
    signature = getattr(implementation.adapter, "signature", None)
    left = getattr(signature, "not_understood", ())
    if left:
        title = "Parameters that were not understood; to give them at each call, or to say what they stand for:"
        yield title, [f"fixed: {{{', '.join(f'{name}: null' for name in left)}}}", f"parameters: {{scale: {left[0]}}}"]
    if implementation.notes:
        yield "Notes:", [line for note in implementation.notes for line in _wrapped(note)]
    yield "How strictly it is judged:", EXAMPLES.strip().splitlines()


def _check_free(path: Path, force: bool) -> None:
    if path.is_dir():
        raise ConfigError(f"--out: {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"--out: there is no folder {path.parent}")
    if path.exists() and not force:
        raise ConfigError(f"--out: {path} is there already; name another file, or give --force to write over it")


def _schema_from(path: Path) -> str:
    """The shipped schema as seen from a file: relative inside one folder, so that the folder can move."""
    folder = path.resolve().parent
    return os.path.relpath(SCHEMA, folder) if SCHEMA.is_relative_to(folder) else str(SCHEMA)


def _comment(text: str) -> Iterator[str]:
    yield from (f"# {line}" for line in _wrapped(text))


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(_one_line(text), WIDTH - 6, break_long_words=False, break_on_hyphens=False)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _scalar(text: str) -> str:
    """A text as YAML reads it back: quoted where it holds more than a name or a path, or would be another type."""
    plain = re.fullmatch(r"[\w./-][\w./:-]*", text) and not text.endswith(":") and yaml.safe_load(text) == text
    return text if plain else json.dumps(text)
