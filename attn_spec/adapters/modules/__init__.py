"""How an nn.Module is judged: built for the sizes of a problem, its projections give way to the problem's q, k and v.

construct.py     from a class and sizes to a module: what the names of constructor arguments stand for
projections.py   which parameters project q, k, v and the output
inject.py        the run in which the projections' results are the problem's q, k and v
forward.py       what the names of forward's arguments stand for
core.py          the module as a function of q, k and v, and as a whole on hidden states
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_spec.problem import Problem


def for_trace(
    found: Any, problem: Problem, declared: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """A module class, instance or factory as what to call on a problem: in eval mode, with its inputs and arguments.

    Raises TargetError where it can't be built, Unsupported where it can't be asked so.
    """
    from attn_spec.adapters.adapt import adapt
    from attn_spec.adapters.modules.hidden import hidden_call

    implementation = adapt(found, declared=declared)
    call = hidden_call(implementation, implementation.fit(problem))
    f = call.adapter.module
    assert f is not None
    f.redraws = False  # what its own initialisation makes of it is what there is to see
    f.forget()
    return f.run_as_is, call.inputs, {**call.named, "sizes": call.sizes}
