"""Plug-ins of installed packages: each test installs a real one (a module and its .dist-info) in a folder on sys.path."""

from __future__ import annotations

import contextlib
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oncurve.cli.app import main
from oncurve.errors import PluginError, RecipeError
from oncurve.plugins import Registry, check_instance
from oncurve.recipe.defaults import advantage_settings
from oncurve.recipe.load import dump_recipe, load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Reward, Task
from oncurve.recipe.schema.stages import Grpo
from oncurve.recipe.variants import with_algorithm
from oncurve.records import Prompt, StepReport
from oncurve.rewards.registry import REWARDS, build_reward, can_define_accuracy
from oncurve.rng import philox_generator
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.tasks.environments import ENVIRONMENTS, load_environment
from oncurve.tasks.registry import TASKS, build_task
from oncurve.training.sinks import build_sinks
from oncurve.training.stages.grpo import grpo_learner_settings
from oncurve.training.start import begin, resume
from oncurve.training.trainer import TimeUp
from oncurve.trust import capabilities_of
from tests.rewards.builders import group
from tests.training.builders import digits, loop_for
from tests.training.builders import recipe as small_recipe
from tests.training.test_trainer import fingerprint

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


OBJECTIVE = """
from dataclasses import dataclass
from oncurve.algos.surrogates import SurrogateTokens
from oncurve.objective_specs import ObjectiveSpec

@dataclass(frozen=True)
class Squared:
    low: float = 0.2
    high: float = 0.2

    def __call__(self, ratio_M, advantage_M, logp_M):
        never_M = advantage_M != advantage_M
        return SurrogateTokens(ratio_M * advantage_M - (ratio_M - 1) ** 2, never_M, never_M)

    def with_range(self, low, high, dual):
        return Squared(low, high)

def longest(rows, totals):
    return 1.0 / totals.length_budget

SQUARED = ObjectiveSpec("token_ratio", Squared(), (0.2, 0.2), longest, "a penalty instead of a clip", "ours", scale="none")
"""


STAGE = '''
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt, model_validator

from oncurve.recipe.schema.base import conflict
from oncurve.recipe.schema.stages import StageBase
from oncurve.records import StepReport
from oncurve.training.stages.table import StageType


class Shrink(StageBase):
    """Multiplies every trained weight by a factor."""

    type: Literal["shrink"] = "shrink"
    """The stage's type."""
    steps: PositiveInt = 1
    """Number of multiplications."""
    factor: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """The factor of each step."""

    @model_validator(mode="after")
    def _check(self):
        if self.factor == 1.0:
            raise conflict("factor", 1.0, because="nothing would change", fix="use less than 1")
        return self


class ShrinkLoop:
    is_over = False

    def __init__(self, stage, policy):
        self.stage, self.policy = stage, policy

    @torch.no_grad()
    def step(self, n):
        for weight in self.policy.trainable.values():
            weight.mul_(self.stage.factor)
        return StepReport(self.stage.label, n, {}, {"update": 0.1})

    def state(self):
        return {}

    def load_state(self, tensors):
        pass


SHRINK = StageType(lambda stage, context: ShrinkLoop(stage, context.policy), section=Shrink)
'''


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
    environment: Any = load_environment("shop", "task.environment")
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


def objective_recipe(**stage: Any) -> Recipe:
    stages = [{"type": "grpo", "objective": "squared", **stage}]
    return parse_recipe({"name": "s", "task": {"type": "arithmetic"}, "rewards": [{"type": "answer"}], "stages": stages})


def test_an_objective_of_an_installed_package(install: Install) -> None:
    """With a surrogate and a reduction of its own. Its traits are the defaults of the stage, and a clip range reaches it."""
    install("squares", OBJECTIVE, objectives="squared = squares:SQUARED")
    recipe = objective_recipe(clip={"low": 0.1, "high": 0.3}, length_budget=None)
    (stage,) = recipe.stages
    assert isinstance(stage, Grpo)
    assert advantage_settings(stage) == ("mean", "none")
    settings = grpo_learner_settings(stage)
    assert (settings.objective.surrogate.low, settings.objective.surrogate.high) == (0.1, 0.3)  # type: ignore[attr-defined]
    assert settings.objective.reduction.__name__ == "longest"
    assert parse_recipe(tomllib.loads(dump_recipe(recipe))) == recipe, "a run's recipe.toml can be read again"
    assert with_algorithm(objective_recipe(), "squared").stages[-1].label == "squared"
    assert isinstance(with_algorithm(recipe, "rloo").stages[-1], Grpo)
    assert {str(c) for c in capabilities_of(recipe)} == {
        "stages.grpo.objective runs Python of the installed package squares 1.0: squares:SQUARED"
    }


