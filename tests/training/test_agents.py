"""Runs whose rollouts are made by agents: what is trained on, which agents are left out, and runs that are killed."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from oncurve import trust
from oncurve.errors import OncurveError, RewardError
from oncurve.operations.probe import probe
from oncurve.operations.replay import replay
from oncurve.operations.run_model import evaluate_model, load_model
from oncurve.recipe.load import parse_recipe
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.studio.groups import GroupLocation, group_data, search_data
from oncurve.studio.queries import CompletionFilter
from oncurve.training.inputs import changed_inputs, record_inputs
from oncurve.training.start import begin, resume
from tests.agent_programs.taught import ADD, taught_policy

AGENT = '''
import json, os, signal, sys, time, urllib.request

def call(path, **body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    data = json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + path, data, headers)) as response:
        return json.load(response)

def complete(prompt, limit=4):
    return call("/completions", model=os.environ["OPENAI_MODEL"], prompt=prompt, max_tokens=limit)["choices"][0]["text"]

def count(name):
    """How many agents have come here before."""
    with open(name, "a") as file:
        file.write(".")
        return file.tell()

def run(row):
    """Two calls of one sequence, and one of another."""
    text = complete(row["question"])
    more = complete(row["question"] + text + "=")
    complete("check: " + more)
    return sum(letter in "02468" for letter in text + more)

def impure(row):
    """Other prompts each time."""
    noise = os.urandom(2).hex()
    return float(ord((complete(row["question"] + noise) + "x")[0]) % 7)

def run_and_kill(row, agent=None):
    """Kills the trainer, which is the launcher's parent, when certain agents have started or are about to end."""
    number, moments = count(f"agents-{os.environ.get('TRY')}.log"), json.loads(os.environ.get("KILL_AT", "[]"))
    if number in moments:
        kill_trainer()
    reward = (agent or run)(row)
    if -number in moments:
        kill_trainer()
    return reward

def impure_and_kill(row):
    return run_and_kill(row, impure)

def kill_trainer():
    stat = open(f"/proc/{os.getppid()}/stat").read()
    os.kill(int(stat.rpartition(")")[2].split()[1]), signal.SIGKILL)
    time.sleep(600)

def faulty(row):
    """Of four rollouts of a prompt: one crashes, one hangs, one never calls, one is well."""
    kind = count(row["question"].strip("=").replace("+", "_")) % 4
    if kind == 1:
        complete(row["question"])
        raise RuntimeError("lost my way")
    if kind == 2:
        time.sleep(600)
    if kind == 3:
        return 1.0
    return 1.0 if complete(row["question"]) else 0.0

def mistaken(row):
    call("/completions", model="gpt-4o", prompt="hi")

def with_a_tool(row):
    """Asks, and sends the results of the calls in the answer with a message of its own."""
    messages = [{"role": "user", "content": "1+2?"}]
    for _ in range(2):
        body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "tools": [row["tool"]], "max_tokens": 80}
        message = call("/chat/completions", **body)["choices"][0]["message"]
        called = message.get("tool_calls") or []
        messages += [message, *({"role": "tool", "tool_call_id": one["id"], "content": "3"} for one in called)]
        messages.append({"role": "user", "content": "well?"})
    return len(called)

async def by_post(row):
    complete(row["question"])
    call("/reward", reward=0.25)
