"""Steps of the grpo stage: from prompts to an update, with everything that can happen to a group."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError, RecipeError, RewardError
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Aspect, Group, Prompt, ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.grpo import MAX_MISMATCH_32BIT, GrpoLoop, check_curriculum, extra_samples, group_result
from oncurve.training.start import rewards_for
from tests.training.builders import apart, completion, digits, gradient, loop_for, recipe, snapshot


def one_by_one(reward: Callable[..., Any]) -> GrpoLoop:
    """A loop whose engine samples one group after the other."""
    loop = loop_for({}, reward)
    loop.engine = NativeEngine(loop.engine.policy, Engine(slots=4))
    return loop


def run(loop: GrpoLoop, steps: int) -> list[StepReport]:
    return [loop.step(n) for n in range(1, steps + 1)]


def test_a_step_is_what_the_formulas_say() -> None:
    """Advantages are each group's normalised rewards; the report has all of it, and the policy has changed."""
    loop = loop_for({}, digits)
    before = snapshot(loop.engine.policy.model)
    report = loop.step(1)
    assert len(report.groups) == 4
    spreads = []
    for graded in report.groups:
        rewards = np.array(graded.scored.totals, np.float64)
        assert len(rewards) == 4
        spreads.append(spread := rewards.std(ddof=1))
        expected = (rewards - rewards.mean()) / (spread + 1e-4) if spread else np.zeros(4)
        for row, value in zip(graded.advantages, expected, strict=True):
            np.testing.assert_allclose(row, value, atol=1e-5)
    totals = [t for g in report.groups for t in g.scored.totals]
    assert report.metrics["reward"] == pytest.approx(np.mean(totals))  # type: ignore[arg-type]
    assert report.metrics["reward_std"] == pytest.approx(np.mean(spreads))
    assert report.metrics["tokens"] == sum(len(a) for g in report.groups for a in g.advantages)
    assert {phase for phase in report.seconds if "/" not in phase} == {"sample", "score", "grade", "update"}
    assert report.total_seconds == sum(report.seconds[phase] for phase in ("sample", "score", "grade", "update"))
    assert 0 < sum(v for phase, v in report.seconds.items() if phase.startswith("update/")) <= report.seconds["update"]
    assert not torch.equal(snapshot(loop.engine.policy.model), before)


def test_the_gradient_is_that_of_the_formula_in_plain_transformers() -> None:
    """−(1/B) Σ_i (1/|o_i|) Σ_t ρ A_i, sequence by sequence, with rewards taken from the report and nothing else of ours."""
    loop = loop_for({"optimiser": {"learning_rate": 1e-9, "max_grad_norm": 0.0}}, digits)
    plain = copy.deepcopy(loop.engine.policy.model)
    plain.set_attn_implementation("eager")
    report = loop.step(1)
    loss = torch.zeros(())
    for graded in report.groups:
        rewards = torch.tensor(graded.scored.totals)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for c, advantage in zip(graded.group.completions, advantages, strict=True):
            ids = torch.from_numpy(np.concatenate((graded.group.prompt_ids, c.token_ids)))[None]
            logp_TV = plain(input_ids=ids).logits[0, len(graded.group.prompt_ids) - 1 : -1].log_softmax(-1)
            logp_T = logp_TV.gather(1, torch.from_numpy(c.token_ids)[:, None])[:, 0]
            loss = loss - ((logp_T - logp_T.detach()).exp() * advantage).mean() / 16
    loss.backward()  # type: ignore[no-untyped-call]
    assert apart(gradient(loop.engine.policy.model), gradient(plain)) < 1e-5


def test_the_sampler_and_the_learner_agree_on_every_token() -> None:
    """They share their weights: only rounding differs."""
    for report in run(loop_for({}, digits), 3):
        assert report.metrics["mismatch_max"] < 1e-4


def test_the_reward_rises() -> None:
    reports = run(loop_for({"steps": 12, "prompts_per_step": 6, "group_size": 8}, digits), 12)
    rewards = [r.metrics["reward"] for r in reports]
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 1


def test_two_loops_of_one_seed_are_one_and_another_seed_is_another() -> None:
    first, again, other = (run(loop_for({}, digits, seed=seed), 2) for seed in (0, 0, 1))

    def rows(reports: list[StepReport]) -> list[bytes]:
        return [c.token_ids.tobytes() + c.logps.tobytes() for r in reports for g in r.groups for c in g.group.completions]

    assert rows(first) == rows(again)
    assert rows(first) != rows(other)


