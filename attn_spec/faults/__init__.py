"""The catalogue of faults: known ways to get attention wrong, one theme a file.

Themes stand in the order of the laws, and within a theme the more common fault stands first: where two faults cannot
be told apart on the problems at hand, the diagnosis names them in this order.
"""

# in this order, which is that of the catalogue
from attn_spec.faults import shapes, weights, scaling, biases, causality  # noqa: I001
from attn_spec.faults import masking, hiding, broadcasting, heads, blockwise, tiles
from attn_spec.faults import windows, unheeded, slopes, sums, recomputing, gradients
from attn_spec.faults.fault import FAULTS, Fault
from attn_spec.faults.scope import named

CATALOGUE: dict[str, Fault] = dict(FAULTS)

__all__ = [
    "CATALOGUE",
    "Fault",
    "biases",
    "blockwise",
    "broadcasting",
    "causality",
    "gradients",
    "heads",
    "hiding",
    "masking",
    "named",
    "recomputing",
    "scaling",
    "shapes",
    "slopes",
    "sums",
    "tiles",
    "unheeded",
    "weights",
    "windows",
]
