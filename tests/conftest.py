"""Imports all that a judged run imports, once: pytester makes a run inside this process forget what it saw first."""

import hypothesis.internal.observability  # noqa: F401

from attn_spec.plugin import SUITES
from attn_spec.suites import all_tests

for suite in ("", *SUITES):
    list(all_tests(suite))
