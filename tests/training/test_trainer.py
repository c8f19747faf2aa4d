"""Complete small runs in one process: stages, checkpoints, failures, repeats and forks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from oncurve.errors import DataError, ModelError, OncurveError, RecipeError, RewardError, RunError
from oncurve.recipe.defaults import seed_for_stage
from oncurve.recipe.load import changed_keys, load_recipe, parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.variants import with_algorithm
from oncurve.records import EvalReport, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.rng import derive_seed
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.listeners import Listener
from oncurve.training.start import begin, fork, resume
from oncurve.training.trainer import TimeUp
from tests.training.builders import digits, recipe


def fingerprint(run: RunFolder) -> tuple[str, bytes]:
    """Everything that a run recorded, and the bytes of its model."""
    with RunReader.open(run.path) as store:
        return store.fingerprint(), (run.model / "model.safetensors").read_bytes()


def mix(function: Callable[..., float]) -> RewardMix:
    return RewardMix([FunctionReward(function, "f")])


def test_a_run_goes_through_its_stages_and_leaves_a_model(tmp_path: Path) -> None:
    run = begin(recipe("grpo.eval_every=2", "grpo.save_every=1", "grpo.keep_checkpoints=2"), runs_dir=tmp_path)
    assert run.name == "small-1"
    assert run.state().current_status == "finished"
    with RunReader.open(run.path) as store:
        assert [(s.name, s.done) for s in store.stages()] == [("sft", 3), ("grpo", 4)]
        assert [(e.stage, e.step, e.asked) for e in store.evals()] == [("sft", 3, 10), ("grpo", 2, 10), ("grpo", 4, 10)]
        assert len(store.groups("grpo", 1)) == 3
        kept = store.group("grpo", 1, 0)
        assert len(kept.graded.group.completions) == 4
    assert [(p.stage, p.step) for p in list_checkpoints(run.checkpoints)] == [("grpo", 3), ("grpo", 4), ("sft", 3)]
    AutoModelForCausalLM.from_pretrained(run.model)
    frozen = load_recipe(run.recipe)
    assert (frozen.threads, frozen.engine.slots) == (1, 12), "what was chosen for the machine is written down"


def test_two_runs_of_one_recipe_are_the_same_bits_and_another_seed_is_not(tmp_path: Path) -> None:
    one, two, other = (fingerprint(begin(recipe(f"seed={seed}"), runs_dir=tmp_path)) for seed in (0, 0, 1))
    assert one == two
    assert one != other


def test_saving_and_measuring_more_often_changes_no_weight(tmp_path: Path) -> None:
    plain, watched = (
        begin(recipe(*sets), runs_dir=tmp_path) for sets in ((), ("grpo.eval_every=1", "grpo.save_every=1", "sft.eval_every=1"))
    )
    assert fingerprint(plain)[1] == fingerprint(watched)[1]


def test_another_thread_can_train(tmp_path: Path) -> None:
    """Such as a notebook's worker: only the main thread handles signals."""
    runs: list[RunFolder] = []
    worker = threading.Thread(target=lambda: runs.append(begin(recipe(), runs_dir=tmp_path)))
    worker.start()
    worker.join(60)
    assert runs[0].state().current_status == "finished"


@pytest.mark.parametrize("objective", ["gspo", "rloo"])
def test_bfloat16_trains_and_saves_bfloat16(objective: str, tmp_path: Path) -> None:
    run = begin(recipe("model.dtype=bfloat16", f"grpo.objective={objective}", "grpo.kl.beta=0.01"), runs_dir=tmp_path)
    model = AutoModelForCausalLM.from_pretrained(run.model, dtype="auto")
    assert {str(p.dtype) for p in model.parameters()} == {"torch.bfloat16"}
    with RunReader.open(run.path) as store:
        assert store.metric("skipped_updates", "grpo") == [(n, 0.0) for n in range(1, 5)]
        assert max(value for _, value in store.metric("mismatch_max", "grpo")) < 0.2


class Failing:
    """A reward that fails from a chosen call on, until it is fixed."""

    def __init__(self, at: int) -> None:
        self.calls, self.at, self.mended = 0, at, False

    def __call__(self, text: str) -> float:
        self.calls += 1
        if self.calls > self.at and not self.mended:
            raise ConnectionError("nobody answers")
        return digits(text)


def test_failures_stop_the_run_with_a_checkpoint_and_with_a_fixed_reward_it_resumes_to_the_same_bits(tmp_path: Path) -> None:
    """Counted in calls: 10 after sft, then 12 in each step; the reward fails in step 3."""
    reward = Failing(at=10 + 12 + 12)
    config = recipe()
    with pytest.raises(RewardError, match="12 of 12"):
        begin(config, out=tmp_path / "broken", rewards=mix(reward))
    run = RunFolder(tmp_path / "broken")
    assert run.state().current_status == "failed"
    with RunReader.open(run.path) as store:
        assert "nobody answers" in store.events("failed")[-1].message
    assert [(p.stage, p.step) for p in list_checkpoints(run.checkpoints)] == [("grpo", 2), ("sft", 3)]
    reward.mended = True
    resume(run, rewards=mix(reward))
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole", rewards=mix(digits)))


