"""Tools and environments from elsewhere: MCP servers, gymnasium, and what can be said of other packages without them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oncurve.agents.gymnasium_environment import observation_text
from oncurve.agents.mcp_client import McpError, _holder, _server, mcp_tools
from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import MissingPackage, RecipeError
from oncurve.recipe.load import parse_recipe
from oncurve.records import Observation, Outcome
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.environments import McpTools, load_environment
from oncurve.training.inputs import record_inputs
from oncurve.training.start import begin
from oncurve.trust import capabilities_of
from tests.agent_programs.taught import CALL, QUESTION, taught_policy
from tests.agents.demonstrated import demonstration, train_tiny
from tests.agents.test_tool_environment import call, rollout, turn

SERVER = """
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")

@server.tool()
def add(a: int, b: int) -> int:
    "Adds."
    return a + b

def refuse(reason: str) -> str:
    "Always fails."
    raise ValueError(reason)

if "refuse" in sys.argv:
    server.tool()(refuse)
server.run()
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("mcp") / "server.py"
    file.write_text(SERVER)
    command = f"{sys.executable} {file}"
    yield command
    for server in (*_holder(command, os.getcwd()), *_holder(f"{command} refuse", os.getcwd())):
        server.process.kill()


def play(environment: ToolEnvironment, text: str) -> tuple[Observation, Outcome]:
    """The answer to a turn, and how the episode ends. A server takes a while to start."""
    episode = environment.begin(rollout())
    start = episode.start()
    if start is not None:
        start.result(600)
    return episode.answer(turn(text)).result(600), episode.finish().result(600)


def tools(*commands: str) -> ToolEnvironment:
    environment = load_environment(None, "task.environment", [McpTools(mcp=one) for one in commands], timeout_s=600)
    assert isinstance(environment, ToolEnvironment)
    return environment


def test_the_tools_of_an_mcp_server(command: str) -> None:
    environment = tools(f"{command} refuse")
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "refuse"]
    assert environment.tools[0]["function"]["parameters"]["properties"]["a"]["type"] == "integer"
    several = call("add", '{"a": 1, "b": 2}') + call("add", '{"a": "x", "b": 2}') + call("refuse", '{"reason": "no tea"}')
    first, _ = play(environment, several)
    assert [made.failure for made in first.calls] == [None, "arguments", "exception"]
    assert first.calls[0].result == "3"
    assert "refuse" in first.calls[2].result, "the server says no more of an exception"


def test_two_servers_with_tools_of_one_name(command: str) -> None:
    with pytest.raises(RecipeError, match=r"two tools are called 'add'(?s:.*)prefix"):
        tools(command, f"{command} refuse")
    sources = [McpTools(mcp=command), McpTools(mcp=f"{command} refuse", prefix="other_")]
    environment = load_environment(None, "task.environment", sources, timeout_s=600)
    assert isinstance(environment, ToolEnvironment)
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "other_add", "other_refuse"]
    first, _ = play(environment, call("other_add", '{"a": 1, "b": 2}'))
    assert [(made.result, made.failure) for made in first.calls] == [("3", None)]


@pytest.mark.slow
def test_a_server_that_has_ended_is_started_again(command: str) -> None:
    environment, server = tools(command), _server(command, os.getcwd())
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait()
    first, _ = play(environment, call("add", '{"a": 1, "b": 2}'))
    assert first.calls[0].result == "3"
    assert _server(command, os.getcwd()) is not server


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("no-such-server --fast", "No such file"),
        (f"{sys.executable} -c 1/0", "ZeroDivisionError"),
        ("'python", "quotation"),
        ("", "names no program"),
    ],
)
def test_a_command_that_is_no_server(wrong: str, message: str) -> None:
    with pytest.raises(RecipeError, match=rf"task\.tools\[0\]: .* is not a usable MCP server(?s:.*){message}"):
        tools(wrong)


NOISY = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        tools = [{"name": "add", "inputSchema": {"type": "object", "properties": {}}}]
        result = {"tools": tools, "content": [{"type": "text", "text": "3"}]}
        is_call = request["method"] == "tools/call"
        answer = {"id": request["id"], **({"error": "no"} if is_call else {"result": result})}
        sys.stdout.buffer.write(b"\\xff is no text\\n" + json.dumps(answer).encode() + b"\\n")
        sys.stdout.flush()
