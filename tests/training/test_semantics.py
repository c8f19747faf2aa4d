"""Runs of an earlier version: what continues to the same bits, and what is refused because it would compute something else."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oncurve.errors import RecipeError, RewardError, RunError
from oncurve.operations.replay import replay
from oncurve.operations.run_model import LoadedModel, evaluate_model, load_run
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Aspect, Group, Prompt, ScoredCompletion, ScoredGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.folder import SEMANTICS, RunFolder
from oncurve.training.semantics import changes_since
from oncurve.training.start import begin, fork, resume
from oncurve.training.trainer import TimeUp
from oncurve.trust import load_recipe_of
from tests.training.builders import RECIPE, completion, digits, loop_for, recipe
from tests.training.test_trainer import fingerprint, two_sampling_stages

RESAMPLE = 'grpo.no_signal="resample"'
CHANGED = {
    "top_k and top_p": (["grpo.sampling.top_k=3", "grpo.sampling.top_p=0.9"], "top_p is taken of what top_k leaves"),
    "int8 moments": (['grpo.optimiser.moments="int8"'], "int8 moments no longer shrink updates"),
    "int8 in sft": (['sft.optimiser.moments="int8"'], "int8 moments no longer shrink updates"),
    "stop": (['grpo.sampling.stop=["="]'], "held-out answers end at sampling.stop"),
    "lora": (['model.device="cpu"', "model.lora.rank=2"], "on a CPU adapters are merged"),
    "environment": (
        ['task.type="file"', 'task.path="x.jsonl"', 'task.environment="shop.py:Shop"'],
        "long replies of an environment are prefilled",
    ),
    "top_p": (["grpo.sampling.top_p=0.9"], "log-probs of truncated samples are renormalised"),
    "discarded": (['grpo.no_signal="resample"', "grpo.tokens=1000"], "groups that resampling discards count"),
    "bfloat16": (['model.dtype="bfloat16"'], "in 16 bits, frequencies of rotary embeddings stay in float32"),
    "resample": (
        [RESAMPLE, 'rewards.format.type="process"', "rewards.process.style="],
        "groups without an advantage are resampled",
    ),
    "resample, mask_cut": ([RESAMPLE, "grpo.mask_cut=true"], "groups without an advantage are resampled"),
    "keep_best": (['grpo.keep_best="length_mean"'], "keep_best takes the lowest value"),
    "keep_best of sft": (['sft.keep_best="grad_norm"'], "keep_best takes the lowest value"),
    "keep_best, lowest": (['grpo.keep_best="mismatch_max"'], "keep_best takes the lowest value"),
    "fisher_share": (["grpo.optimiser={}", "grpo.type=trpo", "trpo.fisher_share=0.6"], "fisher_share is the share of groups"),
    "budget": (["grpo.optimiser={}", "grpo.type=rejection_sample", "rejection_sample.tokens=9"], "rejection_sample and"),
    "min_new_tokens": (["grpo.sampling.min_new_tokens=2"], "held-out answers end at sampling.stop"),
}


def with_rewards(*rewards: dict[str, Any]) -> Recipe:
    return parse_recipe({**tomllib.loads(RECIPE), "rewards": rewards}, [RESAMPLE])


def made_by_version(run: RunFolder, semantics: int, release: str = "0.1.0") -> RunFolder:
    """The run as an earlier or later release would have recorded it."""
    run.write_state(dataclasses.replace(run.state(), semantics=semantics, oncurve=release, status="interrupted"))
    return run


def stopped(tmp_path: Path, *sets: str) -> RunFolder:
    with pytest.raises(TimeUp):
        begin(recipe("grpo.save_every=1", *sets), out=tmp_path / "run", minutes=1e-9)
    return RunFolder(tmp_path / "run")


def test_a_new_run_records_the_current_version(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    assert run.state().semantics == SEMANTICS
    resume(run)
    assert (run.state().semantics, run.state().current_status) == (SEMANTICS, "finished")


def test_run_json_without_the_key_is_of_version_1(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    text = (run.path / "run.json").read_text()
    (run.path / "run.json").write_text(text.replace(f',\n  "semantics": {SEMANTICS}', ""))
    assert run.state().semantics == 1


@pytest.mark.parametrize("case", CHANGED)
def test_a_recipe_that_uses_a_changed_setting_is_recognised(case: str) -> None:
    sets, change = CHANGED[case]
    assert any(found.startswith(change) for found in changes_since(1, recipe(*sets)))
    assert changes_since(SEMANTICS, recipe(*sets)) == []


def test_settings_that_mean_the_same_in_every_version() -> None:
    same = ["grpo.sampling.temperature=0.9", "grpo.eval_every=1", "evaluation.max_new_tokens=3"]
    assert changes_since(1, recipe(*same)) == []
    for metric in ("heldout_accuracy", "reward", "reward/format", "accuracy", "kl", "loss", "cut_share"):
        assert changes_since(1, recipe(f'grpo.keep_best="{metric}"')) == []
    function = {"type": "python", "function": "x.py:f"}
    resampled = ["groups without an advantage are resampled, not those of equal totals"]
    assert changes_since(1, with_rewards({"type": "math"}, {**function, "weight": 0.0})) == []
    assert changes_since(1, with_rewards({"type": "math"}, {"type": "format"})) == resampled
    assert changes_since(1, with_rewards(function)) == resampled
    assert changes_since(1, two_sampling_stages()) == ["a second sampling stage has its own prompts and random numbers"]


CONTINUE: dict[str, Callable[[RunFolder, Path], object]] = {
    "resume": lambda run, tmp_path: resume(run),
    "fork": lambda run, tmp_path: fork(run, 1, [], stage="sft", out=tmp_path / "fork"),
    "replay": lambda run, tmp_path: replay(run, "grpo", 1, 0),
}


@pytest.mark.parametrize("action", CONTINUE)
def test_a_run_of_an_earlier_version_is_refused_only_if_it_would_compute_something_else(tmp_path: Path, action: str) -> None:
    run = stopped(tmp_path, "grpo.sampling.min_new_tokens=2", *(["grpo.steps=1"] if action == "replay" else []))
    if action == "replay":
        resume(run)
    made_by_version(run, 1)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(RunError, match="can't be continued or replayed by this release") as refused:
        CONTINUE[action](run, tmp_path)
    assert "held-out answers end at sampling.stop" in refused.value.because
    assert "pip install oncurve==0.1.0" in refused.value.fix
    assert sorted(tmp_path.iterdir()) == before, "nothing is left behind"
    made_by_version(run, 2)
    CONTINUE[action](run, tmp_path)


def test_a_run_with_a_key_that_did_nothing_and_is_refused_now_still_opens(tmp_path: Path) -> None:
    run = stopped(tmp_path)
    text = run.recipe.read_text()
    changed = text.replace("ratio_weighted = false", 'estimator = "k1"\nratio_weighted = false')
    assert changed != text
    run.recipe.write_text(changed)
    with pytest.raises(RecipeError, match="there is no reference"):
        load_recipe(run.recipe)
    assert load_recipe_of(run) == load_recipe_of(resume(run))
    stage = load_recipe_of(fork(run, 1, ["grpo.kl.beta=0.05"], stage="sft", out=tmp_path / "fork")).stages[1]
    assert isinstance(stage, Grpo)
    assert stage.kl.estimator == "k1", "a fork that puts the key to use has the recorded value"
    with pytest.raises(RecipeError, match="there is no reference"):
        fork(run, 1, ["grpo.kl.estimator=k2"], stage="sft", out=tmp_path / "none")


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "whiten", "none"])
def test_of_one_coarse_reward_the_groups_of_equal_totals_are_resampled_as_in_version_1(baseline: str, scale: str) -> None:
    dice = np.random.default_rng(0)
    loop = loop_for({"no_signal": "resample", "advantage": {"baseline": baseline, "scale": scale}}, digits)

    def group_of(values: Sequence[float]) -> ScoredGroup:
        rows = [completion(dice, 3) for _ in values]
        aspects = [Aspect("a", None, failure="x") if v < 0 else Aspect("a", v, 0.7) for v in values]
        group = Group(Prompt(id="p", text="1"), np.arange(3), tuple(rows))
        return ScoredGroup(group, tuple(ScoredCompletion(c, (a,)) for c, a in zip(rows, aspects, strict=True)))

    for size in (2, 4):
        groups = [group_of((dice.integers(-1, 3, size) / 5).tolist()) for _ in range(60)]
        assert loop.have_signal(groups) == [len({t for t in g.totals if t is not None}) > 1 for g in groups]


def test_rewards_that_fail_do_not_end_a_stage_of_version_1_that_ignored_them(tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise ValueError("no connection")

    rewards = RewardMix([FunctionReward(broken, "broken")])
    config = recipe("grpo.optimiser={}", "grpo.type=rejection_sample", "rejection_sample.at_least=0", "sft.save_every=1")
    with pytest.raises(TimeUp):
        begin(config, out=tmp_path / "run", rewards=rewards, minutes=1e-9)
    run = RunFolder(tmp_path / "run")
    text = run.recipe.read_text()
    with pytest.raises(RewardError, match=r"rejection_sample.max_failure_share"):
        resume(run, rewards=rewards)
    resume(made_by_version(run, 1), rewards=rewards)
    assert run.state().current_status == "finished"
    assert run.recipe.read_text() == text


def test_a_refused_run_can_still_be_evaluated(tmp_path: Path) -> None:
    run = made_by_version(stopped(tmp_path, "grpo.sampling.min_new_tokens=2"), 1)
    report = evaluate_model(LoadedModel(load_run(run), run.name, run), load_recipe(run.recipe))
    assert report.asked == 10


def test_a_run_of_version_1_without_changed_settings_resumes_to_the_same_bits(tmp_path: Path) -> None:
    run = made_by_version(stopped(tmp_path), 1)
    resume(run)
    assert run.state().semantics == 1, "it stays what it was"
    assert fingerprint(run) == fingerprint(begin(recipe("grpo.save_every=1"), out=tmp_path / "plain"))


def test_a_run_of_a_newer_version_is_not_continued(tmp_path: Path) -> None:
    run = made_by_version(stopped(tmp_path), SEMANTICS + 1, "9.0.0")
    with pytest.raises(RunError, match="a newer one made it") as refused:
        resume(run)
    assert "oncurve==9.0.0" in refused.value.fix
