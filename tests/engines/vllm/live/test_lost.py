"""A vLLM process that is killed or hangs: it is restarted, or the run gets an error; and it never outlives the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from oncurve.engines.base import SampleKey
from oncurve.engines.vllm.engine import VllmEngine
from oncurve.errors import EngineError
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Group
from oncurve.runs.step_notes import collect_notes
from tests.engines.vllm.live.models import PROMPTS, engine_of, policy_of

pytestmark = pytest.mark.vllm
STEP = SampleKey(seed=0, step=1)
SAMPLING = Sampling(max_new_tokens=24)


def rows(groups: list[Group]) -> list[list[int]]:
    return [c.token_ids.tolist() for g in groups for c in g.completions]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_sampler_is_restarted_and_no_group_is_lost_or_reported_twice(blow: signal.Signals) -> None:
    engine = engine_of(policy_of())
    reported: list[int] = []
    pids: list[int | None] = []

    def on_group(place: int, group: Group) -> None:
        reported.append(place)
        if not pids:
            pids.append(engine.pid)
            assert engine.pid is not None
            os.kill(engine.pid, blow)

    try:
        whole = rows(engine.sample(PROMPTS, 4, SAMPLING, STEP))
        assert engine.process is not None
        engine.process.limit_s = 20.0
        with collect_notes() as notes:
            again = engine.sample(PROMPTS, 4, SAMPLING.model_copy(update={"max_new_tokens": 200}), STEP, on_group=on_group)
        assert sorted(reported) == list(range(len(PROMPTS)))
        assert engine.pid not in pids
        assert any("restarted" in n.message for n in notes), notes
        assert [len(g.completions) for g in again] == [4] * len(PROMPTS)
        assert rows(engine.sample(PROMPTS, 4, SAMPLING, STEP)) == whole
    finally:
        engine.close()


class Killer:
    """Looks at the sampler and kills it, each time it is running."""

    version = 0

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.killed = engine, 0

    def __call__(self) -> bool:
        assert self.engine.pid is not None
        os.kill(self.engine.pid, signal.SIGKILL)
        self.killed += 1
        return False


def test_a_sampler_that_is_lost_each_time_is_an_error_that_says_so() -> None:
    engine = engine_of(policy_of())
    engine.weight_source = killer = Killer(engine)
    with pytest.raises(EngineError, match=r"vLLM process \d+ died while sampling \(signal 9\)") as caught:
        engine.sample(PROMPTS, 2, SAMPLING, STEP)
    assert killer.killed == 3
    log = Path(caught.value.fix.split()[1].rstrip(";"))
    assert "vllm" in log.read_text().lower()
    log.unlink()
    assert engine.pid is None


def test_a_model_that_vllm_can_not_run_is_an_error_at_once_with_its_reason() -> None:
    """An activation that it does not know."""
    policy = policy_of()
    policy.model.config.hidden_act = "tanh"
    engine = engine_of(policy)
    with pytest.raises(EngineError, match=r"failed while starting: .*tanh") as caught:
        engine.sample(PROMPTS, 1, SAMPLING, STEP)
    log = Path(caught.value.fix.split()[1])
    assert "Traceback" in log.read_text()
    log.unlink()
    assert engine.pid is None


def test_what_is_dropped_half_way_leaves_a_sampler_that_works() -> None:
    class Enough(Exception):
        pass

    def on_group(place: int, group: Group) -> None:
        raise Enough

    engine = engine_of(policy_of())
    try:
        whole = rows(engine.sample(PROMPTS, 4, SAMPLING, STEP))
        before = engine.pid
        with pytest.raises(Enough):
            engine.sample(PROMPTS, 4, Sampling(max_new_tokens=300), STEP, on_group=on_group)
        assert rows(engine.sample(PROMPTS, 4, SAMPLING, STEP)) == whole
        assert engine.pid == before
    finally:
        engine.close()


def test_the_sampler_goes_with_the_run_that_is_killed() -> None:
    script = textwrap.dedent("""
        from oncurve.engines.base import SampleKey
        from oncurve.recipe.schema.sections import Sampling
        from tests.engines.vllm.live.models import PROMPTS, engine_of, policy_of
        engine = engine_of(policy_of())
        engine.sample(PROMPTS, 1, Sampling(max_new_tokens=4), SampleKey(0, 1))
        print(engine.pid, engine._folder, flush=True)
        engine.sample(PROMPTS, 64, Sampling(max_new_tokens=400), SampleKey(0, 1))
    """)
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    sampler, folder = run.stdout.readline().split()
    assert Path(folder).is_dir()
    run.kill()
    run.wait()
    ends = time.monotonic() + 10
    while Path(f"/proc/{sampler}").exists() and time.monotonic() < ends:
        time.sleep(0.2)
    assert not Path(f"/proc/{sampler}").exists()
    assert not Path(folder).exists(), "weights are left in shared memory"
