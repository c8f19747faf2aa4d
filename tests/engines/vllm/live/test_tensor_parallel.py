"""Layers split over processes of vLLM's own: what they write, whether weights reach each, and where they are in the end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.engines.base import SampleKey
from oncurve.engines.vllm.engine import VllmEngine
from oncurve.errors import RecipeError
from oncurve.records import Group
from oncurve.runs.step_notes import collect_notes
from tests.engines.vllm.live.models import GREEDY, PROMPTS, TWICE, assert_agree, engine_of, native, policy_of, train
from tests.engines.vllm.live.test_runs import children

pytestmark = pytest.mark.vllm
STEP = SampleKey(seed=0, step=1)


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    found = engine_of(policy_of("qwen3", shape=TWICE), tensor=2)
    yield found
    found.close()


def texts(groups: list[Group]) -> list[str]:
    return [c.text for g in groups for c in g.completions]


def parts_of(engine: VllmEngine) -> list[int]:
    """The processes that hold a part each."""
    assert engine.pid is not None
    named = [
        (pid, Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/comm").read_text()) for pid in children(engine.pid)
    ]
    return [pid for pid, command, name in named if b"spawn_main" in command or "Worker" in name]


def test_greedy_texts_are_those_of_the_native_engine_after_each_push(engine: VllmEngine) -> None:
    before: list[str] = []
    for seed in range(3):
        found = engine.sample(PROMPTS, 1, GREEDY, STEP)
        assert_agree(engine.policy, found, native(engine.policy, PROMPTS, GREEDY))
        assert texts(found) != before
        before = texts(found)
        train(engine.policy, seed)
    assert len(parts_of(engine)) == 2


def test_a_part_that_is_lost_takes_all_with_it_and_they_are_started_again(engine: VllmEngine) -> None:
    first = texts(engine.sample(PROMPTS, 1, GREEDY, STEP))
    before = parts_of(engine)
    os.kill(before[-1], signal.SIGKILL)
    with collect_notes() as notes:
        assert texts(engine.sample(PROMPTS, 1, GREEDY, STEP)) == first
    assert any("restarted" in n.message for n in notes), notes
    assert not set(before) & set(parts_of(engine))


def test_no_part_outlives_the_engine(engine: VllmEngine) -> None:
    """The last test here."""
    engine.sample(PROMPTS[:1], 1, GREEDY, STEP)
    parts = parts_of(engine)
    assert len(parts) == 2
    engine.close()
    ends = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in parts) and time.monotonic() < ends:
        time.sleep(0.2)
    assert not [pid for pid in parts if Path(f"/proc/{pid}").exists()]


def test_heads_that_can_not_be_dealt_out() -> None:
    with pytest.raises(RecipeError, match=r"scale\.vllm_tensor: 3") as caught:
        engine_of(policy_of("qwen3", shape=TWICE), tensor=3)
    assert "use a divisor of 4" in str(caught.value)