class StopAfter(Listener):
    """Raises in the middle of a run, as a crash would."""

    def __init__(self, stage: str, step: int) -> None:
        self.place = (stage, step)

    def on_step(self, report: StepReport) -> None:
        if (report.stage, report.step) == self.place:
            raise KeyboardInterrupt


@pytest.mark.parametrize("place", [("sft", 1), ("sft", 3), ("grpo", 1), ("grpo", 3), ("grpo", 4)])
def test_a_run_that_crashed_anywhere_resumes_to_the_same_bits(place: tuple[str, int], tmp_path: Path) -> None:
    config = recipe(
        "sft.save_every=2", "grpo.save_every=2", "grpo.eval_every=1", "grpo.kl.beta=0.05", "grpo.kl.refresh_every=3"
    )
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "crashed", listeners=[StopAfter(*place)])
    run = RunFolder(tmp_path / "crashed")
    assert run.state().current_status == "interrupted"
    resume(run)
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))


def test_a_finished_run_is_not_resumed(tmp_path: Path) -> None:
    run = begin(recipe(), runs_dir=tmp_path)
    with pytest.raises(RunError, match="already finished"):
        resume(run)


def test_a_damaged_checkpoint_is_passed_over_and_the_bits_are_the_same(tmp_path: Path) -> None:
    config = recipe("grpo.save_every=1")
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "hurt", listeners=[StopAfter("grpo", 4)])
    run = RunFolder(tmp_path / "hurt")
    newest = run.checkpoints / "grpo-000003" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    resume(run)
    with RunReader.open(run.path) as store:
        assert [e.kind for e in store.events("damaged")] == ["damaged"]
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))


def test_a_fork_without_a_change_is_its_parent_and_one_with_a_change_begins_like_it(tmp_path: Path) -> None:
    parent = begin(recipe("grpo.save_every=1", "grpo.keep_checkpoints=9"), runs_dir=tmp_path)
    same = fork(parent, 2, [], runs_dir=tmp_path)
    assert fingerprint(same) == fingerprint(parent)
    other = fork(parent, 2, ["grpo.optimiser.learning_rate=0.02"], runs_dir=tmp_path)
    origin = other.state().parent
    assert origin is not None
    assert (origin.run, origin.stage, origin.step) == (parent.name, "grpo", 2)
    assert dict(origin.changes) == {"grpo.optimiser.learning_rate": 0.02}
    with RunReader.open(parent.path) as a, RunReader.open(other.path) as b:
        for step in (1, 2, 3, 4):
            requests = [[g.prompt_id for g in store.groups("grpo", step)] for store in (a, b)]
            assert requests[0] == requests[1], "the same prompts at every step"
        one, two = (texts(store, 3) for store in (a, b))
        assert one == two, "the step after the fork samples with the parent's weights and random numbers"
        assert a.metrics_of("grpo", 3)["learning_rate"] != b.metrics_of("grpo", 3)["learning_rate"]
    assert fingerprint(other)[1] != fingerprint(parent)[1]


def texts(store: RunReader, step: int) -> list[list[int]]:
    groups = [store.group("grpo", step, k).graded.group for k in range(len(store.groups("grpo", step)))]
    return [c.token_ids.tolist() for g in groups for c in g.completions]


def test_a_fork_names_the_checkpoints_there_are(tmp_path: Path) -> None:
    parent = begin(recipe(), runs_dir=tmp_path)
    with pytest.raises(RunError, match="no checkpoint of stage grpo at step 3") as caught:
        fork(parent, 3, [], runs_dir=tmp_path)
    assert "grpo 4" in caught.value.because
    assert [p.name for p in tmp_path.iterdir()] == [parent.name]


def test_changes_are_listed_by_dotted_keys() -> None:
    before, after = recipe(), recipe("grpo.group_size=6", "rewards.format.weight=0.5", "seed=3")
    assert changed_keys(before, after) == {"grpo.group_size": 6, "rewards.format.weight": 0.5, "seed": 3}


