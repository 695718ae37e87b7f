"""ONNX: the stored inputs and outputs of its Attention operator, in every profile the same."""

from attn_spec.invariants import conformance
from attn_spec.onnx_cases import problems
from attn_spec.suites.suite import tries

test_onnx = tries(conformance.onnx_conformance)
test_onnx.problems = lambda profile: [*problems()]  # asked for late: onnx takes seconds to make them
