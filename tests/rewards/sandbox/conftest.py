"""Every test with a `sandbox` runs at each level that this machine has."""

import pytest

from oncurve.rewards.sandbox.sandbox import Sandbox
from tests.rewards.sandbox.levels import SANDBOXES


@pytest.fixture(params=list(SANDBOXES))
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return SANDBOXES[request.param]