def test_mask_cut_removes_truncated_completions_from_the_loss_but_not_from_the_curve() -> None:
    loop = loop_for({"mask_cut": True}, digits)
    report = loop.step(1)
    cuts = 0
    for graded, stats in zip(report.groups, report.stats, strict=True):
        for c, counted, row, stat in zip(graded.group.completions, graded.graded, graded.advantages, stats, strict=True):
            assert counted == (not c.is_truncated)
            assert not (c.is_truncated and (np.any(row) or stat is not None))
            cuts += c.is_truncated
    assert cuts > 0
    plain = loop_for({}, digits).step(1)
    assert any(
        np.any(row) for g in plain.groups for row, c in zip(g.advantages, g.group.completions, strict=True) if c.is_truncated
    )


def test_silent_groups_are_replaced_by_fresh_prompts() -> None:
    """The reward is constant on half of the prompts; they are replaced until all four groups have a signal."""

    def fussy(text: str, prompt: str) -> float:
        return digits(text) if int(prompt[0]) % 2 else 0.0

    dropped, filled = (loop_for({"no_signal": mode}, fussy).step(1) for mode in ("drop", "resample"))
    assert dropped.metrics["no_signal_share"] > 0
    assert dropped.metrics["groups_resampled"] == 0
    assert filled.metrics["no_signal_share"] == 0
    assert filled.metrics["groups_resampled"] >= dropped.metrics["no_signal_share"] * 4
    names = [g.group.prompt.id for g in filled.groups]
    assert len(set(names)) == 4
    loud = {g.group.prompt.id for g in dropped.groups if g.has_signal}
    assert loud <= set(names), "groups that speak are kept"
    assert all(g.has_signal for g in filled.groups)


def test_a_group_has_a_signal_if_its_rewards_give_an_advantage() -> None:
    """Totals that differ by rounding are equal, equal rewards of single steps give none, and GDPO compares each reward."""

    def group_of(name: str, *aspects: tuple[Aspect, ...]) -> ScoredGroup:
        rows = [(completion(np.random.default_rng(0), 4), row) for row in aspects]
        return ScoredGroup(
            Group(Prompt(id=name, text="1"), np.arange(3), tuple(c for c, _ in rows)),
            tuple(ScoredCompletion(c, row) for c, row in rows),
        )

    def steps(*rewards: float) -> tuple[Aspect, ...]:
        return (Aspect("p", None, steps=tuple((t, r) for t, r in enumerate(rewards))),)

    scored = [
        group_of("rounding", (Aspect("a", 0.1), Aspect("b", 0.2)), (Aspect("a", 0.3), Aspect("b", 0.0))),
        group_of("equal steps", steps(1.0, 1.0), steps(1.0, 1.0)),
        group_of("steps", steps(1.0, 0.0), steps(1.0, 1.0)),
        group_of("rewards", (Aspect("a", 0.0),), (Aspect("a", 1.0),)),
    ]
    assert loop_for({"no_signal": "resample"}, digits).have_signal(scored) == [False, False, True, True]
    for more in ({"objective": "reinforce_pp"}, {"objective": "reinforce"}, {"advantage": {"scale": "whiten"}}):
        flat = group_of("all right", (Aspect("a", 1.0),), (Aspect("a", 1.0),))
        signals = loop_for({"no_signal": "resample", **more}, digits).have_signal([*scored, flat])
        assert signals == [False, False, True, True, False], "equal rewards, which have advantages before or after whitening"
    gdpo = loop_for({"no_signal": "resample", "objective": "gdpo"}, digits)
    twice = group_of("more of a", (Aspect("a", 0.1), Aspect("b", 0.2, 2.0)), (Aspect("a", 0.5), Aspect("b", 0.0, 2.0)))
    assert gdpo.have_signal([twice, scored[3]]) == [True, True], "totals of 0.5, and a counts by its own std"


def test_resampling_ends_after_its_rounds_or_when_prompts_run_out() -> None:
    calls: list[str] = []

    def silent(text: str, prompt: str) -> float:
        calls.append(prompt)
        return 1.0

    report = loop_for({"no_signal": "resample", "max_resample_rounds": 2}, silent).step(1)
    assert len(set(calls)) == 4 * 3
    assert report.metrics["groups_resampled"] == 0
    assert report.metrics["no_signal_share"] == 1
    few = PromptList.of([f"{a}+1=" for a in range(5)])
    assert loop_for({"no_signal": "resample"}, silent, few).step(1).metrics["no_signal_share"] == 1


