"""What every test shares."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: more threads would only wait for each other, and bits may depend on their number."""
    torch.set_num_threads(1)