"""


def test_a_server_that_prints_other_bytes_and_errors_in_another_form(tmp_path: Path) -> None:
    (tmp_path / "noisy.py").write_text(NOISY)
    first, _ = play(tools(f"{sys.executable} {tmp_path}/noisy.py"), call("add", "{}"))
    assert first.calls[0].result == "{'error': 'no'}"


def recipe(folder: Path, reward: dict[str, Any], **task: Any) -> Any:
    rows = [{"prompt": [QUESTION], "seed": number} for number in range(2)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"type": "grpo", "steps": 1, "prompts_per_step": 2, "group_size": 2, "sampling": {"max_new_tokens": 150}}
    return parse_recipe(
        {
            "name": "adapted",
            "threads": 1,
            "task": {"type": "file", "path": str(folder / "rows.jsonl"), "heldout_share": 0, **task},
            "rewards": [reward],
            "stages": [stage],
        }
    )


SHOP = """
class Shop:
    def __init__(self, price: int = 1):
        self.price = price

    def reset(self, **columns):
        self.spent = 0

    def buy(self) -> str:
        'Buys.'
        self.spent += self.price
        return str(self.spent)

    def get_reward(self) -> float:
        return self.spent
"""
MALFORMED = """\
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = {"tools/list": TOOLS, "tools/call": CALL}.get(message["method"], {})
        print('{"id": [1]}')
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""


@pytest.mark.parametrize("tools", ["[1]", '{"tools": None}', '{"tools": [1]}', '{"tools": [{"name": None}]}'])
def test_a_server_that_breaks_the_protocol_is_refused(tmp_path: Path, tools: str) -> None:
    (tmp_path / "server.py").write_text(MALFORMED.replace("TOOLS", tools).replace("CALL", "{}"))
    with pytest.raises(RecipeError, match="not a usable MCP server"):
        mcp_tools(f"{sys.executable} {tmp_path}/server.py", "task.tools.0.mcp")


@pytest.mark.parametrize("call", ['"text"', '{"content": None}', '{"content": ["text"]}'])
def test_a_result_that_breaks_the_protocol_is_an_error_of_the_call(tmp_path: Path, call: str) -> None:
    (tmp_path / "server.py").write_text(MALFORMED.replace("TOOLS", '{"tools": [{"name": "f"}]}').replace("CALL", call))
    (tool,) = mcp_tools(f"{sys.executable} {tmp_path}/server.py", "task.tools.0.mcp")
    with pytest.raises(McpError, match="the result"):
        tool.function()


def test_a_run_with_an_mcp_server(command: str, tmp_path: Path) -> None:
    built = recipe(tmp_path, {"type": "length", "target": 3}, tools=[{"mcp": command}], tool_timeout_s=600)
    assert [str(c) for c in capabilities_of(built)] == [f"task.tools.0.mcp runs a program: {command}"]
    run = begin(built, out=tmp_path / "run", policy=taught_policy().copy())
    with RunReader.open(run.path) as store:
        report = store.step("grpo", 1)
    assert report.metrics["tool_calls"] > 0
    texts = [completion.text for group in report.groups for completion in group.group.completions]
    assert any(text.startswith(CALL) for text in texts)
    assert "server.py" in (run.path / "inputs.json").read_text()
    other = RunFolder.create_at(tmp_path / "other")
    record_inputs(other, recipe(tmp_path, {"type": "length", "target": 3}, tools=[{"mcp": command}, "json:dumps"]))
    assert "server.py" in (other.path / "inputs.json").read_text()


def test_an_environment_of_gymnasium() -> None:
    environment = load_environment("gymnasium:FrozenLake-v1", "task.environment")
    assert isinstance(environment, ToolEnvironment)
    assert "from 0 to 3" in environment.tools[0]["function"]["parameters"]["properties"]["action"]["description"]
    steps = "".join(call("act", f'{{"action": {action}}}') for action in (9, 1, 1))
    first, outcome = play(environment, steps)
    assert first.calls[0].result == "{'error': 'action must be from 0 to 3'}"
    assert first.calls[1].failure is None
    assert "reward 0" in first.calls[1].result
    assert outcome.reward == 0.0