def test_all_that_resampling_samples_counts() -> None:
    """Discarded groups were sampled too: their tokens count, and a curriculum learns their pass rates."""
    asked: list[int] = []

    def fussy(text: str, prompt: str) -> float:
        asked.append(len(text))
        return float(len(asked) % 2) if int(prompt[0]) % 3 == 1 else 0.0

    sampling = {"max_new_tokens": 8, "min_new_tokens": 8}
    loop = loop_for({"no_signal": "resample", "curriculum": {}, "sampling": sampling, "max_resample_rounds": 3}, fussy)
    report = loop.step(1)
    assert len(asked) > 16, "some groups are discarded"
    assert report.metrics["tokens"] == loop.budget.tokens == 8 * len(asked)
    assert report.metrics["length_mean"] == 8
    assert loop.selector is not None
    rates = [known.rate for known in loop.selector.known.values()]
    assert sum(rate.sampled for rate in rates) == len(asked)
    assert sum(rate.solved == 0 for rate in rates) > sum(rate.solved > 0 for rate in rates)


def test_pass_rates_leave_out_what_a_reward_of_weight_0_could_not_grade() -> None:
    def crashing(text: str) -> float:
        raise ValueError("no grade")

    loop = loop_for({"curriculum": {}}, digits)
    loop.rewards = RewardMix([FunctionReward(digits, "f"), FunctionReward(crashing, "answer", weight=0.0)])
    (group,) = loop.sample_prompts(loop.select_prompts(1)[:1], 4, SampleKey(0, 1))
    (scored,) = loop.score([group])
    assert scored.scored[0].failure is None
    assert (group_result(scored, loop.rewards).solved, group_result(scored, loop.rewards).sampled) == (0, 0)


def test_a_failed_reward_leaves_its_completion_out() -> None:
    def picky(text: str) -> float:
        if len(text) % 3 == 0:
            raise ValueError("no thirds")
        return digits(text)

    report = loop_for({"max_failure_share": 1.0}, picky).step(1)
    assert 0 < report.metrics["failure_share"] < 1
    for graded in report.groups:
        for scored, counted in zip(graded.scored.scored, graded.graded, strict=True):
            assert scored.failure is None or not counted
            assert scored.failure is None or scored.total is None


def test_too_many_failures_stop_the_run_and_say_the_first() -> None:
    def broken(text: str) -> float:
        raise ValueError("the judge is asleep")

    loop = loop_for({"max_failure_share": 0.5}, broken)
    before = snapshot(loop.engine.policy.model)
    with pytest.raises(RewardError, match="16 of 16") as caught:
        loop.step(1)
    assert "the judge is asleep" in caught.value.because
    assert torch.equal(snapshot(loop.engine.policy.model), before)


def test_the_reference_becomes_the_policy_every_so_many_steps() -> None:
    loop = loop_for({"kl": {"beta": 0.01, "refresh_every": 2}}, digits)
    reports = run(loop, 3)
    assert reports[0].metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert reports[1].metrics["kl"] > 1e-5
    assert reports[2].metrics["kl"] == pytest.approx(0.0, abs=1e-9), "refreshed after step 2"
    assert loop.learner.reference is not None
    policy = loop.engine.policy
    pack = build_pack([PrefixGroup(np.array([7, 8]), (np.array([9, 10, 3]),), (0,))], policy.device)
    with torch.no_grad():
        assert not torch.equal(policy.pack_logps(pack)[0], loop.learner.reference.logps(pack, 1.0))


def test_kl_in_the_reward_shifts_the_advantages() -> None:
    """With a large β, distance from the reference costs more than the reward gives: advantages differ."""
    far: dict[str, Any] = {"kl": {"beta": 5.0, "where": "reward"}, "steps": 3}
    loop = loop_for(far, digits)
    run(loop, 2)
    report = loop.step(3)
    sums = loop.learner.kl_sums([g.scored for g in report.groups])
    assert max(abs(s) for row in sums for s in row) > 0
    plain = [np.array(g.scored.totals, np.float64) for g in report.groups]
    by_reward_alone = [(r - r.mean()) / (r.std(ddof=1) + 1e-4) for r in plain]
    result = [np.array([a[0] for a in g.advantages]) for g in report.groups]
    assert max(float(np.abs(a - b).max()) for a, b in zip(result, by_reward_alone, strict=True)) > 0.01


def test_overlong_punishment_is_one_more_aspect() -> None:
    config = recipe("grpo.overlong.buffer=4", "grpo.overlong.weight=0.5")
    stage = config.stages[1]
    assert isinstance(stage, Grpo)
    loop = loop_for({}, digits)
    loop.rewards = rewards_for(config, stage)
    report = loop.step(1)
    for graded in report.groups:
        for scored in graded.scored.scored:
            (punished,) = [a for a in scored.aspects if a.name == "overlong"]
            assert punished.weight == 0.5
            assert punished.value == pytest.approx(-max(0, scored.completion.length - 4) / 4)
    assert "reward/overlong" in report.metrics


