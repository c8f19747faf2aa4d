"""Runs from elsewhere: none of their code runs, and no key is sent, without --trust."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import oncurve as package
from oncurve import trust
from oncurve.errors import RunError
from oncurve.recipe.load import dump_recipe, load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.registry import REWARDS
from oncurve.runs.folder import RunFolder
from oncurve.tasks.registry import TASKS
from tests.cli.conftest import Oncurve

MARK = "from pathlib import Path\nPath('RAN').touch()\n"
MINE = MARK + "def f(*_, **__):\n    return 1.0\nclass World:\n    calls = ()\n    def reply(self, *_):\n        return None\n"
CODE_MODEL = {
    "config.json": {
        "auto_map": {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"},
        "model_type": "theirs",
    },
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["theirs.Tokenizer", None]}, "tokenizer_class": "Tokenizer"},
}


@pytest.fixture
def theirs(runs: Path, tmp_path: Path) -> Callable[..., RunFolder]:
    """A copy of a run in another folder with a changed recipe; code that it names would create RAN."""

    def make(finished: bool = True, **changed: Any) -> RunFolder:
        (tmp_path / "mine.py").write_text(MINE.replace("RAN", str(tmp_path / "ran")))
        (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(9)))
        run = RunFolder(tmp_path / "theirs")
        shutil.copytree(runs / "small-1", run.path)
        plain = load_recipe(run.recipe).model_dump(mode="json", exclude_none=True)
        written = json.loads(json.dumps({**plain, "rewards": [{"type": "answer"}], **changed}).replace("HERE", str(tmp_path)))
        run.write_recipe(dump_recipe(parse_recipe(written)))
        if not finished:
            shutil.rmtree(run.model)
            shutil.rmtree(run.checkpoints / "grpo-000002")
            run.set_status("interrupted")
        return run

    return make


def with_code(run: RunFolder, ran: Path) -> RunFolder:
    """A model with Python code, which its recipe allows."""
    (run.model / "theirs.py").write_text(
        MARK.replace("RAN", str(ran)) + "class Config: ...\nclass Model: ...\nclass Tokenizer: ...\n"
    )
    for name, settings in CODE_MODEL.items():
        path = run.model / name
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return run


OPENING: dict[str, list[str]] = {
    "chat": ["chat", "RUN"],
    "eval": ["eval", "RUN"],
    "eval by another task": ["eval", "RUN", "--task", "arithmetic"],
    "serve": ["serve", "RUN", "--port", "0", "--until-closed"],
    "verify": ["verify", "RUN"],
    "probe": ["probe", "RUN"],
    "probe by another recipe": ["probe", "arithmetic", "--from", "RUN"],
    "fork": ["fork", "RUN", "--step", "1"],
    "replay": ["replay", "RUN", "--step", "2", "--group", "0"],
    "begin another": ["train", "RUN/recipe.toml", "--runs", "RUN/../new"],
}
GRADING: dict[str, list[str]] = {
    name: words
    for name, words in {
        **OPENING,
        "rewards replay": ["rewards", "replay", "RUN"],
        "rewards try": ["rewards", "try", "RUN/recipe.toml", "--completion", "3"],
        "eval by its recipe": ["eval", "arithmetic-model", "--task", "RUN/recipe.toml"],
        "compare": ["compare", "RUN/recipe.toml", "--out", "RUN/../compared"],
    }.items()
    if name not in ("chat", "serve", "verify", "eval by another task", "probe by another recipe")
}
REWARDS_OF_THEIRS: dict[str, dict[str, Any]] = {
    "function": {"type": "python", "function": "HERE/mine.py:f"},
    "function of steps": {"type": "process", "source": "python", "function": "HERE/mine.py:f"},
    "splitter": {"type": "process", "splitter": "HERE/mine.py:f"},
    "judge": {"type": "judge", "model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": "HOME", "retries": 0},
}


def refused(result: Any, *words: str) -> None:
    output = " ".join(result.err.split())
    assert result.code == 2, output
    for word in ("not trusted", "--trust", *words):
        assert word in output


def words_for(command: list[str], run: RunFolder) -> list[str]:
    return [word.replace("RUN", str(run.path)) for word in command]


@pytest.mark.parametrize("command", OPENING)
def test_code_of_a_model_does_not_run(command: str, oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = with_code(theirs(model={"trust_remote_code": True}), tmp_path / "ran")
    refused(oncurve(*words_for(OPENING[command], run)), "model.trust_remote_code runs Python")
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_runs_once_it_is_trusted(oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path) -> None:
    """The same folder runs its code, so the refusals above test something."""
    run = with_code(theirs(model={"trust_remote_code": True}), tmp_path / "ran")
    assert "not trusted" not in oncurve("chat", run.path, "--trust").err
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", REWARDS_OF_THEIRS)
@pytest.mark.parametrize("command", GRADING)
def test_rewards_do_not_run(
    command: str, kind: str, oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path
) -> None:
    run = theirs(rewards=[{"type": "answer"}, REWARDS_OF_THEIRS[kind]])
    refused(oncurve(*words_for(GRADING[command], run)), "rewards." + REWARDS_OF_THEIRS[kind]["type"])
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["chat", "eval", "serve", "probe", "fork", "begin another"])
def test_environments_do_not_run(command: str, oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path) -> None:
    task = {"type": "file", "path": "HERE/rows.jsonl", "environment": "HERE/mine.py:World"}
    run = theirs(finished=False, task=task)
    refused(oncurve(*words_for(OPENING[command], run)), "task.environment runs Python")
    refused(oncurve("export", run.path, tmp_path / "out"), "task.environment runs Python")
    refused(oncurve("plan", "arithmetic", "--gpu", "H200", "--gpus", "8", "--measured", run.path), "task.environment")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("named", ["by its folder", "by the recipe's name"])
def test_a_run_is_not_resumed(
    named: str, oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path, recipe: Path
) -> None:
    """A recipe of the same name finds any unfinished run among the runs."""
    run = theirs(finished=False, rewards=[{"type": "answer"}, REWARDS_OF_THEIRS["function"]])
    target = [run.path] if named == "by its folder" else [recipe, "--runs", tmp_path]
    refused(oncurve("train", "--resume", *target), "rewards.python.function runs Python")
    assert not (tmp_path / "ran").exists()
    resumed = oncurve("train", "--resume", *target, "--trust", "--accept-changes")  # its rewards are not those it began with
    assert resumed.code == 0, resumed.err
    assert (tmp_path / "ran").exists()


def test_trust_is_remembered_for_just_this(oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = theirs(rewards=[{"type": "answer"}, REWARDS_OF_THEIRS["function"]])
    assert oncurve("eval", run.path, "--trust").code == 0
    trust._GRANTED.clear()  # another process
    assert oncurve("eval", run.path).code == 0
    copy = RunFolder(tmp_path / "copy")
    shutil.copytree(run.path, copy.path)
    with pytest.raises(RunError, match="not trusted"):
        trust.check(copy)
    other = run.recipe.read_text().replace("mine.py:f", "mine.py:World")
    run.recipe.write_text(other)
    with pytest.raises(RunError, match=r"mine\.py:World"):
        trust.check(run)


def test_another_run_in_a_trusted_place_is_not_trusted(theirs: Callable[..., RunFolder]) -> None:
    run = theirs(model={"trust_remote_code": True})
    trust.grant(run)
    trust.check(run)
    state = json.loads((run.path / "run.json").read_text())
    (run.path / "run.json").write_text(json.dumps(state | {"created": state["created"] + 1}))
    with pytest.raises(RunError, match="not trusted"):
        trust.check(run)


def test_a_run_can_not_bring_its_own_trust(theirs: Callable[..., RunFolder]) -> None:
    """Nothing in the folder grants trust, and names of a stage or reward can't hide what it does."""
    reward = {**REWARDS_OF_THEIRS["function"], "name": "model"}
    stage = {"type": "grpo", "sampling": {"max_new_tokens": 16}, "rewards": [reward]}
    run = theirs(stages=[{"type": "sft"}, stage])
    (run.path / "trusted").mkdir()
    with pytest.raises(RunError, match=r"rewards\.model\.function runs Python"):
        trust.check(run, "rewards")
    trust.check(run, "model", "task")