def test_an_episode_of_gymnasium_is_that_of_its_own_loop() -> None:
    import gymnasium

    plain, actions = gymnasium.make("CartPole-v1"), [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
    observations, total = [plain.reset(seed=7)[0]], 0.0
    for action in actions:
        observation, reward, is_over, _, _ = plain.step(action)
        observations.append(observation)
        total += float(reward)
        if is_over:
            break
    assert is_over
    environment = load_environment("gymnasium:CartPole-v1", "task.environment")
    assert isinstance(environment, ToolEnvironment)
    assert environment.factory is not None
    game = environment.factory()
    texts = [game.reset(seed=7), *(game.act(action) for action in actions[: len(observations) - 1])]
    for text, observation in zip(texts, observations, strict=True):
        assert json.loads(text.partition(";")[0]) == pytest.approx(observation.tolist(), abs=1e-4)
    assert texts[-1].endswith("; over")
    assert game.get_reward() == total
    with pytest.raises(ValueError, match="over"):
        game.act(0)


@pytest.mark.slow
def test_a_run_with_gymnasium(tmp_path: Path) -> None:
    """Without a column `seed`: all completions of a group play the same episode. The model has learned to act."""
    import gymnasium

    rows, demonstrations = [{"prompt": f"balance {number}"} for number in range(2)], []
    for number in range(4):
        game = gymnasium.make("CartPole-v1")
        start = observation_text(game.reset(seed=number)[0])
        result = observation_text(game.step(number % 2)[0])
        call = {"name": "act", "arguments": {"action": number % 2}}
        demonstrations.append(demonstration(f"balance {number % 2} {start}", call, f"{result}; reward 1"))
    calls = train_tiny(tmp_path, "gymnasium:CartPole-v1", rows, demonstrations)
    assert calls
    with RunReader.open(tmp_path / "run") as store:
        groups = [group for step in (1, 2) for group in store.step("grpo", step).groups]
    for group in groups:
        turns = [c.episode.turns[0][2] for c in group.group.completions if c.episode is not None]
        done = [(str(o.calls[0].arguments), o.calls[0].result) for o in turns if o.calls and o.calls[0].failure is None]
        assert len(set(done)) == len(dict(done)), "one action has one result"
        acted = [sum(not call.failure for call in c.episode.calls) for c in group.group.completions if c.episode]
        assert [scored.total for scored in group.scored.scored] == acted, "a reward of 1 for each action"
    assert len({group.group.prompt.shown for group in groups}) == len(groups), "each step has new episodes"


def test_options_of_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = load_environment(
        "gymnasium:FrozenLake-v1", "task.environment", options={"is_slippery": False, "desc": ["SG"]}
    )
    assert isinstance(environment, ToolEnvironment)
    first, outcome = play(environment, call("act", '{"action": 2}'))
    assert (first.calls[0].result, outcome.reward) == ("1; reward 1; over", 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shop.py").write_text(SHOP)
    environment = load_environment("shop.py:Shop", "task.environment", options={"price": 3})
    assert isinstance(environment, ToolEnvironment)
    assert environment.reward_name == "Shop"
    first, outcome = play(environment, call("buy", "{}"))
    assert (first.calls[0].result, outcome.reward) == ("3", 3.0)
    for name, options, where, message in (
        ("gymnasium:FrozenLake-v1", {"icy": True}, "task.environment:", "icy(?s:.*)correct task.environment_options"),
        ("shop.py:Shop", {"cost": 3}, "task.environment_options:", "'cost'"),
        ("calculator", {"price": 3}, "task.environment_options:", "does not take them"),
        ("openenv:http://127.0.0.1:9", {"price": 3}, "task.environment_options:", "the server creates"),
    ):
        with pytest.raises(RecipeError, match=f"{where}(?s:.*){message}"):
            load_environment(name, "task.environment", options=options)


@pytest.mark.parametrize(
    ("name", "message"),
    [("gymnasium:NoSuchGame-v0", "NoSuchGame"), ("gymnasium:Pendulum-v1", "its actions are Box")],
)
def test_an_environment_that_can_not_be_used(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_environment(name, "task.environment")


def test_an_episode_of_gymnasium_without_a_seed_is_that_of_its_group() -> None:
    environment = load_environment("gymnasium:CartPole-v1", "task.environment")
    assert isinstance(environment, ToolEnvironment)
    texts = []
    for number, step in ((0, 1), (1, 1), (0, 2)):
        start = environment.begin(replace(rollout(number), step=step)).start()
        assert start is not None
        texts.append(start.result(600))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("gymnasium:CartPole-v1", "gymnasium"),
        ("textarena:GuessTheNumber-v0", "textarena"),
        ("openenv:http://127.0.0.1:9", "websockets.sync.client"),
        ("verifiers:hunt", "verifiers"),
    ],
)
def test_a_package_that_is_not_installed(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = name.partition(":")[0]
    with pytest.raises(MissingPackage, match=rf"task\.environment: (?s:.*)oncurve\[{extra}\]"):
        load_environment(name, "task.environment")


def test_what_an_environment_of_openenv_may_do(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text("app = None\n")
    served = recipe(tmp_path, {"type": "environment"}, environment="openenv:https://example.org")
    assert [str(c) for c in capabilities_of(served)] == [
        "task.environment sends tool calls and rows to openenv:https://example.org"
    ]
    started = recipe(tmp_path, {"type": "environment"}, environment=f"openenv:{tmp_path}/app.py:app")
    assert [str(c) for c in capabilities_of(started)] == [f"task.environment runs Python: openenv:{tmp_path}/app.py:app"]
    run = RunFolder.create_at(tmp_path / "run")
    record_inputs(run, started)
    assert "app.py" in (run.path / "inputs.json").read_text()
