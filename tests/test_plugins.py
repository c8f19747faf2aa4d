"""Plug-ins of installed packages: each test installs a real one (a module and its .dist-info) in a folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oncurve.cli.app import main
from oncurve.errors import PluginError, RecipeError
from oncurve.plugins import Registry, check_instance
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.records import Prompt, StepReport
from oncurve.rewards.registry import REWARDS, build_reward, can_define_accuracy
from oncurve.rng import philox_generator
from oncurve.tasks.environments import ENVIRONMENTS, load_environment
from oncurve.tasks.registry import TASKS, build_task
from oncurve.training.sinks import build_sinks
from oncurve.trust import capabilities_of
from tests.rewards.builders import group

Install = Callable[..., None]

REWARD = '''
from dataclasses import dataclass
from oncurve.recipe.schema.sections import Section
from oncurve.rewards.base import RewardType, Score

class ThanksOptions(Section):
    """1 if the completion holds a word of thanks."""
    word: str = "thanks"
    """The word."""

@dataclass(frozen=True)
class ThanksReward:
    name: str
    weight: float
    options: ThanksOptions

    def score(self, group):
        return [Score(float(self.options.word in completion.text)) for completion in group.completions]

THANKS = RewardType(ThanksOptions, ThanksReward, is_verifiable=True)
'''

TASK = '''
from oncurve.recipe.schema.sections import Reward, Section
from oncurve.records import Prompt, StepReport
from oncurve.tasks.base import TaskType

class EchoOptions(Section):
    """Say a word again."""
    word: str
    """The word."""

class EchoTask:
    train_size, examples, alphabet = 1, (), None
    default_rewards = (Reward(type="answer"),)

    def __init__(self, config, options):
        self.heldout = (Prompt("echo/heldout", f"say {options.word}"),)
        self.options = options

    def train_prompt(self, index):
        return Prompt("echo/0", f"say {self.options.word}", columns={"answer": self.options.word})

ECHO = TaskType(EchoOptions, EchoTask)
'''

ENVIRONMENT = """
class Shop:
    calls = ("?",)

    def reply(self, prompt, turns, dice):
        return "3 coins"
"""

SINK = """
from oncurve.training.sinks import SinkListener

class MemorySink(SinkListener):
    def open(self, recipe, folder, resumed_at):
        self.values = {}

    def write(self, values, step):
        self.values[step + self.sink.options["start"]] = dict(values)

    def close(self, status):
        pass
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package of one module that declares entry points."""

    def install(package: str, source: str, **entry_points: str) -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{package}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        groups = "\n".join(f"[oncurve.{group}]\n{declared}\n" for group, declared in entry_points.items())
        (info / "entry_points.txt").write_text(groups)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


def test_a_reward_of_an_installed_package_is_used_by_its_name(install: Install) -> None:
    assert "gratitude" not in REWARDS
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    config = Reward.model_validate({"type": "gratitude", "name": "nice", "weight": 0.5, "word": "cheers"})
    reward = build_reward(config)
    assert [result.value for result in reward.score(group("thanks", "cheers!"))] == [0.0, 1.0]  # type: ignore[union-attr]
    assert (reward.name, reward.weight) == ("nice", 0.5)
    assert can_define_accuracy(config)
    assert list(REWARDS)[-1] == "gratitude"
    assert len(REWARDS) == len(REWARDS.built_in) + 1


def test_its_options_are_validated_by_its_own_schema(install: Install) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    with pytest.raises(RecipeError, match="did you mean 'word'") as caught:
        build_reward(Reward.model_validate({"type": "gratitude", "words": "cheers"}))
    assert caught.value.where == "rewards.gratitude.words"


def test_a_misspelt_name_is_compared_with_plugins_too(install: Install) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    with pytest.raises(RecipeError, match="did you mean 'gratitude'"):
        build_reward(Reward(type="gratitute"))


def test_a_task_of_an_installed_package(install: Install) -> None:
    install("echoes", TASK, tasks="echo = echoes:ECHO")
    task = build_task(Task.model_validate({"type": "echo", "word": "hey"}))
    assert (task.train_prompt(0).text, task.train_prompt(0).columns) == ("say hey", {"answer": "hey"})
    assert "echo" in TASKS
    with pytest.raises(RecipeError, match="did you mean 'echo'"):
        build_task(Task(type="ecko"))


def test_an_environment_of_an_installed_package(install: Install) -> None:
    install("markets", ENVIRONMENT, environments="shop = markets:Shop")
    environment = load_environment("shop", "task.environment")
    assert environment is not None
    assert environment.reply(Prompt("p", "?"), ("?",), philox_generator(0, "dice")) == "3 coins"
    with pytest.raises(RecipeError, match="did you mean 'shop'") as caught:
        load_environment("shopp", "task.environment")
    assert caught.value.where == "task.environment"


def test_a_sink_of_an_installed_package(install: Install) -> None:
    install("loggers", SINK, sinks="memory = loggers:MemorySink")
    stages = [{"type": "sft", "steps": 2}]
    sink = {"type": "memory", "options": {"start": 10}}
    (listener,) = build_sinks(parse_recipe({"name": "s", "task": {"type": "arithmetic"}, "stages": stages, "sinks": [sink]}))
    recipe = parse_recipe({"name": "s", "task": {"type": "arithmetic"}, "stages": stages})
    listener.on_run_start(recipe, Path("runs/s"), 1000, None)
    listener.on_step(StepReport("sft", 2, {"loss": 0.5}, {}))
    assert listener.values == {12: {"sft/loss": 0.5}}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sink", "where", "because", "fix"),
    [
        ({"type": "memoryy"}, "sinks.memoryy.type", "tensorboard, wandb, trackio, memory", "did you mean 'memory'"),
        ({"type": "wandb", "options": {"a": 1}}, "sinks.wandb.options", "wandb is built in and has no options", "remove it"),
    ],
)
def test_a_sink_that_can_t_be_used(sink: dict[str, Any], where: str, because: str, fix: str, install: Install) -> None:
    install("loggers", SINK, sinks="memory = loggers:MemorySink")
    with pytest.raises(RecipeError) as caught:
        parse_recipe({"name": "s", "task": {"type": "arithmetic"}, "stages": [{"type": "sft"}], "sinks": [sink]})
    assert caught.value.where == where
    assert because in caught.value.because
    assert fix in caught.value.fix


def test_explain_lists_plugins_with_what_they_do(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    assert main(["recipe", "explain", "rewards.type"]) == 0
    assert "rewards.gratitude\n    1 if the completion holds a word of thanks." in capsys.readouterr().out
    assert main(["recipe", "explain", "rewards.gratitude.word"]) == 0
    assert 'default  "thanks"' in capsys.readouterr().out


def test_a_broken_plugin_does_not_hide_the_others_from_explain(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("broken", "1 / 0", rewards="gratitude = broken:THANKS")
    assert main(["recipe", "explain", "rewards.type"]) == 0
    shown = capsys.readouterr()
    assert "rewards.answer" in shown.out
    assert "rewards.gratitude is not listed" in shown.err
    assert main(["recipe", "explain", "rewards.gratitude"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_run_from_elsewhere_must_be_trusted_to_use_a_plugin(install: Install) -> None:
    """Whoever wrote the recipe picks the options that the package's code gets."""
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    install("echoes", TASK, tasks="echo = echoes:ECHO")
    recipe = {"name": "s", "task": {"type": "echo"}, "rewards": [{"type": "gratitude"}], "stages": [{"type": "grpo"}]}
    assert {str(capability) for capability in capabilities_of(parse_recipe(recipe))} == {
        "task.type runs Python of the installed package echoes 1.0: echoes:ECHO",
        "rewards.gratitude.type runs Python of the installed package polite 1.0: polite:THANKS",
    }
    assert "echoes" not in sys.modules


