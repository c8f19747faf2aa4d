"""Distillation: the gradient of a complete step against float64, every kind of teacher, exact resume and replay, bad input."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oncurve.algos.divergences import token_divergence
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import DataError, ModelError, RecipeError
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.operations.replay import replay
from oncurve.plugins import load_function
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.model import Lora, Model
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Distil
from oncurve.records import GradedGroup, Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.distil import DistilLoop, LocalTeacher, check_data, find_teacher, teacher_prompt
from oncurve.training.start import begin, resume
from tests.recipe.recipes import refusal
from tests.rewards import builders as rewards
from tests.training.builders import PROMPTS, SMALL, apart, digits, gradient, policy, recipe, snapshot
from tests.training.stages.test_ppo import doubled
from tests.training.test_trainer import StopAfter, fingerprint

STILL = {"learning_rate": 1e-9, "max_grad_norm": 0.0}


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider and deeper model with the same characters, and larger weights, so that it has something to say."""
    shape = SMALL.model_copy(update={"layers": 2, "width": 48})
    folder = tmp_path_factory.mktemp("teacher")
    teacher = load_policy(Model(tiny=shape), alphabet="0123456789+=", seed=7)
    with torch.no_grad():
        teacher.model.get_output_embeddings().weight.mul_(8)
    teacher.save(folder)
    return folder


def distil_loop(
    folder: Path | str, trained: Policy | None = None, task: PromptList = PROMPTS, model: Model | None = None, **options: Any
) -> DistilLoop:
    plain = {"steps": 4, "prompts_per_step": 3, "group_size": 2, "optimiser": STILL, "sampling": {"max_new_tokens": 6}}
    section = Distil.model_validate({**plain, "teacher": {"model": str(folder)}, **options})
    engine = NativeEngine(trained or policy(), Engine(slots=16))
    return DistilLoop(section, model or Model(tiny=SMALL), 0, task, engine, RewardMix([FunctionReward(digits, "f")]))


@pytest.mark.parametrize("teach_by", ["gradient", "advantage"])
def test_an_endpoint_teaches_at_temperature_1_only(teach_by: str) -> None:
    """Its log-probs are at temperature 1; the policy's would be at the sampling temperature."""
    options = {"teacher": {"model": "m", "base_url": "http://127.0.0.1:9/v1"}, "teach_by": teach_by}
    section = Distil.model_validate({**options, "sampling": {"temperature": 0.7}})
    with pytest.raises(RecipeError, match=r"(?s)distil\.sampling\.temperature.*log-probs at temperature 1"):
        check_data(section, PROMPTS, RewardMix([FunctionReward(digits, "f")]))


def mean_divergence(
    student: Any, teacher: Any, graded: list[GradedGroup], name: str, beta: float = 0.5, t: float = 1.0
) -> Tensor:
    """The mean divergence over the completions' tokens, by plain forward passes of both models, one sequence at a time."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for group in graded:
        prompt = group.group.prompt_ids.tolist()
        for completion in group.group.completions:
            ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
            rows = slice(len(prompt) - 1, ids.shape[1] - 1)
            ours, theirs = (m(input_ids=ids, use_cache=False).logits[0, rows] for m in (student, teacher))
            student_logps, teacher_logps = ((z / t).log_softmax(-1) for z in (ours, theirs.detach()))
            total = total + token_divergence(student_logps, teacher_logps, name, beta).sum()  # type: ignore[arg-type]
            count += len(completion.token_ids)
    return total / count


@pytest.mark.parametrize(("name", "temperature"), [("reverse_kl", 1.0), ("forward_kl", 0.8), ("jsd", 1.0)])
def test_the_gradient_of_a_complete_step(teacher_folder: Path, name: str, temperature: float) -> None:
    """Packs, chunks and the fused passes in float32 against plain forward passes in float64."""
    sampling = {"max_new_tokens": 6, "temperature": temperature}
    loop = distil_loop(teacher_folder, divergence=name, sampling=sampling, tokens_per_pack=24)
    report = loop.step(1)
    student, teacher = doubled(loop.engine.policy.model), doubled(loop.learner.teachers[str(teacher_folder)].model.model)  # type: ignore[union-attr]
    loss = mean_divergence(student, teacher, list(report.groups), name, 0.5, temperature)
    loss.backward()  # type: ignore[no-untyped-call]
    assert report.metrics["teacher_divergence"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert report.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert apart(gradient(loop.engine.policy.model).double(), gradient(student)) < 1e-4


def test_a_mixed_step_is_the_sum_of_its_parts(teacher_folder: Path) -> None:
    """The gradient with rewards and a teacher is that of GRPO times reward_weight, plus the teacher's times its weight."""
    parts = []
    for reward, teach in ((0.0, 1.0), (1.0, 1e-30), (0.5, 2.0)):
        loop = distil_loop(teacher_folder, reward_weight=reward, teacher_weight=teach)
        report = loop.step(1)
        assert ("no_signal_share" in report.metrics) == bool(reward)
        parts.append(gradient(loop.engine.policy.model))
    assert apart(parts[2], 2.0 * parts[0] + 0.5 * parts[1]) < 1e-5
    assert apart(parts[2], 2.0 * parts[0]) > 1e-3


