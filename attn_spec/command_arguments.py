"""What the longer commands of `attn-spec` take; apart from what runs them, so that help needs no torch."""

from __future__ import annotations

import argparse
from typing import Any

DTYPES = ("float64", "float32", "bfloat16", "float16")  # those of `attn_spec.problem`


def add_trace(subparsers: Any) -> None:
    """Add `trace` to the commands."""
    parser = subparsers.add_parser("trace", help="run an attention once: each block, and where it first goes wrong")
    _add_problem(parser)


def add_heatmap(subparsers: Any) -> None:
    """Add `heatmap` to the commands."""
    parser = subparsers.add_parser("heatmap", help="a picture of the attention weights beside the right ones")
    _add_problem(parser)
    parser.add_argument("--out", metavar="FILE", required=True, help="where to write it: FILE.png or FILE.svg")
    parser.add_argument("--tokens", metavar="TEXT", help="labels of the axes, by words; their number is the length")
    parser.add_argument("--head", metavar="N", type=int, help="this head only, from 0")


def _add_problem(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="as for pytest --attn-impl")
    parser.add_argument("--problem", metavar="FILE.yaml", help="the problem to run it on, instead of the sizes below")
    parser.add_argument(
        "--batch", metavar="B", type=int, help="samples (trace: 2; heatmap: 1, of which the first is shown)"
    )
    parser.add_argument("--seq", metavar="S", type=int, help="tokens (6)")
    parser.add_argument("--heads", metavar="H", type=int, help="heads (2)")
    parser.add_argument("--head-dim", metavar="D", type=int, help="channels of a head (8)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the input (float32)")
    parser.add_argument("--causal", action="store_true", help="ask for causal attention by the flag")
    parser.add_argument("--mask", choices=("padding", "causal", "none"), default="none", help="a mask to hand over")
    parser.add_argument("--attn-config", metavar="FILE", help="declarations (default: attn.yaml, where it stands)")


def add_init(subparsers: Any) -> None:
    """Add the command to those of the parser."""
    init = subparsers.add_parser("init", help="write a first attn.yaml from what was understood of an implementation")
    init.add_argument("target", metavar="TARGET", nargs="?", help="as for pytest --attn-impl")
    init.add_argument("--out", metavar="FILE", default="attn.yaml", help="the file to write (attn.yaml)")
    init.add_argument("--force", action="store_true", help="write over a file that is there")
    init.add_argument("--schema", action="store_true", help="print the JSON Schema of attn.yaml, and write nothing")