def test_a_plugin_is_found_wherever_a_reward_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The labeller of `iterate` is a reward too, inside of a stage."""
    plugin = EntryPoint("politeness", "package:POLITENESS", "oncurve.rewards")
    monkeypatch.setattr(trust, "declared_plugins", lambda group: {"politeness": (plugin,)} if group == plugin.group else {})
    named = {"type": "politeness"}
    tables = {"rewards": [named], "stages": [{"type": "grpo", "rewards": [named], "iterate": {"labeller": named}}]}
    found = {capability.where: capability.part for capability in trust._walk(tables)}
    places = ("rewards.politeness", "stages.grpo.rewards.politeness", "stages.grpo.iterate.labeller")
    assert found == {f"{place}.type": "rewards" for place in places}


def test_your_own_run_and_its_forks_never_ask(oncurve: Oncurve, runs: Path, tmp_path: Path) -> None:
    """small-1 has a reward in Python, and was trained here."""
    trust._GRANTED.clear()
    assert oncurve("eval", "small-1", "--runs", runs).code == 0
    assert oncurve("rewards", "replay", "small-1", "--runs", runs).code == 0
    assert oncurve("fork", runs / "small-1", "--step", "1", "--out", tmp_path / "fork").code == 0
    trust._GRANTED.clear()
    assert oncurve("eval", tmp_path / "fork").code == 0


def test_a_plain_run_from_elsewhere_never_asks(oncurve: Oncurve, theirs: Callable[..., RunFolder]) -> None:
    run = theirs(task={"type": "calculator", "heldout": 4})
    for words in (["verify", "RUN"], ["eval", "RUN"], ["rewards", "replay", "RUN"]):
        assert "not trusted" not in oncurve(*words_for(words, run)).err


def test_the_question_can_not_rewrite_the_terminal(oncurve: Oncurve, theirs: Callable[..., RunFolder]) -> None:
    run = theirs(model={"trust_remote_code": True, "source": "\x1b[2Jall is well"})
    output = oncurve("chat", run.path).err
    assert "\x1b[2J" not in output
    assert "all is well" in " ".join(output.split())


def test_without_a_home_the_answer_holds_for_the_command(
    oncurve: Oncurve, theirs: Callable[..., RunFolder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    run = theirs(rewards=[{"type": "answer"}, REWARDS_OF_THEIRS["function"]])
    assert oncurve("eval", run.path, "--trust").code == 0


PACKAGE = Path(package.__file__).parent


@cache
def all_calls() -> list[tuple[Path, ast.Call]]:
    """Every call in the package."""
    found = [(path, node) for path in PACKAGE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return [(path, node) for path, node in found if isinstance(node, ast.Call)]


def calls(*names: str) -> list[tuple[Path, ast.Call]]:
    """Every call of a function or method with one of these names in the package."""
    return [(path, node) for path, node in all_calls() if getattr(node.func, "attr", getattr(node.func, "id", "")) in names]


def test_every_key_that_loads_code_is_known() -> None:
    """Code that is imported by name comes from a key that `trust` checks."""
    keys = set()
    for path, call in calls("load_function", "load_environment"):
        first = call.args[0]
        if isinstance(first, ast.Attribute):
            keys.add(first.attr)
        else:  # as it was handed on: in environments, and in processes of rewards and agents
            assert path.name in ("environments.py", "openenv_environment.py", "python_function_worker.py", "launcher.py"), path
    assert keys | {"tools"} == trust.CODE_KEYS, "the names of tools are handed on as a list, in environments.py"


def test_every_recipe_of_a_run_is_loaded_by_trust() -> None:
    """Validating a recipe imports the plug-ins that it names."""
    for path, call in calls("load_recipe"):
        assert not any(ast.unparse(first).endswith(".recipe") for first in call.args[:1]), f"{path}:{call.lineno}"


def test_every_address_with_a_key_is_known() -> None:
    """Environment variables named by a recipe are read in one class, and its users have keys that `trust` checks."""
    assert {path.name for path, _ in calls("JudgeClient")} == {"judge.py", "training_free.py", "distil.py"}
    readers = [path for path in PACKAGE.rglob("*.py") if "key_env)" in path.read_text()]
    assert {path.name for path in readers} <= {"judge_client.py", "judge.py", "servers.py", "server.py"}


def test_every_model_is_loaded_with_a_word_on_code() -> None:
    """Without an explicit choice transformers asks at the terminal, and a pipe may answer."""
    for path, call in calls("from_pretrained"):
        error_text = {word.arg: word.value for word in call.keywords}
        if "Peft" in ast.unparse(call.func):
            continue  # it reads JSON alone
        assert "trust_remote_code" in error_text, f"{path}:{call.lineno}"


def schemas() -> list[type[BaseModel]]:
    queue: list[Any] = [Recipe, *(kind.options for kind in REWARDS.values()), *(kind.options for kind in TASKS.values())]
    checked: list[type[BaseModel]] = []
    while queue:
        one = queue.pop()
        queue += list(getattr(one, "__args__", ()))
        if isinstance(one, type) and issubclass(one, BaseModel) and one not in checked:
            checked.append(one)
            queue += [field.annotation for field in one.model_fields.values()]
    return checked


def test_every_key_that_sounds_like_code_or_an_address_is_known() -> None:
    """Found by its description: a new key that names a function, an endpoint or a key's variable must be checked."""
    known = trust.CODE_KEYS | {"base_url", "key_env", "command", "trust_remote_code", "trusted", "sandbox"}
    for schema in schemas():
        for key, field in schema.model_fields.items():
            if key == "type":
                continue  # a choice among what is built in
            error_text = f"{key} {field.description or ''}".lower()
            if any(word in error_text for word in ("file.py:", "module:", "_url", "http://", "_env", "python code", "sandbox")):
                assert key in known, f"{schema.__name__}.{key}"