def test_rewards_that_wait_work_while_others_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slots for one group of four, the sampler waits after the first until its rewards have returned."""
    answered = threading.Semaphore(0)

    async def slow(text: str) -> float:
        await asyncio.sleep(0.01)
        answered.release()
        return digits(text)

    loop = one_by_one(slow)
    begin = loop.rewards.prefetch
    overlapped: list[bool] = []

    def begun(group: Group) -> None:
        begin(group)
        if not overlapped:
            overlapped.append(all(answered.acquire(timeout=300) for _ in group.completions))

    monkeypatch.setattr(loop.rewards, "prefetch", begun)
    loop.step(1)
    assert overlapped == [True]


def test_the_order_in_which_rewards_answer_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards of the first group return last; or no reward starts before all is sampled: the same run."""

    async def late(text: str, prompt: str) -> float:
        await asyncio.sleep(0.02 * (9 - int(prompt[0])))
        return digits(text)

    def states(begin_early: bool) -> tuple[list[Any], Tensor]:
        loop = one_by_one(late)
        if not begin_early:
            monkeypatch.setattr(loop, "_prefetch_rewards", None)
        reports = run(loop, 2)
        return [(g.group.prompt.id, g.scored.totals) for r in reports for g in r.groups], snapshot(loop.engine.policy.model)

    early, after = states(True), states(False)
    assert early[0] == after[0]
    assert torch.equal(early[1], after[1])
    assert len({totals for _, totals in early[0]}) > 1


def test_a_run_stops_at_its_first_step_if_sampler_and_learner_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner gets other weights than the sampler, as if the model's state were lost."""
    loop = loop_for({}, digits)
    own = loop.engine.policy.pack_hidden
    monkeypatch.setattr(loop.engine.policy, "pack_hidden", lambda pack: own(pack) * 1.5)
    with pytest.raises(ModelError, match="sampler and learner disagree"):
        loop.step(1)


def test_an_fp8_cache_has_wider_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rounding does not stop a run; other weights do."""
    loop = loop_for({"sampling": {"max_new_tokens": 8, "temperature": 0.2}}, digits)
    loop.engine.settings = loop.engine.settings.model_copy(update={"kv_dtype": "fp8"})
    metrics = loop.step(1).metrics
    assert metrics["mismatch_max"] > MAX_MISMATCH_32BIT
    assert 1e-7 < metrics["mismatch_kl"] < 0.01
    other = loop_for({}, digits)
    other.engine.settings = loop.engine.settings
    own = other.engine.policy.pack_hidden
    monkeypatch.setattr(other.engine.policy, "pack_hidden", lambda pack: own(pack) * 30)
    with pytest.raises(ModelError, match="the FP8 KV cache is too coarse"):
        other.step(1)


def test_engines_with_separate_weights_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = loop_for({}, digits)
    own = loop.engine.policy.pack_hidden
    monkeypatch.setattr(loop.engine.policy, "pack_hidden", lambda pack: own(pack) * 1.5)
    loop.engine.shares_weights = False
    assert loop.step(1).metrics["mismatch_max"] > 0.01


def test_sampled_entropy_covers_groups_that_are_not_forwarded() -> None:
    """Of six prompts two have a signal. `entropy` is of their tokens; `sampled_entropy` of all, and is the entropy that the
    model's own forward has there, up to chance."""

    def rewarded(completion: str, prompt: str) -> float:
        return digits(completion) if prompt.startswith("0") else 1.0

    sampling = {"max_new_tokens": 8, "temperature": 0.8}
    options: dict[str, Any] = {"prompts_per_step": 36, "group_size": 24, "sampling": sampling}
    some = loop_for(options, rewarded).step(1)
    everything = loop_for(options | {"no_signal": "keep"}, rewarded).step(1)
    assert some.metrics["no_signal_share"] == pytest.approx(30 / 36)
    assert some.metrics["sampled_entropy"] == everything.metrics["sampled_entropy"]
    completions = [c for g in some.groups for c in g.group.completions]
    surprise = -np.concatenate([c.logps for c in completions]).astype(np.float64)
    assert some.metrics["sampled_entropy"] == pytest.approx(surprise.mean(), rel=1e-6)
    chance = surprise.std() / np.sqrt(len(surprise))
    assert abs(some.metrics["sampled_entropy"] - everything.metrics["entropy"]) < 4 * chance < 0.06
    assert some.metrics["entropy"] != everything.metrics["entropy"], "the forwarded tokens are others"


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 6), st.integers(1, 20))
def test_extra_samples_spend_the_budget_on_groups_that_disagree(disagrees: list[bool], first: int, more: int) -> None:
    """All of the step's samples are used, groups differ by at most one, and the others get something only if these are full."""
    size, limit = first + more, 4 * (first + more) - first
    extra = extra_samples(disagrees, total=len(disagrees) * more, limit=limit)
    assert sum(extra) + first * len(disagrees) == size * len(disagrees)
    chosen, others = ([e for e, d in zip(extra, disagrees, strict=True) if d == wanted] for wanted in (True, False))
    assert all(max(part) - min(part) <= 1 for part in (chosen, others) if part)
    if chosen and any(others):
        assert min(chosen) == limit