def test_teaching_by_advantages(teacher_folder: Path) -> None:
    """A_t = log π_teacher − log π at each sampled token; its policy gradient is that of the reverse KL on average."""
    loop = distil_loop(teacher_folder, teach_by="advantage", objective="reinforce", teacher_weight=0.5)
    report = loop.step(1)
    teacher = loop.learner.teachers[str(teacher_folder)]
    assert isinstance(teacher, LocalTeacher)
    model, gaps = doubled(teacher.model.model), []
    for group in report.groups:
        for completion, advantages in zip(group.group.completions, group.advantages, strict=True):
            ids = torch.tensor([[*group.group.prompt_ids.tolist(), *completion.token_ids.tolist()]])
            logits = model(input_ids=ids, use_cache=False).logits[0, len(group.group.prompt_ids) - 1 : -1]
            theirs = logits.log_softmax(-1).gather(1, torch.from_numpy(completion.token_ids)[:, None])[:, 0]
            gap = theirs.detach().numpy() - completion.logps
            np.testing.assert_allclose(advantages, 0.5 * gap, atol=1e-5)
            gaps.append(gap)
    assert report.metrics["teacher_divergence"] == pytest.approx(-float(np.concatenate(gaps).mean()), rel=1e-4)


def test_the_policy_approaches_its_teacher(teacher_folder: Path) -> None:
    cases: list[dict[str, Any]] = [{}, {"divergence": "forward_kl"}, {"teach_by": "advantage", "objective": "reinforce"}]
    for options in cases:
        loop = distil_loop(teacher_folder, steps=12, group_size=4, optimiser={"learning_rate": 1e-2}, **options)
        divergences = [loop.step(n).metrics["teacher_divergence"] for n in range(1, 13)]
        assert np.mean(divergences[-3:]) < 0.8 * np.mean(divergences[:3])


def test_a_teachers_pass_counts_as_work_if_it_is_a_part_of_the_update(teacher_folder: Path) -> None:
    """By advantages it is a part of grading."""
    by_gradient = distil_loop(teacher_folder)
    report = by_gradient.step(1)
    update = sum(seconds for name, seconds in report.seconds.items() if name.startswith("update/"))
    flops = report.metrics["update_tflops"] * 1e12 * update
    assert 0 < by_gradient.learner.other_flops < flops
    by_advantage = distil_loop(teacher_folder, teach_by="advantage", objective="reinforce")
    by_advantage.step(1)
    assert by_advantage.learner.other_flops == 0


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd"])
def test_on_a_fixed_set_every_update_brings_the_policy_closer(teacher_folder: Path, name: str) -> None:
    """Plain gradient descent on a fixed function, as far as Adam at a small rate is one."""
    loop = distil_loop(teacher_folder, divergence=name, group_size=4, optimiser={"learning_rate": 1e-3})
    groups = list(loop.step(1).groups)
    divergences = [loop.learner.update(groups).metrics["teacher_divergence"] for _ in range(12)]
    assert all(later < earlier for earlier, later in pairwise(divergences)), divergences


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_a_copy_of_the_teacher_stays_one(teacher_folder: Path, name: str) -> None:
    """The divergence and its gradient are 0. (Those of jsd are 0 up to rounding, and Adam divides rounding by its own size.)"""
    copy = load_policy(Model(source=str(teacher_folder)), alphabet=None, seed=0)
    before = snapshot(copy.model)
    loop = distil_loop(teacher_folder, copy, divergence=name, optimiser={"learning_rate": 1e-3})
    assert [loop.step(n).metrics["teacher_divergence"] for n in range(1, 4)] == [0.0, 0.0, 0.0]
    assert torch.equal(snapshot(copy.model), before)


