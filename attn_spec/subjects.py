"""From what was asked for (targets, a configuration file) to the implementations that are judged."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from attn_spec.adapters.adapt import adapt
from attn_spec.adapters.apart import Apart
from attn_spec.adapters.implementation import Implementation, described
from attn_spec.adapters.modules.adapter import callable_of
from attn_spec.adapters.resolve import resolve
from attn_spec.adapters.signature import TargetError
from attn_spec.config import Config, ConfigError, ImplementationConfig, load, shipped_ledger
from attn_spec.engine import AXES, KnownFailure, Subject
from attn_spec.invariants import load as load_laws
from attn_spec.law import LAWS

REQUIRABLE = (
    "mask",
    "causal",
    "scale",
    "bias",
    "key padding",
    "window",
    "softcap",
    "alibi",
    "sinks",
)  # parameters by what they are for


@dataclass(eq=False)
class Chosen:
    """One implementation that is judged: the subject, its entry of the configuration, its own known failures."""

    subject: Subject
    entry: ImplementationConfig
    source: str = ""

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def own_ledger(self) -> tuple[KnownFailure, ...]:
        """The entries that the user wrote (ours may be out of date for a version of torch; theirs may not)."""
        return self.entry.ledger()


def find_config(given: str | None, root: Path) -> Config | None:
    """The configuration that was named, else attn.yaml at the root; None where there is neither."""
    if given is not None:
        return load(given)
    path = root / "attn.yaml"
    return load(path) if path.is_file() else None


def choose(
    targets: list[str],
    config: Config | None = None,
    *,
    named: bool = False,
    timeout_s: float = 0.0,
    device: str = "cpu",
) -> list[Chosen]:
    """Resolve and measure what is judged: the targets, or all that a configuration names.

    named: the configuration was asked for, so that a target it does not know is an error.
    timeout_s: call each target in a process of its own, and give up on a call after so long; 0: in this process.
    device: where they are called.
    Raises TargetError or ConfigError.
    """
    if config is not None:
        _check_codes(config)
    wanted: dict[str, tuple[str, str, ImplementationConfig, str]] = {}  # target -> name, target, entry, source
    for target in targets or (list(config.implementations) if config is not None else []):
        name, entry, source = "", ImplementationConfig(), ""
        found = config.find(target, only=len(targets) == 1) if config is not None else None
        if found is None and named and config is not None:
            known = ", ".join(config.implementations)
            raise ConfigError(f"{config.path}: names {known}, and nothing for {target}; add it, or leave the file out")
        if found is not None and config is not None:
            name, entry, source = *found, str(config.path)
            if entry.target is None and not targets:
                raise ConfigError(f"{config.path}: names no target; add `target: pkg.mod.attr` or give --attn-impl")
            name, target = ("" if config.flat else name), entry.target or target
        wanted.setdefault(target, (name, target, entry, source))
    chosen = [_adapted(*one, timeout_s, device) for one in wanted.values()]
    names = [one.name for one in chosen]
    for one in chosen:
        if names.count(one.name) > 1:  # told apart by the whole target
            one.subject.implementation.name = _as_name(one.subject.implementation.target)
    return chosen


def _adapted(name: str, target: str, entry: ImplementationConfig, source: str, timeout_s: float, device: str) -> Chosen:
    found = resolve(target)
    name = _as_name(name or found.name)
    try:
        function = callable_of(found.object, name, entry.declared())
        if timeout_s:
            function = Apart(target, function, timeout_s, entry.declared())
        implementation = adapt(
            function,
            name=name,
            target_name=target,
            import_line=found.import_line,
            declared=entry.declared(),
            device=device,
        )
    except TargetError:
        raise
    except ValueError as error:
        raise ConfigError(f"{source or target}: {error}") from error
    except Exception as error:  # an error of ours: say whose it is, without a page of traceback
        raise TargetError(f"{target}: attn-spec failed while it measured this: {described(error)}") from error
    _check_required(implementation, entry.require, source or target)
    return Chosen(Subject(implementation, entry.policy(shipped_ledger(target))), entry, source)


def _check_required(implementation: Implementation, required: list[str], source: str) -> None:
    """Raise ConfigError where `require` names nothing: a misspelt requirement would be none."""
    load_laws()
    signature = getattr(implementation.adapter, "signature", None)
    parameters = [p.name for p in signature.parameters] if signature is not None else []
    known = [*AXES, *REQUIRABLE, *parameters, *(word for law in LAWS.values() for word in (law.code, law.name))]
    for word in required:
        if word not in known:
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"axes are {', '.join(AXES)}; or the code or name of a law"
            raise ConfigError(f"{source}: require: {word!r} names nothing; {hint}")


def _as_name(text: str) -> str:
    """A name that is fit for a test id."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-")


def _check_codes(config: Config) -> None:
    if not any(entry.known_failures for entry in config.implementations.values()):
        return
    load_laws()
    known = [word for law in LAWS.values() for word in (law.code, law.name)]
    for name, entry in config.implementations.items():
        for failure in entry.known_failures:
            if failure.check not in known:
                near = difflib.get_close_matches(failure.check, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "`attn-spec list` shows them all"
                raise ConfigError(
                    f"{config.path}: implementations.{name}.known_failures: {failure.check!r} is the code or name of "
                    f"no law; {hint}"
                )