def test_a_step_with_the_objective_of_a_package(install: Install) -> None:
    """At a ratio of 1 the penalty has no gradient: the loss is the mean over L of A·ρ, as dr_grpo's times the completions."""
    install("squares", OBJECTIVE, objectives="squared = squares:SQUARED")
    reports = {}
    for objective in ("squared", "dr_grpo"):
        loop = loop_for({"objective": objective, "optimiser": {"learning_rate": 1e-9, "max_grad_norm": 0.0}}, digits)
        reports[objective] = loop.step(1).metrics
    completions = 16
    assert reports["squared"]["grad_norm"] == pytest.approx(completions * reports["dr_grpo"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("1 / 0", "importing squares:SQUARED failed: ZeroDivisionError"),
        ("SQUARED = len", "squares:SQUARED is no objective: it is a builtin_function_or_method, not a ObjectiveSpec"),
    ],
)
def test_an_objective_that_can_t_be_used_is_one_error(source: str, because: str, install: Install) -> None:
    install("squares", source, objectives="squared = squares:SQUARED")
    with pytest.raises(PluginError) as caught:
        objective_recipe()
    assert because in caught.value.because
    assert caught.value.where == 'entry point "oncurve.objectives"'


def test_a_misspelt_objective_is_one_error(install: Install) -> None:
    install("squares", OBJECTIVE, objectives="squared = squares:SQUARED")
    with pytest.raises(RecipeError, match="objective"):
        objective_recipe(objective="sqared")


def with_shrink(*sets: str, **stage: Any) -> Recipe:
    """The small recipe with a stage of a package between its own two."""
    whole = small_recipe("sft.steps=1", "grpo.steps=1").model_dump(mode="json", exclude_none=True)
    sft, grpo = whole["stages"]
    return parse_recipe(whole | {"stages": [sft, {"type": "shrink", "steps": 3, "factor": 0.5, **stage}, grpo]}, list(sets))


def test_a_stage_of_an_installed_package_trains_and_resumes(install: Install, tmp_path: Path) -> None:
    """Three halvings between two built-in stages: each weight after them is an eighth of what it was before."""
    install("shrinks", STAGE, stages="shrink = shrinks:SHRINK")
    recipe = with_shrink("shrink.save_every=1")
    run = begin(recipe, out=tmp_path / "run")
    assert load_recipe(run.recipe).stages[1].factor == 0.5  # type: ignore[union-attr]
    before, after = (load_file(run.checkpoints / name / "model.safetensors") for name in ("sft-000001", "shrink-000003"))
    assert all(torch.equal(after[name], weight / 8) for name, weight in before.items())
    with pytest.raises(TimeUp):
        begin(recipe, out=tmp_path / "stopped", minutes=1e-9)
    stopped = RunFolder(tmp_path / "stopped")
    while stopped.state().current_status != "finished":
        with contextlib.suppress(TimeUp):
            resume(stopped, minutes=1e-9)
    assert fingerprint(stopped) == fingerprint(run)
    assert {str(c) for c in capabilities_of(recipe)} == {
        "stages.shrink.type runs Python of the installed package shrinks 1.0: shrinks:SHRINK"
    }


