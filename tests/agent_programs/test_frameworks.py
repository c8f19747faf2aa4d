"""Agents of other frameworks, unchanged: openai-agents and langgraph, with a tool, with and without streams.

Their pins conflict with ours, so they are installed into an environment of their own, or found in the one that the variable
ONCURVE_AGENT_FRAMEWORKS names.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oncurve.agent_programs.agent_processes import AgentProcesses, AgentResult
from oncurve.records import AgentProgram
from tests.agent_programs.taught import Agents, agents

PACKAGES = ("openai-agents==0.24.0", "langgraph==1.2.20", "langchain-openai==1.7.3")
OPENAI_AGENTS = '''
import asyncio, json, os, sys
from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_default_openai_api("chat_completions")
set_tracing_disabled(True)

@function_tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)

async def main():
    row = json.load(sys.stdin)
    agent = Agent(name="adder", model=os.environ["OPENAI_MODEL"], tools=[add])
    if row["stream"]:
        result = Runner.run_streamed(agent, row["question"])
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, row["question"])
    print(json.dumps({"reward": float("3" in result.final_output)}))

asyncio.run(main())
'''
LANGGRAPH = '''
import json, os, sys
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

@tool
def add(a: int, b: int) -> str:
    """Adds."""
    return str(a + b)

row = json.load(sys.stdin)
agent = create_react_agent(ChatOpenAI(model=os.environ["OPENAI_MODEL"], streaming=row["stream"]), [add])
result = agent.invoke({"messages": [("user", row["question"])]})
print(json.dumps({"reward": float("3" in result["messages"][-1].content)}))
'''

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served() -> Iterator[Agents]:
    with agents() as running:
        yield running


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the frameworks."""
    prepared = os.environ.get("ONCURVE_AGENT_FRAMEWORKS")
    folder = Path(prepared) if prepared else tmp_path_factory.mktemp("frameworks")
    interpreter = str(folder / "bin" / "python")
    if not prepared:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=900)
    return interpreter


@pytest.mark.parametrize("stream", [False, True], ids=["complete", "streamed"])
@pytest.mark.parametrize("program", [OPENAI_AGENTS, LANGGRAPH], ids=["openai-agents", "langgraph"])
def test_an_agent_calls_a_tool_and_its_calls_are_one_sequence(
    served: Agents, python: str, tmp_path: Path, program: str, stream: bool
) -> None:
    script = tmp_path / "agent.py"
    script.write_text(program)
    rollout, results = served.rollout(), queue.SimpleQueue[AgentResult]()
    processes = AgentProcesses()
    environment = {**served.endpoint.add(rollout), "PYTHONPATH": ""}
    processes.start(AgentProgram(f"{python} {script}"), {"question": "1+2?", "stream": stream}, environment, results.put)
    result = results.get(timeout=300)
    processes.close()
    assert (result.code, result.last_line) == (0, '{"reward": 1.0}'), result.stderr
    (sequence,) = rollout.sequences
    assert len(sequence.turns) == 2
    assert [message["content"] for message in sequence.replies] == [None, "3."]