def test_nothing_is_imported_before_its_name_is_looked_up(install: Install) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    assert "gratitude" in REWARDS
    assert "gratitude" in list(REWARDS)
    build_reward(Reward(type="answer"))
    assert "polite" not in sys.modules
    _ = REWARDS["gratitude"]
    assert "polite" in sys.modules


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("1 / 0", "importing broken:THANKS failed: ZeroDivisionError"),
        ("import nothing_of_this_name", "importing broken:THANKS failed: ModuleNotFoundError"),
        ("raise SystemExit(3)", "importing broken:THANKS failed: SystemExit"),
        ("", "importing broken:THANKS failed: AttributeError"),
        ("THANKS = len", "broken:THANKS is no reward: it is a builtin_function_or_method, not a RewardType"),
    ],
)
def test_a_plugin_that_can_t_be_used_is_one_error_that_names_its_package(source: str, because: str, install: Install) -> None:
    install("broken", source, rewards="gratitude = broken:THANKS")
    with pytest.raises(PluginError) as caught:
        build_reward(Reward(type="gratitude"))
    assert caught.value.where == 'entry point "oncurve.rewards"'
    assert caught.value.what == "the reward 'gratitude' of the package broken 1.0 can't be used"
    assert because in caught.value.because
    assert "broken 1.0" in caught.value.fix
    assert build_reward(Reward(type="answer")).name == "answer"  # the others are as usable as before


def test_an_environment_without_reply_is_refused(install: Install) -> None:
    install("markets", "class Shop:\n    calls = ('?',)\n", environments="shop = markets:Shop")
    with pytest.raises(PluginError, match=r"markets:Shop is no environment: .* a method `reply"):
        load_environment("shop", "task.environment")


def test_a_built_in_name_can_t_be_taken(install: Install) -> None:
    """Using either of the two silently would be wrong for one reader of the recipe."""
    install("polite", REWARD, rewards="math = polite:THANKS")
    with pytest.raises(PluginError, match="the reward 'math' is built in") as caught:
        build_reward(Reward(type="math"))
    assert caught.value.fix == "rename the entry point, or uninstall polite 1.0"
    assert list(REWARDS).count("math") == 1


def test_two_packages_can_t_declare_one_name(install: Install) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    install("kind", REWARD, rewards="gratitude = kind:THANKS")
    with pytest.raises(PluginError) as caught:
        build_reward(Reward(type="gratitude"))
    assert all(package in caught.value.fix for package in ("polite 1.0", "kind 1.0"))
    assert "declares the same reward 'gratitude'" in caught.value.because


def test_a_package_that_is_uninstalled_is_gone(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("polite", REWARD, rewards="gratitude = polite:THANKS")
    assert "gratitude" in REWARDS
    monkeypatch.setattr(sys, "path", sys.path[1:])
    assert "gratitude" not in REWARDS
    with pytest.raises(RecipeError, match="there is no reward 'gratitude'"):
        build_reward(Reward(type="gratitude"))


def test_built_in_entries_need_no_package() -> None:
    registry = Registry("unheard_of_kind", {"a": 1, "b": 2}, check_instance(int))
    assert dict(registry) == {"a": 1, "b": 2}
    assert registry.find("a", "here") == 1
    assert registry.get("c") is None
    assert set(ENVIRONMENTS.built_in) == {"calculator"}