def test_the_keys_of_a_package_s_stage_are_checked_and_explained(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("shrinks", STAGE, stages="shrink = shrinks:SHRINK")
    assert with_shrink("shrink.factor=0.25").stages[1].factor == 0.25  # type: ignore[union-attr]
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"factor": 2.0}, "shrink.factor", "1 or less"),
        ({"factors": 0.5}, "shrink.factors", "did you mean 'factor'"),
        ({"factor": "half"}, "shrink.factor", "number"),
        ({"factor": 1.0}, "shrink.factor", "nothing would change"),
        ({"name": "small", "factor": 2.0}, "small.factor", "1 or less"),
    ]
    for options, where, text in cases:
        with pytest.raises(RecipeError) as caught:
            with_shrink(**options)
        assert caught.value.where == where
        assert text in str(caught.value)
    with pytest.raises(RecipeError, match='type = "shrink"'):
        with_shrink(type="shrunk")
    assert main(["recipe", "explain", "shrink.factor"]) == 0
    assert "The factor of each step." in capsys.readouterr().out
    assert main(["recipe", "explain", "shrink"]) == 0
    assert "Multiplies every trained weight by a factor." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "because"),
    [
        ("1 / 0", "importing shrinks:SHRINK failed: ZeroDivisionError"),
        ("SHRINK = len", "shrinks:SHRINK is no stage: it has no `section` that extends StageBase"),
        (STAGE.replace(", section=Shrink)", ")"), "shrinks:SHRINK is no stage: it has no `section` that extends StageBase"),
        ("from oncurve.recipe.schema.stages import Sft\nclass SHRINK:\n    section = Sft", "it has no function `build`"),
    ],
)
def test_a_stage_that_can_t_be_used_is_one_error(source: str, because: str, install: Install) -> None:
    install("shrinks", source, stages="shrink = shrinks:SHRINK")
    with pytest.raises(PluginError) as caught:
        with_shrink()
    assert because in caught.value.because
    assert caught.value.where == 'entry point "oncurve.stages"'


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


LOADING = ["chat RUN", "eval RUN", "verify RUN", "train --resume RUN", "recipe show RUN", "fork RUN --step 1",
           "replay RUN --step 1 --group 0", "probe RUN", "train RUN/recipe.toml"]  # fmt: skip
LOOKING = ["show RUN", "runs", "status RUN", "pairs RUN -o OUT", "rewards audit RUN"]


@pytest.mark.parametrize("command", LOADING + LOOKING)
def test_no_command_imports_a_plugin_of_a_run_from_elsewhere(
    command: str, install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validating a recipe imports its stages and objectives."""
    monkeypatch.chdir(tmp_path)
    install("shrinks", STAGE, stages="shrink = shrinks:SHRINK")
    install("squares", OBJECTIVE, objectives="squared = squares:SQUARED")

    def fill(run: RunFolder, _: Path) -> None:
        stages = '[[stages]]\ntype = "shrink"\n[[stages]]\ntype = "grpo"\nobjective = "squared"\n'
        run.write_recipe(f'name = "s"\ntask = {{ type = "arithmetic" }}\n{stages}')
        RunWriter.create(run.path).close()

    run = RunFolder.create_at(tmp_path / "runs" / "theirs", fill=fill)
    run.set_status("interrupted")
    code = main(command.replace("RUN", str(run.path)).replace("OUT", str(tmp_path / "out")).split())
    message = " ".join(capsys.readouterr().err.split())
    assert not {"shrinks", "squares"} & sys.modules.keys(), message
    if command in LOADING:
        assert code == 2
        assert "not trusted: " in message
        assert "stages.shrink.type runs Python of the installed package shrinks 1.0: shrinks:SHRINK" in message
        assert "stages.grpo.objective runs Python of the installed package squares 1.0: squares:SQUARED" in message


def test_a_run_with_plugins_is_loaded_once_it_is_trusted(install: Install, tmp_path: Path) -> None:
    install("shrinks", STAGE, stages="shrink = shrinks:SHRINK")

    def fill(run: RunFolder, _: Path) -> None:
        run.write_recipe('name = "s"\ntask = { type = "arithmetic" }\n[[stages]]\ntype = "shrink"\n')
        RunWriter.create(run.path).close()

    run = RunFolder.create_at(tmp_path / "theirs", fill=fill)
    assert main(["recipe", "show", str(run.path)]) == 2
    assert main(["verify", str(run.path), "--trust"]) == 0, "the fix of that message"
    assert "shrinks" in sys.modules
    assert main(["recipe", "show", str(run.path)]) == 0


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
