"""Implementations with a behaviour fault planted: whole functions and modules, to be judged as a user's are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from attn_spec.faults.behaviour import BehaviourFault


def plants(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Functions and modules with this fault, and what is to be declared of each; it shows in one of them or more."""
    for make in PLANTED[fault.module.rpartition(".")[2]]:
        yield from make(fault)


def _decoding(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.faults.decoding_planted import planted_cached, planted_decoder, planted_function

    yield planted_function(fault), {}
    yield planted_cached(fault), {}
    yield planted_decoder(fault), {}
    yield planted_decoder(fault, rotates=False, window=2), {}


def _dropout(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.dropout_blocks import Dropout, attention

    yield attention(Dropout(**fault.blocks)), {"strict": bool(fault.equivalent)}


def _running(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.config_words import CLAIMS
    from attn_spec.running_blocks import Running

    yield Running(fault.blocks), {"name": "running", "claims": [claim for claim in CLAIMS if claim != "export"]}


def _packing(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.packing_blocks import packed_attention

    yield packed_attention(fault.blocks), {}


def _tangents(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.tangent_blocks import attention_with_tangents

    yield attention_with_tangents(fault.blocks), {}


def _module_variants(fault: BehaviourFault) -> Iterator[tuple[Any, dict[str, Any]]]:
    from attn_spec.module_variant_blocks import module_of

    yield module_of(fault.blocks), {"name": "decoder"}
    yield module_of(fault.blocks, alibi=True), {"name": "decoder"}


Make = Callable[[BehaviourFault], Iterator[tuple[Any, dict[str, Any]]]]
PLANTED: dict[str, tuple[Make, ...]] = {  # by the module that enters a fault
    "decoding": (_decoding,),
    "randomness": (_dropout,),
    "running": (_running,),
    "packing": (_packing,),
    "tangents": (_tangents,),
    "module_variants": (_module_variants,),
}
