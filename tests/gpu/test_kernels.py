"""The kernels' own tests once more, compiled for the GPU: without one they run in Triton's interpreter."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.gpu