HINTED = PromptList.of([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(5) for b in range(5)])


def test_the_policy_teaches_itself_with_more_context() -> None:
    """The divergence is that between the policy behind the prompt and the policy behind prompt and answer."""
    loop = distil_loop("self", task=HINTED, teacher={"model": "self", "context": "{answer}={prompt}"})
    report = loop.step(1)
    model = doubled(loop.engine.policy.model)
    total, count = 0.0, 0
    for group in report.groups:
        prompt = group.group.prompt
        hinted = loop.engine.policy.encode(Prompt("h", text=f"{prompt.columns['answer']}={prompt.text}")).tolist()
        for completion in group.group.completions:
            logps = []
            for ids in (group.group.prompt_ids.tolist(), hinted):
                tokens = torch.tensor([[*ids, *completion.token_ids.tolist()]])
                logps.append(model(input_ids=tokens, use_cache=False).logits[0, len(ids) - 1 : -1].detach().log_softmax(-1))
            total += float(token_divergence(logps[0], logps[1], "reverse_kl", 0.5).sum())
            count += len(completion.token_ids)
    assert report.metrics["teacher_divergence"] == pytest.approx(total / count, rel=1e-3)
    assert report.metrics["teacher_divergence"] > 0


def test_feedback_is_what_the_rewards_said_of_each_completion() -> None:
    loop = distil_loop("self", teacher={"model": "self", "context": "{feedback}{prompt}"}, group_size=3)
    groups = loop.score(loop.sample(1))
    teacher = loop.learner.teachers["self"]
    parts = teacher.prefix_groups(groups[0], [0, 1, 2], [5, 6, 7])
    assert [part.keys for part in parts] == [(5,), (6,), (7,)]
    expected = teacher_prompt(loop.distil.teacher, groups[0].group.prompt, groups[0].scored[1])
    assert expected.text is not None
    assert expected.text.startswith("f: ")
    assert loop.step(1).metrics["teacher_divergence"] > 0


def test_feedback_leaves_out_the_line_of_a_failure(tmp_path: Path) -> None:
    """The teacher's prompt, and so what is trained, is the same after a line of the reward's file has moved."""
    teacher = distil_loop("self", teacher={"model": "self", "context": "{feedback}"}).distil.teacher
    prompts, failures = [], []
    for lines in (0, 5):
        path = tmp_path / f"{lines}" / "mine.py"
        path.parent.mkdir()
        path.write_text("\n" * lines + "def raises(completion):\n    raise KeyError('x')\n")
        scored = RewardMix([FunctionReward(load_function(f"{path}:raises", "here"), "f")]).score([rewards.group("a")])[0]
        failures.append(scored.scored[0].failure)
        prompts.append(teacher_prompt(teacher, PROMPTS.train[0], scored.scored[0]).text)
    assert failures == ["f: KeyError: 'x' (mine.py:2)", "f: KeyError: 'x' (mine.py:7)"]
    assert prompts == ["f: KeyError: 'x'"] * 2


