"""Environments of OpenEnv. test_other_packages.py runs these tests in an environment that has it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.agents.openenv_environment import OpenEnvError, _App
from oncurve.agents.tool_environment import ToolEnvironment, ToolEpisode
from oncurve.errors import RecipeError
from oncurve.records import Observation
from oncurve.tasks.environments import load_environment
from tests.agents.demonstrated import demonstration, train_tiny
from tests.agents.test_tool_environment import call, rollout, turn

DOORS = """
import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Open(Action):
    door: int

class View(Observation):
    text: str

class Doors(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, doors=3, **kwargs):
        self.prize, self.doors = random.Random(seed).randrange(doors), doors
        self._state = State(step_count=0)
        return View(text=f"{doors} doors")

    def step(self, action, timeout_s=None, **kwargs):
        if not 0 <= action.door < self.doors:
            raise ValueError("no such door")
        is_right = action.door == self.prize
        return View(text="a prize" if is_right else "nothing", reward=1.0 if is_right else -0.25, done=is_right)

    @property
    def state(self):
        return self._state

app = create_fastapi_app(Doors, Open, View, max_concurrent_envs=16)
single = create_fastapi_app(Doors, Open, View, max_concurrent_envs=1)
"""
TOOLS = """
from fastmcp import FastMCP
from openenv.core.env_server import CallToolAction, CallToolObservation, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment

class Counter(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server, self.count = FastMCP("counter"), 0

        @server.tool
        def add(number: int) -> int:
            "Adds to the counter."
            if number > 9:
                raise ValueError("too much")
            self.count += number
            return self.count

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Observation(done=False, reward=None)

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError("unknown action")

    @property
    def state(self):
        return State()

app = create_fastapi_app(Counter, CallToolAction, CallToolObservation, max_concurrent_envs=16)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("openenv")
    (folder / "doors.py").write_text(DOORS)
    (folder / "counter.py").write_text(TOOLS)
    yield folder
    for reference in ("doors.py:app", "doors.py:single", "counter.py:app"):
        _App.of(f"{folder}/{reference}").stop()


def environment_of(address: str) -> ToolEnvironment:
    environment = load_environment(f"openenv:{address}", "task.environment", timeout_s=600)
    assert isinstance(environment, ToolEnvironment)
    return environment


def prize(seed: int, doors: int = 3) -> int:
    return random.Random(seed).randrange(doors)


def test_an_environment_of_an_app_and_of_its_address(folder: Path) -> None:
    app = environment_of(f"{folder}/doors.py:app")
    (tool,) = app.tools
    assert tool["function"]["name"] == "step"
    assert tool["function"]["parameters"]["properties"].keys() == {"door"}
    for environment in (app, environment_of(_App.of(f"{folder}/doors.py:app").url())):
        assert environment.factory is not None
        for seed in range(3):
            doors = environment.factory()
            assert doors.reset(seed=seed, doors=5, unknown="x") == '\n{"text": "5 doors"}'
            right = prize(seed, 5)
            wrong = (right + 1) % 5
            assert doors.step(door=wrong) == '{"text": "nothing"}; reward -0.25'
            assert doors.step(door=right) == '{"text": "a prize"}; reward 1; over'
            with pytest.raises(ValueError, match="over"):
                doors.step(door=right)
            assert doors.get_reward() == 0.75


def test_wrong_calls_are_answered(folder: Path) -> None:
    episode = environment_of(f"{folder}/doors.py:app").begin(rollout())
    start = episode.start()
    assert start is not None
    start.result(600)
    wrong = call("step", '{"door": 9}') + call("step", "{}") + call("step", '{"door": "x"}') + call("step", '{"window": 1}')
    results = [made.result for made in episode.answer(turn(wrong)).result(600).calls]
    for result, expected in zip(
        results, ["no such door", "door is missing", "must be of type integer", "no argument window"], strict=True
    ):
        assert expected in result
    assert episode.finish().result(600).reward == 0.0


def test_the_tools_of_an_mcp_environment(folder: Path) -> None:
    environment = environment_of(f"{folder}/counter.py:app")
    (tool,) = environment.tools
    assert tool["function"]["name"] == "add"
    assert tool["function"]["description"] == "Adds to the counter."
    assert environment.factory is not None
    first, second = environment.factory(), environment.factory()
    for one in (first, second):
        one.reset(seed=0)
    assert [first.add(number=2), first.add(number=3), second.add(number=1)] == ["2", "5", "1"]
    with pytest.raises(OpenEnvError, match="too much"):
        first.add(number=10)
    for one in (first, second):
        assert one.get_reward() == 0.0


def test_a_server_without_room_says_so(folder: Path) -> None:
    environment = environment_of(f"{folder}/doors.py:single")

    def begin() -> ToolEpisode:
        episode = environment.begin(rollout())
        start = episode.start()
        assert start is not None
        start.result(600)
        return episode

    first = begin()
    outcome = begin().finish().result(600)
    assert outcome.reward is None
    assert "CAPACITY_REACHED" in str(outcome.failure)
    answer: Observation = first.answer(turn(call("step", '{"door": 1}'))).result(600)
    assert answer.calls[0].failure is None
    assert first.finish().result(600).failure is None


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://127.0.0.1:9", "URLError"),
        ("no_such_module:app", "no_such_module"),
        ("tests.agents.demonstrated:STEPS", "because 'STEPS' is of type int: it can't be called"),
    ],
)
def test_an_address_without_an_environment(address: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"task\.environment: no server of OpenEnv at '{address}'(?s:.*){message}"):
        load_environment(f"openenv:{address}", "task.environment")
    _App.of(address).stop()


def test_a_run_with_openenv(folder: Path, tmp_path: Path) -> None:
    demonstrations = []
    for seed in range(2):
        for door in range(2):
            is_right = door == prize(seed)
            result = '{"text": "a prize"}; reward 1; over' if is_right else '{"text": "nothing"}; reward -0.25'
            prompt = f'row {seed}\n{{"text": "3 doors"}}'
            demonstrations.append(demonstration(prompt, {"name": "step", "arguments": {"door": door}}, result))
    rows = [{"prompt": f"row {seed}", "seed": seed} for seed in range(2)]
    calls = train_tiny(tmp_path, f"openenv:{folder}/doors.py:app", rows, demonstrations)
    assert any("reward" in call.result for call in calls)