'''
RECIPE = """
name = "agents"
threads = 1

[model.tiny]
layers = 1
width = 32
heads = 2
kv_heads = 1
head_size = 16
mlp_width = 48
context = 128

[engine]
draft = "group"

[task]
type = "agent"
path = "tasks.jsonl"
function = "my_agent.py:run"
timeout_s = 120
heldout = 2

[[stages]]
type = "grpo"
steps = 2
prompts_per_step = 2
group_size = 4
save_every = 1
sampling.max_new_tokens = 40
optimiser.learning_rate = 1e-2
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(f'{{"question": "{i}+{i}="}}\n' for i in range(20)))
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path


def train(*sets: str) -> RunFolder:
    return begin(parse_recipe(tomllib.loads(RECIPE), sets), runs_dir=Path("runs"))


def test_an_agents_sequences_are_one_completion_and_runs_repeat(folder: Path) -> None:
    """32 agents at once."""
    sets = ("grpo.group_size=16", "grpo.steps=1")
    runs = [train(*sets) for _ in range(2)]
    with RunReader.open(runs[0].path) as store:
        report, again = store.step("grpo", 1), RunReader.open(runs[1].path)
        assert store.fingerprint() == again.fingerprint()
        again.close()
    assert report.metrics["failure_share"] == 0
    assert report.metrics["mismatch_max"] < 1e-4  # the learner computes what was sampled, in each sequence's own context
    assert report.metrics["kv_reuse"] > 0.1  # each agent's second call continues its first
    group = report.groups[0]
    assert len(group.group.completions) == 16
    for completion, scored in zip(group.group.completions, group.scored.scored, strict=True):
        assert len(completion.contexts) == 1
        assert completion.episode is not None
        lengths = [end - start for start, end, _ in completion.episode.turns]  # at most 4: fewer if the model ended a turn
        assert len(lengths) == 3
        assert max(lengths) == 4
        assert completion.length == sum(lengths)
        assert scored.total == completion.episode.outcome.reward
    assert any(group.has_signal for group in report.groups)
    stats = [stats for group in report.stats for stats in group if stats is not None]
    assert all(len(one.logps) == len(c.token_ids) for one, c in zip(stats, group.group.completions, strict=False))


def test_agents_that_crash_hang_or_never_call_are_left_out_with_their_reason(folder: Path) -> None:
    sets = ["task.function=my_agent.py:faulty", "task.timeout_s=8", "grpo.steps=1", "grpo.max_failure_share=0.9"]
    run = train(*sets, "task.heldout_share=0")
    with RunReader.open(run.path) as store:
        report = store.step("grpo", 1)
        events = [event.message for event in store.events("agents")]
    failures = [scored.failure for scored in report.groups[0].scored.scored]
    reasons = ["exit code 1: RuntimeError: lost my way", "took more than 8 s", "without a completed call"]
    assert all(sum(reason in (failure or "") for failure in failures) == 1 for reason in reasons)
    assert failures.count(None) == 1
    assert report.metrics["failure_share"] == 0.75
    assert not any(graded for group in report.groups for graded in group.graded)  # one alone has nothing to be compared with
    assert any("6 of 8 agents failed" in message for message in events)


def test_evaluation_and_probe_run_the_agents_too(folder: Path) -> None:
    """At every temperature anew."""
    (folder / "my_agent.py").write_text(AGENT + "\n\ndef counted(row):\n    count('agents.log')\n    return run(row)\n")
    recipe = parse_recipe(tomllib.loads(RECIPE), ["task.function=my_agent.py:counted", "grpo.steps=1", "task.heldout=3"])
    run = begin(recipe, runs_dir=Path("runs"))
    ran = (folder / "agents.log").stat().st_size
    report = evaluate_model(load_model(str(run.path), Path("runs")), recipe, samples=2)
    assert (folder / "agents.log").stat().st_size == ran + 6
    assert all(scored.completion.episode is not None for group in report.groups for scored in group.scored)
    probed = probe(recipe, 4, samples=2)
    assert (folder / "agents.log").stat().st_size >= ran + 6 + 8 + 8 * len(probed.temperatures)


def test_an_agents_tool_calls_are_counted_and_shown(folder: Path) -> None:
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"tool": ADD, "number": i}) + "\n" for i in range(4)))
    sets = ["task.function=my_agent.py:with_a_tool", "task.heldout_share=0", "grpo.steps=1"]
    recipe = parse_recipe(tomllib.loads(RECIPE), [*sets, "model.tiny.context=512", "grpo.sampling.max_new_tokens=200"])
    run = begin(recipe, runs_dir=Path("runs"), policy=taught_policy().copy())
    with RunReader.open(run.path) as store:
        report = store.step("grpo", 1)
    completions = [completion for group in report.groups for completion in group.group.completions]
    made = [len(completion.episode.calls) for completion in completions if completion.episode is not None]
    assert report.metrics["tool_calls"] == sum(made) / 8 > 0
    assert "tool_failure_share" not in report.metrics, "only the agent knows which failed"
    found = search_data(run, CompletionFilter(tool="add"), None)["completions"]
    assert len(found) == sum(count > 0 for count in made)
    shown = group_data(run, GroupLocation("grpo", 1, "train", 0))["completions"]
    turns = [turn for completion in shown for turn in completion["episode"]["turns"]]
    call = next(call for turn in turns for call in turn["calls"])
    assert call == {"name": "add", "arguments": '{"a": 1, "b": 2}', "result": "3", "failure": None, "seconds": None}
    assert {turn["reply"] for turn in turns} == {"user: well?", None}


def test_a_run_stops_if_too_many_agents_fail(folder: Path) -> None:
    with pytest.raises(RewardError, match="8 of 8 completions of a step could not be rewarded") as error:
        train("task.function=my_agent.py:mistaken", "task.heldout_share=0")
    assert "no model 'gpt-4o' here" in error.value.because


def test_a_reward_by_post_and_a_configured_reward(folder: Path) -> None:
    run = train("task.function=my_agent.py:by_post", "grpo.steps=1", "task.heldout_share=0")
    with RunReader.open(run.path) as store:
        assert store.step("grpo", 1).metrics["reward"] == 0.25
    recipe = {**tomllib.loads(RECIPE), "rewards": [{"type": "length", "target": 4}]}
    own = begin(parse_recipe(recipe, ["grpo.steps=1", "task.heldout_share=0"]), runs_dir=Path("runs"))
    with RunReader.open(own.path) as store:
        assert store.step("grpo", 1).groups[0].scored.scored[0].aspects[0].name == "length"


BAD: dict[str, tuple[dict[str, object], str, str]] = {
    "no program": ({"function": None}, "task.command", "an agent is one program"),
    "two programs": ({"command": "python x.py"}, "task.command", "an agent is one program"),
    "no such program": ({"function": None, "command": "no-such-agent --fast"}, "task.command", "no program 'no-such-agent'"),
    "an open quote": ({"function": None, "command": "'python"}, "task.command", "No closing quotation"),
    "no such function": ({"function": "my_agent.py:walk"}, "task.function", "has no 'walk'"),
    "no rows": ({"path": None}, "task.path", "reads its prompts"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_programs(folder: Path, name: str) -> None:
    options, where, because = BAD[name]
    recipe = tomllib.loads(RECIPE)
    recipe["task"] = {key: value for key, value in {**recipe["task"], **options}.items() if value is not None}
    with pytest.raises(OncurveError) as error:
        begin(parse_recipe(recipe), runs_dir=Path("runs"))
    assert error.value.where == where
    assert because in error.value.because
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("sets", "where"),
    [
        (["scale.engine=vllm"], "scale.engine"),
        (["scale.ranks=2"], "scale.ranks"),
        (["grpo.type=rejection_sample"], "rejection_sample.type"),
        (["grpo.curriculum.first_samples=2"], "grpo.curriculum.first_samples"),
    ],
    ids=str,
)
def test_what_agents_can_not_be_combined_with(folder: Path, sets: list[str], where: str) -> None:
    with pytest.raises(OncurveError) as error:
        parse_recipe(tomllib.loads(RECIPE), sets)
    assert error.value.where == where


def test_a_port_in_use(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OncurveError, match=r"task\.port"):
            train(f"task.port={taken.getsockname()[1]}")


def test_an_agents_program_must_be_trusted_and_is_an_input(folder: Path) -> None:
    command = f"{sys.executable} my_agent.py"
    recipe = parse_recipe({**tomllib.loads(RECIPE), "task": {"type": "agent", "path": "tasks.jsonl", "command": command}})
    assert [c.what for c in trust.capabilities_of(recipe)] == [f"runs a program: {command}"]
    run = RunFolder.create(Path("runs"), "x", fill=lambda new, path: None)
    record_inputs(run, recipe)
    assert changed_inputs(run, recipe) == []
    (folder / "my_agent.py").write_text("pass\n")
    assert changed_inputs(run, recipe) == ["task.command.my_agent.py (my_agent.py)"]


def run_killed(folder: Path, function: str, moments: list[list[int]], tmp: Path) -> RunFolder:
    """Trains in a process, which is killed once for each list of moments and resumed, until it ends by itself."""
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp), "ONCURVE_CACHE": str(tmp)}
    train_command = [sys.executable, "-m", "oncurve", "train"]
    first = [*train_command, "recipe.toml", "--set", f"task.function=my_agent.py:{function}"]
    for index, kill_at in enumerate([*moments, []]):
        command = first if not index else [*train_command, "--resume", "runs/agents-1"]
        env = {**environment, "KILL_AT": str(kill_at), "TRY": str(index)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == (-9 if kill_at else 0), done.stdout + done.stderr
    return RunFolder(folder / "runs" / "agents-1")


def agents_run(folder: Path) -> int:
    return sum(log.stat().st_size for log in folder.glob("agents-*.log"))


@pytest.mark.slow
def test_an_impure_agents_run_equals_a_replay_of_its_own_record(folder: Path, tmp_path: Path) -> None:
    killed = run_killed(folder, "impure_and_kill", [[-6], [-2]], tmp_path)
    with RunReader.open(killed.path) as store:
        expected, first = store.fingerprint(), store.step("grpo", 1)
        stored = {step: store.replies("grpo", step) for step in (1, 2)}
    assert all(len([key for key in replies if key.startswith("rollout/")]) == 8 for replies in stored.values())
    # Everything again from its start, by the record alone: the same bits, and no agent runs.
    for checkpoint in (killed.path / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)
    killed.set_status("interrupted")
    ran = agents_run(folder)
    trust.grant(killed)
    resume(killed)
    assert agents_run(folder) == ran
    with RunReader.open(killed.path) as store:
        assert store.fingerprint() == expected
        again = store.step("grpo", 1)
    for before, after in zip(first.groups[0].group.completions, again.groups[0].group.completions, strict=True):
        assert np.array_equal(before.token_ids, after.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ppo", "trpo"])
def test_other_stages_learn_from_agents_too_and_a_step_is_replayed_from_its_record(folder: Path, kind: str) -> None:
    recipe = tomllib.loads(RECIPE)
    common = {key: recipe["stages"][0][key] for key in ("prompts_per_step", "group_size", "sampling")}
    recipe["stages"] = [{"type": kind, "steps": 2, **common}]
    recipe["task"]["heldout_share"] = 0
    recipe["task"]["function"] = "my_agent.py:impure"
    run = begin(parse_recipe(recipe), runs_dir=Path("runs"))
    with RunReader.open(run.path) as store:
        report = store.step(kind, 2)
    assert report.metrics["failure_share"] == 0
    assert all(np.isfinite(value) for value in report.metrics.values())
    for group in report.groups:
        assert sum(not completion.contexts for completion in group.group.completions) <= 1, "each agent begins in its own way"
    assert replay(run, None, 2, 0).differences == []