def test_a_lora_policy_and_its_base_share_their_weights(teacher_folder: Path) -> None:
    """No second model; the teacher is the policy without its adapter, so the first divergence is 0 and grows from there."""
    model = Model(source=str(teacher_folder), lora=Lora(rank=4))
    trained = load_policy(model, alphabet=None, seed=0)
    options: dict[str, Any] = {"kl": {}, "entropy_bonus": 1.0, "optimiser": {"learning_rate": 1e-2}}
    loop = distil_loop(teacher_folder, trained, model=model, **options)
    teacher = loop.learner.teachers[str(teacher_folder)]
    assert isinstance(teacher, LocalTeacher)
    assert teacher.model is trained
    divergences = [loop.step(n).metrics["teacher_divergence"] for n in (1, 2, 3)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert divergences[2] > 1e-6


def test_lora_learns_from_another_teacher(teacher_folder: Path, tmp_path: Path) -> None:
    policy(3).save(tmp_path / "base")
    model = Model(source=str(tmp_path / "base"), lora=Lora(rank=4))
    trained = load_policy(model, alphabet=None, seed=0)
    frozen = {name: p.detach().clone() for name, p in trained.model.named_parameters() if not p.requires_grad}
    loop = distil_loop(teacher_folder, trained, model=model)
    report = loop.step(1)
    student, teacher = doubled(trained.model), doubled(loop.learner.teachers[str(teacher_folder)].model.model)  # type: ignore[union-attr]
    mean_divergence(student, teacher, list(report.groups), "reverse_kl").backward()  # type: ignore[no-untyped-call]
    assert float(gradient(trained.model).norm()) > 0
    assert apart(gradient(trained.model).double(), gradient(student)) < 1e-4
    assert all(torch.equal(p, frozen[name]) for name, p in trained.model.named_parameters() if name in frozen)


@pytest.mark.parametrize("teaches", ["another model", "the base"])
def test_a_quantised_base_with_an_adapter(teaches: str, teacher_folder: Path) -> None:
    """QLoRA: 4-bit weights under the adapter. The base teaches with the adapter disabled, so it says what the policy says."""
    model = Model.model_validate({"source": str(teacher_folder), "lora": {"rank": 4}, "quantise": "nf4", "device": "cpu"})
    trained = load_policy(model, alphabet=None, seed=0)
    loop = distil_loop(teacher_folder, trained, model=model)
    if teaches == "another model":
        section = loop.distil.model_copy(update={"teacher": loop.distil.teacher.model_copy(update={"name": "full"})})
        teacher = load_policy(Model(source=str(teacher_folder)), alphabet=None, seed=0)
        loop.distil, loop.learner.stage = section, section
        loop.learner.teachers = {"full": LocalTeacher(section.teacher, trained, teacher)}
    report = loop.step(1)
    if teaches == "the base":
        assert report.metrics["teacher_divergence"] == pytest.approx(0.0, abs=1e-6)
    else:  # what 4 bits cost
        assert 0 < report.metrics["teacher_divergence"] < 1
        assert float(gradient(trained.model).norm()) > 0


def test_a_teacher_in_cpu_memory_says_the_same(teacher_folder: Path) -> None:
    """Fused layers share a storage, as on a GPU."""
    plain, moved = (distil_loop(teacher_folder) for _ in range(2))
    teacher = moved.learner.teachers[str(teacher_folder)]
    assert isinstance(teacher, LocalTeacher)
    assert teacher.model.fast_backbone is not None
    teacher.model.fast_backbone.uses_c = False  # C holds pointers to the weights
    addresses = Counter(p.untyped_storage().data_ptr() for p in teacher.model.model.parameters())
    assert max(addresses.values()) > 1
    for p in teacher.model.model.parameters():
        if addresses[p.untyped_storage().data_ptr()] == 1:
            p.data = p.data.clone()  # as loaded it is a mapped file
    teacher.move_to_host()
    freed = [p for p in teacher.model.model.parameters() if p.untyped_storage().size() == 0]
    assert len(freed) > 10
    with teacher.loaded():
        for p in freed:
            assert p.untyped_storage().nbytes() >= (p.storage_offset() + p.numel()) * p.element_size()
    for loop in (plain, moved):
        loop.step(1)
    assert apart(gradient(moved.engine.policy.model), gradient(plain.engine.policy.model)) < 1e-5
    assert all(p.untyped_storage().size() == 0 for p in freed)


def two_teachers(tmp_path: Path) -> tuple[PromptList, dict[str, Any]]:
    for seed in (1, 2):
        policy(seed).save(tmp_path / str(seed))
    rows = [{"prompt": f"{a}+{b}=", "by": "even" if b % 2 == 0 else None} for a in range(5) for b in range(6)]
    options = {
        "teacher": {"model": str(tmp_path / "1"), "name": "odd"},
        "teachers": ({"model": str(tmp_path / "2"), "name": "even"},),
        "teacher_column": "by",
        "prompts_per_step": 6,
    }
    return PromptList.of(rows), options


def test_rows_choose_their_teacher_by_a_column(tmp_path: Path) -> None:
    task, options = two_teachers(tmp_path)
    loop = distil_loop("-", task=task, **options)
    report = loop.step(1)
    student = doubled(loop.engine.policy.model)
    loss: Any = 0.0
    tokens = [sum(len(c.token_ids) for c in g.group.completions) for g in report.groups]
    names = [find_teacher(loop.distil, g.group.prompt).label for g in report.groups]
    assert set(names) == {"odd", "even"}
    for group, name, count in zip(report.groups, names, tokens, strict=True):
        teacher = doubled(loop.learner.teachers[name].model.model)  # type: ignore[union-attr]
        loss = loss + mean_divergence(student, teacher, [group], "reverse_kl") * count / sum(tokens)
    loss.backward()
    assert report.metrics["teacher_divergence"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert apart(gradient(loop.engine.policy.model).double(), gradient(student)) < 1e-4


def test_packs_that_do_not_fit_are_split_by_teacher(tmp_path: Path) -> None:
    task, options = two_teachers(tmp_path)
    whole, split = distil_loop("-", task=task, **options), distil_loop("-", task=task, **options)
    whole.step(1)
    compute = split.learner._accumulate
    failures = iter([True])

    def out_of_memory_once(*args: Any) -> Any:
        if next(failures, False):
            raise torch.OutOfMemoryError("too large")
        return compute(*args)

    split.learner._accumulate = out_of_memory_once  # type: ignore[method-assign, assignment]
    split.step(1)
    assert apart(gradient(split.engine.policy.model), gradient(whole.engine.policy.model)) < 1e-5


def run_recipe(folder: Path, *sets: str) -> Recipe:
    return recipe("grpo.type=distil", f"distil.teacher.model={folder}", "distil.save_every=2", *sets)


@pytest.fixture(scope="module")
def arithmetic_teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher for the built-in task: the model after the recipe's sft stage."""
    out = tmp_path_factory.mktemp("run")
    return begin(recipe("grpo.steps=1", "model.tiny.width=48"), out=out / "teacher").path / "model"


@pytest.mark.parametrize("teach_by", ["gradient", "advantage"])
def test_a_run_that_crashed_resumes_to_the_same_bits_and_replays(
    teach_by: str, arithmetic_teacher: Path, tmp_path: Path
) -> None:
    config = run_recipe(arithmetic_teacher, f"distil.teach_by={teach_by}", "distil.reward_weight=0.5")
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "crashed", listeners=[StopAfter("distil", 3)])
    run = RunFolder(tmp_path / "crashed")
    resume(run)
    assert fingerprint(run) == fingerprint(begin(config, out=tmp_path / "whole"))
    assert replay(run, "distil", 4, 0).differences == []


def test_distillation_alone_needs_no_reward(arithmetic_teacher: Path, tmp_path: Path) -> None:
    data = json.loads(run_recipe(arithmetic_teacher).model_dump_json(exclude_none=True))
    run = begin(parse_recipe({**data, "rewards": []}, []), out=tmp_path / "run")
    assert run.state().current_status == "finished"
    with RunReader.open(run.path) as store:
        assert store.metric("reward", "distil"), "the stage was recorded"
        assert store.metric("failure_share", "distil") == [], "no reward failed"
        assert not [event for event in store.events("warning") if "could not be rewarded" in event.message]


@pytest.mark.parametrize(
    ("sets", "word"),
    [
        (("distil.teacher.model=self",), "context"),
        (("distil.teach_by=advantage", "distil.divergence=jsd"), "reverse KL"),
        (("distil.no_signal=resample",), "recorded only"),
        (("distil.jsd_beta=0.1",), "only jsd has"),
        (("distil.objective=reinforce", "distil.kl.beta=0.1"), "subtracted from rewards"),
        (("distil.teach_by=advantage", "distil.objective=rloo", "distil.kl.beta=0.1"), "subtracted from rewards"),
        (("distil.clip={low=0.1, high=0.1}",), "acts on advantages"),
        (("distil.entropy.top_share=0.2",), "acts on advantages"),
        (("distil.entropy.clip_cov=0.1",), "acts on advantages"),
        (("distil.importance_cap=2.0",), "acts on advantages"),
        (("distil.correction=icepop",), "acts on advantages"),
        (("distil.teacher.model=self", "distil.teacher.context={prompt}!", "distil.updates_per_step=2"), "first update"),
    ],
)
def test_recipes_that_cannot_work(sets: tuple[str, ...], word: str) -> None:
    error = refusal("grpo.type=distil", *(() if any("model=self" in s for s in sets) else ("distil.teacher.model=x",)), *sets)
    assert word in str(error)


@pytest.mark.parametrize(
    "sets",
    [
        ("distil.objective=reinforce", "distil.kl={beta=0.1, where='loss'}"),
        ("distil.objective=reinforce", "distil.kl.beta=0.1", "distil.reward_weight=0.5"),
        ("distil.divergence=jsd", "distil.jsd_beta=0.1"),
        ("distil.teach_by=advantage", "distil.entropy.top_share=0.2", "distil.importance_cap=2.0"),
        ("distil.objective=dro", "distil.updates_per_step=2", "distil.importance_cap=2.0"),
        ("distil.entropy.kl_cov=0.2", "distil.updates_per_step=2", "distil.correction=icepop"),
        ("scale.engine=vllm",),
    ],
)
def test_recipes_that_can_work(sets: tuple[str, ...]) -> None:
    assert recipe("grpo.type=distil", "distil.teacher.model=x", *sets).stages[-1].type == "distil"


def test_bad_teachers_are_refused_before_a_run_is_made(arithmetic_teacher: Path, tmp_path: Path, teacher_folder: Path) -> None:
    missing = run_recipe(tmp_path / "none")
    other = run_recipe(teacher_folder)  # its characters are other ones
    unfilled = run_recipe(arithmetic_teacher, "distil.teacher.context={prompt} {hint}")
    unreachable = run_recipe(arithmetic_teacher, "distil.teacher.base_url=http://127.0.0.1:9/v1", "distil.teacher.retries=0")
    for config, kind, word in (
        (missing, ModelError, "none"),
        (other, ModelError, "vocabulary"),
        (unfilled, DataError, "hint"),
        (unreachable, ModelError, "did not answer"),
    ):
        with pytest.raises(kind, match=word):
            begin(config, out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_row_that_names_no_teacher_is_refused(teacher_folder: Path) -> None:
    task = PromptList.of([{"prompt": "1+1=", "by": "nobody"}])
    with pytest.raises(DataError, match="nobody"):
        distil_loop(teacher_folder, task=task, teacher_column="by", prompts_per_step=1).step(1)


def test_weights_change_only_where_they_should(teacher_folder: Path) -> None:
    loop = distil_loop(teacher_folder, optimiser={"learning_rate": 1e-2})
    teacher = loop.learner.teachers[str(teacher_folder)]
    assert isinstance(teacher, LocalTeacher)
    before = snapshot(teacher.model.model), snapshot(loop.engine.policy.model)
    loop.step(1)
    assert torch.equal(snapshot(teacher.model.model), before[0])
    assert not torch.equal(snapshot(loop.engine.policy.model), before[1])
