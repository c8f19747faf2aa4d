"""The Python API."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import io
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import peft
import pytest
import transformers

import oncurve
from oncurve.api import as_mix
from oncurve.errors import DataError, OncurveError, RecipeError, RewardError, RunError
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.recipe.schema.model import Lora, TinyModel
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.trl.options import TRL_ARGUMENTS
from oncurve.recipe.validate import reject_python_only
from oncurve.records import Group, Prompt
from oncurve.rewards.base import completion_by_letters, from_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.process import ProcessReward
from oncurve.runs.database.reader import RunReader

TINY = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=64)
SMALL: dict[str, Any] = {
    "prompts_per_step": 2,
    "group_size": 4,
    "steps": 2,
    "sampling": {"max_new_tokens": 8},
    "save_every": 1,
    "threads": 1,
}


def short(completion: str) -> float:
    return float(len(completion) < 6)


def small_model() -> tuple[Any, Any]:
    tokenizer = build_tokenizer("0123456789+=")
    return build_model(TINY, tokenizer, 0), tokenizer


def train(folder: Path, **changes: Any) -> oncurve.Run:
    message: dict[str, Any] = {"model": small_model(), "prompts": ["3+4=", "5+6="], "rewards": [short], "quiet": True, **SMALL}
    return oncurve.train(runs_dir=folder, **(message | changes))


def test_a_function_and_some_prompts_are_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path, heldout=["1+1="], quiet=False)
    assert (run.name, run.path, run.status) == ("run-1", tmp_path / "run-1", "finished")
    assert (run.model_path / "config.json").is_file()
    assert [step for step, _ in run.metrics("reward")] == [1, 2]
    assert run.metrics("teacher_divergence") == []  # a metric that this run does not log
    with pytest.raises(RunError, match=r"no metric 'rewrad' \(did you mean 'reward'\?\)"):
        run.metrics("rewrad")
    assert [(e.stage, e.asked) for e in run.evals] == [("grpo", 1)]
    assert run.accuracy in (0.0, 1.0)
    groups = run.groups(1)
    assert [len(group.graded) for group in groups] == [4, 4]
    assert groups[0].scored.scored[0].aspects[0].name == "short"
    shown = capsys.readouterr().out
    assert "oncurve chat" in shown
    assert "oncurve eval" not in shown  # its prompts are not on disk


def test_the_built_in_model_by_name_and_columns_for_rewards(tmp_path: Path) -> None:
    def right(completion: str, answer: str) -> float:
        return float(completion == answer)

    run = train(tmp_path, model="tiny", prompts=[{"prompt": "1+1=", "answer": "2"}], rewards=(right, 0.5), steps=1, name="sums")
    assert run.name == "sums-1"
    assert run.recipe.rewards[0].weight == 0.5
    assert run.recipe.rewards[0].name == "right"


def test_a_recipe_trains_too(tmp_path: Path) -> None:
    sets = [
        "sft.steps=1",
        "sft.optimiser.warmup_steps=0",
        "grpo.optimiser.warmup_steps=0",
        "grpo.steps=1",
        "grpo.prompts_per_step=2",
        "task.heldout=4",
        "threads=1",
        "model.tiny.width=32",
    ]
    recipe = oncurve.load_recipe("arithmetic", sets)
    run = oncurve.train(recipe, runs_dir=tmp_path, out=tmp_path / "mine", quiet=True)
    assert run.path == tmp_path / "mine"
    assert [e.stage for e in run.evals] == ["sft", "grpo"]
    with pytest.raises(RecipeError, match="it is a key of the recipe"):
        oncurve.train(recipe, group_size=4)


def test_it_is_called_by_name_whatever_was_imported_before(tmp_path: Path) -> None:
    import oncurve.training.trainer

    with pytest.raises(RecipeError, match="prompts: missing"):
        oncurve.train(model="tiny")


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("group_sise", "did you mean 'group_size'"),
        ("reward", "did you mean 'rewards'"),
        ("learning_rate", "optimiser={'learning_rate': …}"),
        ("max_new_tokens", "sampling={'max_new_tokens': …}"),
    ],
)
def test_unknown_keywords(tmp_path: Path, keyword: str, words: str) -> None:
    with pytest.raises(RecipeError) as raised:
        train(tmp_path, **{keyword: 3})
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": None}, "rewards: missing"),
        ({"rewards": []}, "rewards: none"),
        ({"rewards": [3]}, "a reward is a function"),
        ({"rewards": ["answr"]}, "did you mean 'answer'"),
        ({"prompts": []}, "no training prompts"),
        ({"model": 3}, "a model needs its tokenizer"),
        ({"group_size": 1}, "own mean"),
        ({"steps": "many"}, "grpo.steps"),
    ],
)
def test_what_can_not_be_trained(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OncurveError) as raised:
        train(tmp_path, **change)
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_rewards_as_python_writes_them() -> None:
    mix = as_mix([short, (short, 0.5), lambda completion: 1.0, ("format", 0.1), "answer"])
    assert [(reward.name, reward.weight) for reward in mix.rewards] == [
        ("short", 1.0),
        ("short_2", 0.5),
        ("lambda", 1.0),
        ("format", 0.1),
        ("answer", 1.0),
    ]
    assert as_mix(short).rewards[0].name == "short"
    assert as_mix(["repetition", ("format", 0.5)]).accuracy_reward is None, "nothing says what is right"
    assert as_mix(["repetition", (short, 0.5)]).accuracy_reward == "short"
    assert as_mix(["format", ("countdown", 0.5)]).accuracy_reward == "countdown"
    assert as_mix(mix) is mix
    assert isinstance(as_mix((short, 2)), RewardMix)
    with pytest.raises(RewardError, match="a pair is"):
        as_mix([(short, "much")])  # type: ignore[list-item]


def test_a_reward_under_another_weight_is_the_same_in_all_else() -> None:
    """A reward that reads tokens gets the tokenizer, whether it was passed by name or as an object."""
    for steps in ("process", ProcessReward("process", 1.0)):
        mix = as_mix([(steps, 0.5)])
        mix.bind(lambda: from_letters)
        (scored,) = mix.score([Group(Prompt("p", text="?"), np.zeros(1, np.int64), (completion_by_letters("1+1=2"),))])
        (aspect,) = scored.scored[0].aspects
        assert (aspect.weight, aspect.failure, aspect.steps) == (0.5, None, ((4, 1.0),))


def test_a_stopped_run_resumes_with_the_same_objects(tmp_path: Path) -> None:
    uninterrupted = train(tmp_path / "whole")

    calls = 0

    def stops(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 8:
            raise KeyboardInterrupt
        return short(completion)

    stops.__name__ = "short"
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "stopped", rewards=[stops])
    run = oncurve.Run.open("run-1", tmp_path / "stopped")
    assert run.status == "interrupted"
    assert repr(run) == f"<Run {run.path}: interrupted>"
    with pytest.raises(RecipeError, match="keeps its recipe"):
        train(tmp_path / "stopped", resume=run)
    same: dict[str, Any] = {
        "model": small_model(),
        "prompts": ["3+4=", "5+6="],
        "rewards": [short],
        "resume": run,
        "quiet": True,
    }
    with pytest.raises(RunError, match=r"changed since the run began: rewards\.short"):
        oncurve.train(**same)
    again = oncurve.train(**same, accept_changes=True)
    assert again.status == "finished"
    with RunReader.open(uninterrupted.path) as one, RunReader.open(again.path) as other:
        assert one.fingerprint() == other.fingerprint()


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run"):
        oncurve.Run.open("run-9", tmp_path)


def test_it_works_off_the_main_thread(tmp_path: Path) -> None:
    """As in a notebook's background thread: signal handlers can only be set in the main thread."""
    done: list[oncurve.Run] = []
    thread = threading.Thread(target=lambda: done.append(train(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert done[0].status == "finished"


class Table:
    """Iterates over the names of its columns, as a DataFrame does."""

    def itertuples(self) -> None: ...

    def __iter__(self) -> Any:
        return iter(["prompt", "answer"])


@pytest.mark.parametrize("name", ["prompts", "heldout"])
@pytest.mark.parametrize(
    ("value", "fix"),
    [
        ("3+4=", "=['3+4=']"),
        ("rows.jsonl", 'type = "file"'),
        ({"prompt": "3+4=", "answer": "7"}, "=[{"),
        ({"train": ["3+4="]}, "=[{"),
        (Table(), '.to_dict("records")'),
        ({"3+4=", "5+6="}, "in an order that stays the same"),
        (b"3+4=", "it is a list of prompts"),
        (7, "it is a list of prompts"),
        (io.StringIO("3+4=\n"), "it is a list of prompts"),
    ],
)
def test_what_is_not_a_list_of_prompts_is_not_trained_on(tmp_path: Path, name: str, value: Any, fix: str) -> None:
    with pytest.raises(DataError) as raised:
        train(tmp_path, **{name: value})
    assert raised.value.where == name
    assert fix in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("row", "words"), [(3, "prompts[1]"), (None, "prompts[1]"), ({"answer": "7"}, "rename the column"), ([], "prompts[1]")]
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(OncurveError) as raised:
        train(tmp_path, prompts=["3+4=", row])
    assert words in str(raised.value)


class Captured(Exception):
    """Carries the recipe that would have been trained."""


@pytest.fixture
def recipe_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recipe]:
    """The recipe that a call of `train` builds, without training it."""

    def capture(recipe: Recipe, **others: Any) -> None:
        raise Captured(recipe)

    def call(*positional: Any, **keywords: Any) -> Recipe:
        with pytest.raises(Captured) as raised:
            oncurve.train(*positional, quiet=True, **keywords)
        (recipe,) = raised.value.args
        assert isinstance(recipe, Recipe)
        return recipe

    monkeypatch.setattr("oncurve.training.start.begin", capture)
    return call


def test_the_model_and_sinks_are_set_without_a_file(recipe_of: Callable[..., Recipe]) -> None:
    common: dict[str, Any] = {"prompts": ["3+4="], "rewards": [short]}
    recipe = recipe_of(
        model="tiny", lora={"rank": 4}, dtype="bfloat16", device="cpu", system_prompt="Be brief.",
        sinks=["tensorboard", {"type": "wandb", "project": "mine", "offline": True}],
        evaluation={"samples": 4, "temperature": 1.0}, eval_every=5, patience=2, keep_best="heldout_accuracy", **common,
    )  # fmt: skip
    model = recipe.model
    assert model.lora is not None
    assert (model.lora.rank, model.dtype, model.device, model.system_prompt) == (4, "bfloat16", "cpu", "Be brief.")
    assert [(sink.type, sink.project) for sink in recipe.sinks] == [("tensorboard", "oncurve"), ("wandb", "mine")]
    assert (recipe.evaluation.samples, recipe.stages[0].heldout_patience) == (4, 2)
    assert recipe_of(model="tiny", lora=True, **common).model.lora == Lora()
    assert recipe_of(model="tiny", lora=False, sinks="tensorboard", **common).sinks[0].type == "tensorboard"


def test_the_model_may_be_a_dict_of_its_keys(recipe_of: Callable[..., Recipe]) -> None:
    keys = {"source": "tiny", "template_options": {"enable_thinking": False}, "quantise": "nf4"}
    model = recipe_of(model=keys, lora={"rank": 4}, prompts=["3+4="], rewards=[short]).model
    assert (model.source, model.template_options, model.quantise) == ("tiny", {"enable_thinking": False}, "nf4")
    assert model.lora is not None
    loaded = oncurve.load_recipe("arithmetic")
    assert recipe_of(loaded, model={"template_options": {"a": 1}}).model.template_options == {"a": 1}
    with pytest.raises(OncurveError, match="did you mean 'source'"):
        recipe_of(model={"sorce": "tiny"}, prompts=["3+4="], rewards=[short])


def test_every_argument_of_trl_s_trainer_has_a_counterpart_or_an_explanation() -> None:
    """Read from its source, because importing it takes seconds."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    source = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text())
    trainer = next(node for node in source.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer")
    init = next(node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    ours = inspect.signature(oncurve.train).parameters
    assert {a.arg for a in init.args.args[1:] if a.arg not in ours} == set(TRL_ARGUMENTS)


def test_they_change_a_recipe_too(recipe_of: Callable[..., Recipe]) -> None:
    loaded = oncurve.load_recipe("arithmetic")
    assert recipe_of(loaded) == loaded
    changed = recipe_of(loaded, lora={"rank": 2}, seed=3, sinks=["tensorboard"])
    assert changed.model.lora is not None
    assert (changed.model.lora.rank, changed.seed, len(changed.sinks)) == (2, 3, 1)
    assert changed.stages == loaded.stages


def test_prompts_and_rewards_of_python_are_recorded_instead_of_the_recipes_own(recipe_of: Callable[..., Recipe]) -> None:
    """Otherwise `oncurve train --resume RUN` continues with the recipe's own, and `oncurve eval` measures its task."""
    loaded = oncurve.load_recipe("arithmetic")
    recipe = recipe_of(loaded, prompts=["3+4="], rewards=[(short, 0.5)])
    assert recipe.task.type == "python"
    assert [(r.type, r.label, r.weight, r.options) for r in recipe.rewards] == [
        ("python", "short", 0.5, {"function": "tests.test_api:short"})
    ]
    with pytest.raises(RecipeError, match="passed from Python"):
        reject_python_only(recipe)
    recipe = recipe_of(loaded, rewards=[short])
    assert (recipe.task, [r.label for r in recipe.rewards]) == (loaded.task, ["short"])
    recipe = recipe_of(loaded, prompts=["3+4="])
    assert (recipe.task.type, recipe.rewards, recipe.stages) == ("python", loaded.rewards, loaded.stages)
    stage = loaded.stages[-1].model_copy(update={"rewards": loaded.rewards})
    own = loaded.model_copy(update={"stages": (*loaded.stages[:-1], stage)})
    assert recipe_of(own, rewards=[short]).stages == loaded.stages  # the rewards of Python are those of every stage


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "tiny", "lora": {"rang": 4}}, "did you mean 'rank'"),
        ({"model": "tiny", "lora": 8}, "lora=True"),
        ({"model": "tiny", "dtype": "fp16"}, "model.dtype"),
        ({"model": "tiny", "sinks": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ({"lora": {"rank": 4}}, "a model object is trained as it is"),
        ({"dtype": "bfloat16"}, "a model object is trained as it is"),
        ({"patience": 2}, "set eval_every"),
        ({"patience": 2, "eval_every": 1}, "no held-out prompts"),
        ({"recipe": "arithmetic"}, "oncurve.load_recipe('arithmetic')"),
        ({"rewards": [{"type": "answer", "tke": "number"}]}, "did you mean 'take'"),
        ({"rewards": [{"take": "number"}]}, "a dict without 'type'"),
        ({"rewards": {"type": "answr"}}, "did you mean 'answer'"),
        ({"rewards": [{"type": "answer", "weight": "much"}]}, "weight"),
        ({"num_generations": 4}, "write group_size=…"),
        ({"learning_rate": 1e-5}, "write optimiser={'learning_rate': …}"),
        ({"gradient_accumulation_steps": 4}, "write prompts_per_step=…"),
        ({"scale_rewards": False}, "write advantage={'scale': …}"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "write model={'source': …, 'template_options': …}"),
        ({"push_to_hub": True}, "oncurve publish"),
        ({"max_prompt_length": 64}, "prompts are never truncated"),
        ({"prompts": None, "train_dataset": ["3+4="]}, "write `prompts=…`"),
        ({"rewards": None, "reward_funcs": [len]}, "write `rewards=[…]`"),
        (
            {"model": "tiny", "lora": peft.LoraConfig(r=4, target_modules=["q_proj"])},
            '"rank": 4, "alpha": 8, "targets": [\'q_proj\']',
        ),
        ({"recipe": SimpleNamespace(num_generations=8)}, "`oncurve recipe from-trl`"),
        ({"rewards": ["OpenAssistant/reward-model"]}, '{"type": "model", "model": \'OpenAssistant/reward-model\'}'),
        ({"rewards": [SimpleNamespace(save_pretrained=None)]}, '{"type": "model", "model": "FOLDER"}'),
    ],
)
def test_wrong_settings_are_one_message(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(OncurveError) as raised:
        train(tmp_path, **change)
    assert words in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_built_in_rewards_take_options_from_a_dict() -> None:
    mix = as_mix([{"type": "answer", "take": "number", "name": "number", "weight": 0.5}, ({"type": "format"}, 0.1)])
    assert [(reward.name, reward.weight) for reward in mix.rewards] == [("number", 0.5), ("format", 0.1)]
    assert mix.accuracy_reward == "number"
    group = Group(Prompt("p", text="?", columns={"answer": "7"}), np.zeros(1, np.int64), (completion_by_letters("so it is 7"),))
    (scored,) = mix.score([group])
    assert scored.scored[0].aspects[0].value == 1.0
    assert as_mix({"type": "answer"}).rewards[0].name == "answer"


def test_a_folder_with_the_name_of_a_reward_is_not_a_reward_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("answer", "rm"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert as_mix(["answer"]).rewards[0].name == "answer"
    with pytest.raises(RewardError, match="looks like a model"):
        as_mix(["rm"])


def test_patience_ends_a_run_that_does_not_get_better(tmp_path: Path) -> None:
    """Accuracy stays at 0, so evaluation 1 is the best, and patience 2 is spent after evaluation 3."""

    def never(completion: str) -> float:
        return 0.0

    run = train(tmp_path, rewards=[never], heldout=["1+1="], steps=9, eval_every=1, patience=2)
    assert run.status == "finished"
    assert [report.step for report in run.evals] == [1, 2, 3]
    assert run.best is not None
    assert (run.best.step, run.best.value) == (1, 0.0)


class Watching(transformers.TrainerCallback):  # type: ignore[misc]
    """Stops the run after its second step."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **values: Any) -> None:
        self.seen.append((state.global_step, state.max_steps, len(values["report"].groups)))
        control.should_training_stop = state.global_step == 2

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        self.seen.append(sorted(metrics))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seen.append((Path(args.output_dir).name, [entry["step"] for entry in state.log_history]))


def test_callbacks_are_called_and_can_stop_a_run(tmp_path: Path) -> None:
    watching = Watching()
    run = train(tmp_path, callbacks=[watching], heldout=["1+1="], steps=4)
    assert run.status == "finished"
    assert [step for step, _ in run.metrics("reward")] == [1, 2]
    assert watching.seen == [(1, 4, 2), (2, 4, 2), ["eval_accuracy", "eval_reward"], ("run-1", [1, 2, 2])]


def test_callbacks_that_can_not_be_used(tmp_path: Path) -> None:
    class Saving(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = True

    with pytest.raises(RecipeError, match="save_every"):
        train(tmp_path, callbacks=[Saving()])

    class Waiting(transformers.TrainerCallback):  # type: ignore[misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...

    with pytest.raises(RecipeError, match=r"Waiting.on_epoch_end\n  because a run does not call it"):
        train(tmp_path / "waiting", callbacks=[Waiting()])
    with pytest.raises(RecipeError, match="patience="):
        train(tmp_path / "early", callbacks=[transformers.EarlyStoppingCallback(3)])
    with pytest.raises(RecipeError, match="TrainerCallback"):
        train(tmp_path, callbacks=[Watching])
    with pytest.raises(RecipeError, match=r"callbacks=\[MyCallback\(\)\]"):
        train(tmp_path, callbacks=Watching())
    with pytest.raises(RecipeError, match=r"tools=\[my_function\]"):
        train(tmp_path, tools=len)


def test_nothing_held_out_can_be_none(tmp_path: Path) -> None:
    assert train(tmp_path, heldout=None).accuracy is None


def test_prompts_can_be_a_data_set(tmp_path: Path) -> None:
    rows = [{"prompt": "3+4=", "answer": "7"}, {"prompt": "5+6=", "answer": "11"}]
    data = datasets.Dataset.from_list(rows)
    run = train(tmp_path, prompts=data, rewards=["answer"])
    assert {group.group.prompt.columns["answer"] for group in run.groups(1)} == {"7", "11"}
    with pytest.raises(DataError, match=r"prompts=data\['train'\]"):
        train(tmp_path, prompts=datasets.DatasetDict({"train": data, "test": data}))


def test_the_package_explains_itself() -> None:
    assert {"train", "load_recipe", "Run", "Recipe"} <= set(dir(oncurve))
    assert (inspect.getdoc(oncurve.train) or "").startswith("Trains a recipe")
    assert "lora" in inspect.signature(oncurve.train).parameters
    assert (Path(oncurve.__file__).parent / "py.typed").is_file()


def test_nothing_else_is_offered() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        oncurve.trian  # noqa: B018
