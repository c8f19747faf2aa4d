"""Plug-ins of installed packages: each test installs a real one (a module and its .dist-info) in a folder on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oncurve.errors import PluginError, RecipeError
from oncurve.plugins import Registry, check_instance
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.records import Prompt
from oncurve.rewards.registry import REWARDS, build_reward, can_define_accuracy
from oncurve.rng import philox_generator
from oncurve.tasks.environments import ENVIRONMENTS, load_environment
from oncurve.tasks.registry import TASKS, build_task
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
from oncurve.records import Prompt
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