@pytest.mark.parametrize(
    ("change", "kind"), [("task.heldout=40", RecipeError), ("task.examples=0", DataError), ("model.tiny.context=9", ModelError)]
)
def test_a_recipe_that_cannot_run_leaves_nothing_behind(change: str, kind: type[OncurveError], tmp_path: Path) -> None:
    with pytest.raises(kind):
        begin(recipe(change), out=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_sft_stage_stops_when_its_time_is_over(tmp_path: Path) -> None:
    run = begin(recipe("sft.seconds=0.2", "sft.steps=100000", "grpo.steps=1"), runs_dir=tmp_path)
    with RunReader.open(run.path) as store:
        done = {s.name: s.done for s in store.stages()}
    assert 1 <= done["sft"] < 1000
    assert done["grpo"] == 1


def test_listeners_hear_everything_in_order(tmp_path: Path) -> None:
    events: list[str] = []

    class Ear(Listener):
        def on_run_start(self, recipe: Recipe, folder: Path, parameters: int, resumed_from: tuple[str, int] | None) -> None:
            events.append(f"run {parameters > 0} {resumed_from}")

        def on_stage_start(self, stage: str, type: str, position: int, steps: int, done: int) -> None:
            events.append(f"{stage} {position} {done}/{steps}")

        def on_step(self, report: StepReport) -> None:
            events.append(f"step {report.step}")

        def on_eval(self, report: EvalReport) -> None:
            events.append(f"eval {report.step}")

        def on_checkpoint(self, stage: str, step: int, path: Path) -> None:
            events.append(f"saved {path.name}")

        def on_stage_end(self, stage: str) -> None:
            events.append(f"end {stage}")

        def on_run_end(self, status: str) -> None:
            events.append(status)

    begin(recipe("sft.steps=1", "grpo.steps=2"), runs_dir=tmp_path, listeners=[Ear()])
    sft = ["sft 0 0/1", "step 1", "eval 1", "saved sft-000001", "end sft"]
    grpo = ["grpo 1 0/2", "step 1", "step 2", "eval 2", "saved grpo-000002", "end grpo"]
    assert events == ["run True None", *sft, *grpo, "finished"]


def test_a_stop_at_a_stages_end_saves_first_and_the_evaluation_is_made_when_the_run_resumes(tmp_path: Path) -> None:
    config = recipe("sft.steps=1", "grpo.steps=1")
    full, run = begin(config, runs_dir=tmp_path), RunFolder(tmp_path / "slices")
    with pytest.raises(TimeUp):
        begin(config, out=run.path, minutes=0)
    assert measured_and_saved(run) == ([], ["sft-000001"])
    with pytest.raises(TimeUp):
        resume(run, minutes=0)
    assert measured_and_saved(run) == (["sft"], ["grpo-000001", "sft-000001"])
    assert fingerprint(resume(run, minutes=0)) == fingerprint(full)


def measured_and_saved(run: RunFolder) -> tuple[list[str], list[str]]:
    with RunReader.open(run.path) as store:
        return [report.stage for report in store.evals()], [saved.path.name for saved in list_checkpoints(run.checkpoints)]


def two_sampling_stages(second: str = "grpo", **options: object) -> Recipe:
    """The small recipe with a second stage that samples, both at a learning rate that changes nothing."""
    whole = recipe("grpo.optimiser.learning_rate=1e-12", "grpo.steps=2").model_dump(mode="json", exclude_none=True)
    grpo = whole["stages"][1]
    keep = {"prompts_per_step", "group_size", "sampling", "steps"}
    other = {"type": second, "name": "second", **{key: value for key, value in grpo.items() if key in keep}, **options}
    return parse_recipe(whole | {"stages": [*whole["stages"], other]})


@pytest.mark.parametrize("second", ["grpo", "ppo", "rejection_sample"])
def test_a_second_sampling_stage_has_its_own_prompts_and_random_numbers(tmp_path: Path, second: str) -> None:
    """An endless task has new prompts for every stage; of those that two stages share, the completions differ."""
    options: dict[str, object] = {"at_least": -9.0} if second == "rejection_sample" else {}
    options |= {"optimiser": {"learning_rate": 1e-12}} if second != "rejection_sample" else {}
    run = begin(two_sampling_stages(second, **options), runs_dir=tmp_path)
    with RunReader.open(run.path) as store:
        groups = {
            stage: {g.graded.group.prompt.id: [c.token_ids.tolist() for c in g.graded.group.completions]
                    for n in (1, 2) for g in (store.group(stage, n, i) for i in range(3))}
            for stage in ("grpo", "second")
        }  # fmt: skip
    first, later = groups["grpo"], groups["second"]
    assert list(first) != list(later)
    assert all(first[prompt] != later[prompt] for prompt in first.keys() & later.keys())


def test_the_seed_of_a_stage_follows_from_its_place_among_those_that_sample() -> None:
    whole = two_sampling_stages()
    sft, grpo, second = whole.stages
    assert (seed_for_stage(whole, sft), seed_for_stage(whole, grpo)) == (whole.seed, whole.seed), "as in version 1"
    assert seed_for_stage(whole, second) == derive_seed(whole.seed, "stage/1")
    other_seed = whole.model_copy(update={"seed": 7})
    assert seed_for_stage(other_seed, second) not in (7, seed_for_stage(whole, second))
    variants = [with_algorithm(whole, name) for name in ("rloo", "trpo")]
    assert {seed_for_stage(v, v.stages[-1]) for v in variants} == {seed_for_stage(whole, second)}, "common random numbers"
