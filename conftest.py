"""For this repository's own tests only; a run with --attn-impl does not read it."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small problems run faster on one thread, and times on a busy machine are then comparable."""
    torch.set_num_threads(1)
