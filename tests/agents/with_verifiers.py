"""Tasksets of verifiers 0.4. test_other_packages.py runs these tests in an environment that has it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from oncurve.agents.tool_environment import ToolEnvironment, ToolEpisode
from oncurve.errors import RecipeError
from oncurve.records import Prompt, Rollout
from oncurve.tasks.environments import load_environment
from tests.agents.demonstrated import demonstration, train_tiny
from tests.agents.test_tool_environment import call, turn

HUNT = '''
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: int

class Guesses(vf.State):
    count: int = 0

class Numbers(vf.Toolset[vf.ToolsetConfig, Guesses]):
    async def setup_task(self, task):
        self.answer = task.answer

    @vf.tool
    def guess(self, number: int) -> str:
        """Guess the number."""
        if number < 0:
            raise ValueError("no negative numbers")
        self.state.count += 1
        return "right" if number == self.answer else "higher" if number < self.answer else "lower"

class Hunt(vf.Task[Data, Guesses]):
    @classmethod
    def toolsets(cls, config):
        return [Numbers(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, task, trace):
        results = [message.content for message in trace.tool_messages]
        return float("right" in results and str(task.answer) in trace.last_reply)

    @vf.reward(weight=-0.125)
    async def effort(self, trace):
        assert len(trace.assistant_messages) == trace.num_turns
        return trace.state.count

    @vf.metric
    async def turns(self, trace):
        return trace.num_turns
    # more

class Answers(vf.TasksetConfig):
    answers: list[int] = [3, 5]

class Hunts(vf.Taskset[Hunt, Answers]):
    def load(self):
        for answer in self.config.answers:
            yield Hunt(Data(prompt="Find the number.", system_prompt="Be quick.", answer=answer), self.config.task)

__all__ = ["Hunts"]
'''


@pytest.fixture
def hunt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "number_hunt.py").write_text(HUNT)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "number_hunt", raising=False)
    return "verifiers:number-hunt"


def environment_of(name: str) -> ToolEnvironment:
    environment = load_environment(name, "task.environment", timeout_s=600)
    assert isinstance(environment, ToolEnvironment)
    return environment


def begin(environment: ToolEnvironment, idx: int) -> tuple[ToolEpisode, str | None]:
    prompt = Prompt("p", messages=({"role": "user", "content": "go"},), columns={"idx": idx}, environment=environment)
    episode = environment.begin(Rollout(prompt, seed=0, step=1, sample=0, tokenizer=object()))
    start = episode.start()
    assert start is not None
    return episode, start.result(600)


def test_tools_and_rewards_of_a_taskset(hunt: str) -> None:
    environment = environment_of(hunt)
    (tool,) = environment.tools
    assert tool["function"]["name"] == "numbers_guess"
    assert tool["function"]["description"] == "Guess the number."
    assert tool["function"]["parameters"]["properties"]["number"]["type"] == "integer"
    (right, text), (wrong, _) = begin(environment, 1), begin(environment, 1)
    assert text == "\nBe quick.\n\nFind the number."
    guesses = (
        call("numbers_guess", '{"number": 4}')
        + call("numbers_guess", '{"number": 5}')
        + call("numbers_guess", '{"number": -1}')
    )
    made = right.answer(turn(guesses)).result(600).calls
    assert [one.result for one in made[:2]] == ["higher", "right"]
    assert made[2].failure == "exception"
    assert "no negative numbers" in made[2].result
    assert wrong.answer(turn(call("numbers_guess", '{"number": 9}'))).result(600).calls[0].result == "lower"
    right.answer(turn("It is 5.")).result(600)
    wrong.answer(turn("It is 9.")).result(600)
    assert right.finish().result(600).reward == 1.0 - 2 * 0.125, "right, in two guesses"
    assert wrong.finish().result(600).reward == -0.125, "each completion has a state of its own"


def test_options_of_a_taskset(hunt: str) -> None:
    environment = load_environment(hunt, "task.environment", timeout_s=600, options={"answers": [7]})
    assert isinstance(environment, ToolEnvironment)
    episode, _ = begin(environment, 0)
    answered = episode.answer(turn(call("numbers_guess", '{"number": 7}'))).result(600)
    assert answered.calls[0].result == "right"
    with pytest.raises(RecipeError, match="solutions"):
        load_environment(hunt, "task.environment", options={"solutions": [7]})


def test_a_task_that_is_not_there(hunt: str) -> None:
    episode, _ = begin(environment_of(hunt), 2)
    assert "there is no task 2: the taskset has 2" in str(episode.finish().result(600).failure)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    # more", "    NEEDS_CONTAINER = True", "need a container"),
        ("    # more", "    async def setup(self, trace, runtime):\n        pass", "prepare a sandbox"),
        ("async def effort(self, trace)", "async def effort(self, trace, runtime)", "looks into a sandbox"),
        ("    @vf.metric", "    @vf.stop", "stops or rewrites"),
        (
            'prompt="Find the number."',
            'prompt=[vf.UserMessage(content="a"), vf.UserMessage(content="b")]',
            "not a single",
        ),
        ("vf.ToolsetConfig())]", 'vf.ToolsetConfig(url="http://elsewhere"))]', "a server elsewhere"),
        (
            "import verifiers.v1 as vf",
            "import verifiers as vf; vf.SingleTurnEnv",
            "no attribute 'SingleTurnEnv'(?s:.*)earlier versions",
        ),
        ('["Hunts"]', "[]", "exports no Taskset"),
    ],
)
def test_a_taskset_that_can_not_run_here(hunt: str, tmp_path: Path, old: str, new: str, message: str) -> None:
    assert HUNT.count(old) == 1
    (tmp_path / "number_hunt.py").write_text(HUNT.replace(old, new))
    with pytest.raises(RecipeError, match=rf"task\.environment: {hunt}(?s:.*){message}"):
        load_environment(hunt, "task.environment")


def test_an_unknown_taskset() -> None:
    with pytest.raises(RecipeError, match="'no-such-taskset' not found"):
        load_environment("verifiers:no-such-taskset", "task.environment")


def test_a_run_with_verifiers(hunt: str, tmp_path: Path) -> None:
    prompt, demonstrations = "row {}\nBe quick.\n\nFind the number.", []
    for row, number, result in ((0, 3, "right"), (0, 5, "lower"), (1, 3, "higher"), (1, 5, "right")):
        demonstrations.append(
            demonstration(prompt.format(row), {"name": "numbers_guess", "arguments": {"number": number}}, result)
        )
    rows = [{"prompt": f"row {idx}", "idx": idx} for idx in range(2)]
    calls = train_tiny(tmp_path, hunt, rows, demonstrations)
    assert {call.result for call in calls} <= {"right", "higher", "lower"}
    assert calls