def test_groups_of_adaptive_size_are_those_of_a_larger_group() -> None:
    """A step has the samples of its recipe; groups whose first two agree stay small; the rest are as if sampled at once."""
    options = {"group_size": 4, "curriculum": {"first_samples": 2, "max_group_size": 12}}
    loop = loop_for({**options, "prompts_per_step": 6}, lambda completion: float(sum(map(ord, completion)) % 2))
    policy = copy.deepcopy(loop.engine.policy)
    report = loop.step(1)
    sizes = [len(group.group.completions) for group in report.groups]
    assert sum(sizes) == 6 * 4
    assert min(sizes) == 2 < max(sizes)
    for graded in report.groups:
        rewards = np.array(graded.scored.totals, np.float64)
        assert (len(rewards) > 2) == (rewards[0] != rewards[1])
        engine = NativeEngine(policy, Engine(slots=16))
        (whole,) = engine.sample([graded.group.prompt], len(rewards), loop.stage.sampling, SampleKey(0, 1))
        for ours, theirs in zip(graded.group.completions, whole.completions, strict=True):
            assert np.array_equal(ours.token_ids, theirs.token_ids)
        for row, value in zip(graded.advantages, rewards - rewards.mean(), strict=True):
            np.testing.assert_allclose(row, value / (rewards.std(ddof=1) + 1e-4), atol=1e-5)
    silent = sum(size for size, group in zip(sizes, report.groups, strict=True) if not group.has_signal)
    assert report.metrics["no_signal_samples"] == silent / 24 < report.metrics["no_signal_share"]


def test_a_curriculum_asks_again_what_is_sometimes_solved() -> None:
    """Prompts whose first digit is 0 are never solved, those with 1 always, others half of the time."""

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [{"0": 0.0, "1": 1.0}.get(prompts[0][0], float(i % 2)) for i in range(len(completions))]

    shares = {}
    for name, options in {"with": {"curriculum": {"unseen": 0.34, "pools": [0, 1, 0]}}, "without": {}}.items():
        loop = loop_for({"prompts_per_step": 9, "steps": 9, **options}, reward)
        shares[name] = [report.metrics["no_signal_share"] for report in run(loop, 9)]
    assert shares["with"][0] == shares["without"][0]
    assert sum(shares["with"][4:]) < 0.5 * sum(shares["without"][4:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first_samples": 4}, "first_samples.*group_size = 4"),
        ({"first_samples": 1}, "it takes two completions to disagree"),
        ({"first_samples": 2, "max_group_size": 3}, "max_group_size.*use 4 or more"),
        ({"max_group_size": 8}, "set first_samples"),
        ({"medium": [0.9, 0.1]}, "the lower bound is above"),
        ({"medium": [0.1, 0.9]}, "set pools"),
        ({"pools": [0, 0, 0]}, "no prompt would ever be preferred"),
        ({"pools": [1, 1]}, "pools"),
        ({"unseen": 1.5}, "unseen"),
    ],
)
def test_mistakes_in_a_curriculum_are_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=f"(?s){message}"):
        recipe(f"grpo.curriculum={toml_of(options)}")


def toml_of(table: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}"


def test_a_curriculum_needs_pass_rates(tmp_path: Path) -> None:
    config = recipe("grpo.curriculum={}", "task.type=file", "task.digits=", f"task.path={tmp_path / 'rows.jsonl'}")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n' * 1)
    with pytest.raises(RecipeError, match="none of the stage's rewards defines correct answers"):
        check_curriculum(config.rollout_stages[0], loop_for({}, digits).task, rewards_for(config, config.stages[-1]))  # type: ignore[arg-type]
