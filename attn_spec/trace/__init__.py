"""What an attention computes block by block on one input, and where it first goes wrong."""

from attn_spec.trace.finding import Expected, Finding
from attn_spec.trace.tracing import Trace, of_recording, trace

__all__ = ["Expected", "Finding", "Trace", "of_recording", "trace"]
