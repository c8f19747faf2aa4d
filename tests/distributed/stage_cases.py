"""Steps of the stage types other than `grpo` that any number of ranks can run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from oncurve.distributed.world import World
from oncurve.engines.native.engine import NativeEngine
from oncurve.models import fisher
from oncurve.models.heads.classifier import build_classifier, save
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Distil, Dpo, Ppo, RejectionSample, RewardModel, Trpo
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.reward_model import RewardModelOptions, RewardModelReward
from oncurve.runs.step_notes import collect_notes
from oncurve.tasks.data.preference_pairs import Pair
from oncurve.tasks.data.reward_model_data import RewardModelData, RewardModelExample
from oncurve.training.stages import trpo as of_trpo
from oncurve.training.stages.distil import DistilLoop
from oncurve.training.stages.dpo import DpoLoop
from oncurve.training.stages.iterative_grpo import IterativeLoop
from oncurve.training.stages.ppo import PpoLoop
from oncurve.training.stages.rejection_sample import RejectionLoop
from oncurve.training.stages.reward_model import RewardModelLoop
from oncurve.training.stages.trpo import TrpoLoop
from oncurve.training.trainer import shard_policy
from tests.distributed.cases import CLOCKS, CaseReward, StepOutcome, outcome_of
from tests.faults.test_memory_of_stages import Full, check_notes, of_pack
from tests.training.builders import PROMPTS, SMOOTH, policy, recipe, snapshot, stage

PAIRS = [Pair(Prompt(id=str(i), text=f"{i}+1="), f"{i + 1}" * (1 + i % 4), f"{i}{i}={i}") for i in range(9)]
"""Pairs of uneven lengths."""


def dpo(world: World, folder: Path, **options: Any) -> StepOutcome:
    return dpo_of(world, shard_policy(policy(), recipe(), world), **options)


def dpo_loop(world: World, trained: Policy, **options: Any) -> DpoLoop:
    section = Dpo.model_validate({"pairs": "-", "steps": 3, "batch_size": 5, "optimiser": SMOOTH, **options})
    return DpoLoop(section, 0, trained, PAIRS, world)


def dpo_of(world: World, trained: Policy, **options: Any) -> StepOutcome:
    loop = dpo_loop(world, trained, **options)
    reports = [loop.step(n) for n in (1, 2)]
    return outcome_of(world, reports[-1], loop.policy, [loop.optimiser])


EXAMPLES: dict[str, list[RewardModelExample]] = {
    "pairs": [
        RewardModelExample(p.prompt, (p.chosen, p.rejected), (1.0, (-1.0, 0.0, 1.0)[i % 3]), i / 9) for i, p in enumerate(PAIRS)
    ],
    "ratings": [RewardModelExample(p.prompt, (p.chosen,), (float(i), None if i % 2 else 0.5)) for i, p in enumerate(PAIRS)],
    "steps": [RewardModelExample(p.prompt, (p.chosen, p.rejected), (1.0, float(i % 2))) for i, p in enumerate(PAIRS)],
}


def reward_model(world: World, folder: Path, **options: Any) -> StepOutcome:
    """Two updates and an evaluation; two heads, the second with missing labels."""
    heads = {} if options.get("kind") == "steps" else {"aspects": ("good", "short")}
    usual = {"data": "-", "steps": 2, "batch_size": 5, "optimiser": SMOOTH, **heads}
    section = RewardModel.model_validate({**usual, **options})
    examples = EXAMPLES[section.kind]
    loop = RewardModelLoop(section, 0, policy(), folder, RewardModelData(examples[2:], examples[:2]), world)
    reports = [loop.step(n) for n in (1, 2)]
    return outcome_of(world, reports[-1], loop.policy, [loop.trainer.optimiser], loop.model)


def ppo(world: World, folder: Path, of: str = "digits", **options: Any) -> StepOutcome:
    """Two steps: the second starts with a trained critic."""
    usual = {"steps": 3, "prompts_per_step": 5, "group_size": 4, "optimiser": SMOOTH, "sampling": {"max_new_tokens": 8}}
    section = Ppo.model_validate({**usual, "updates_per_step": 2, **options})
    engine = NativeEngine(policy(), Engine(slots=16))
    loop = PpoLoop(section, 0, PROMPTS, engine, RewardMix([CaseReward(of)]), world)
    reports = [loop.step(n) for n in (1, 2)]
    learner = loop.learner
    return outcome_of(world, reports[-1], engine.policy, [learner.optimiser, learner.critic_optimiser], learner.critic.module)


def trpo(world: World, folder: Path, of: str = "digits", **options: Any) -> StepOutcome:
    """The change of the weights stands for the gradient, which is cleared before the update."""
    usual = {"steps": 3, "prompts_per_step": 5, "group_size": 4, "sampling": {"max_new_tokens": 8}, "fisher_share": 0.5}
    section = Trpo.model_validate({**usual, "max_kl": 1e-3, "damping": 0.5, "cg_iterations": 5, **options})
    engine = NativeEngine(policy(), Engine(slots=16))
    loop = TrpoLoop(section, 0, PROMPTS, engine, RewardMix([CaseReward(of)]), world)
    start = snapshot(engine.policy.model)
    report = loop.step(1)
    outcome = outcome_of(world, report, engine.policy, [])
    return replace(outcome, gradient=(snapshot(engine.policy.model) - start).numpy())


SHORT = {
    "gradient": (Policy, "pack_hidden", 26),
    "products": (fisher, "vocab_logps", 20),
    "search": (of_trpo, "policy_distributions", 14),
}


def trpo_short_of_memory(world: World, folder: Path, where: str) -> StepOutcome:
    """The last rank runs out of memory with packs of the usual size; the others do not."""
    if world.rank < world.size - 1:
        return trpo(world, folder, fisher_share=1.0)
    owner, name, room = SHORT[where]
    with pytest.MonkeyPatch.context() as patch, collect_notes() as notes:
        gpu = Full(patch, owner, name, of_pack, room)
        outcome = trpo(world, folder, fisher_share=1.0)
    assert gpu.refused
    check_notes(notes)
    return outcome


def rejection(world: World, folder: Path, **options: Any) -> StepOutcome:
    usual = {"steps": 3, "prompts_per_step": 5, "group_size": 4, "sampling": {"max_new_tokens": 12}, "at_least": 1.0, "keep": 2}
    engine = NativeEngine(shard_policy(policy(), recipe(), world), Engine(slots=16))
    section = RejectionSample.model_validate({**usual, **options})
    loop = RejectionLoop(section, 0, PROMPTS, engine, RewardMix([CaseReward()]), folder, world)
    reports = [loop.step(n) for n in (1, 2)]
    return outcome_of(world, reports[-1], engine.policy, [])


def distil(world: World, folder: Path, **options: Any) -> StepOutcome:
    """Two steps with rewards and a teacher of other weights, or the policy itself behind a longer prompt."""
    teacher = folder / "teacher"
    world.on_rank_zero(lambda: policy(5).save(teacher))
    usual = {"steps": 3, "prompts_per_step": 5, "group_size": 4, "optimiser": SMOOTH, "sampling": {"max_new_tokens": 8}}
    section = Distil.model_validate({**usual, "teacher": {"model": str(teacher)}, "reward_weight": 0.5, **options})
    engine = NativeEngine(shard_policy(policy(), recipe(), world), Engine(slots=16))
    loop = DistilLoop(section, recipe().model, 0, PROMPTS, engine, RewardMix([CaseReward("digits")]), world)
    reports = [loop.step(n) for n in (1, 2)]
    return outcome_of(world, reports[-1], engine.policy, [loop.learner.optimiser])


def digits(completion: str) -> float:
    return float(sum(c.isdigit() for c in completion))


def iterative(world: World, folder: Path, **options: Any) -> StepOutcome:
    """A round of two steps, and a third step that the updated reward model scores."""
    judge, engine = folder / "judge", NativeEngine(policy(), Engine(slots=16))
    heads = build_classifier(engine.policy, ["reward"], 1, by_token=False)
    world.on_rank_zero(lambda: save(heads, engine.policy.tokenizer, judge))
    labeller = {"type": "python", "function": f"{Path(__file__)}:digits"}
    rounds = {"every": 2, "updates": 3, "batch_size": 5, "past_share": 0.2, "labeller": labeller, "optimiser": SMOOTH}
    usual = {"prompts_per_step": 5, "sampling": {"max_new_tokens": 8}, "kl": {"beta": 0.1}, "optimiser": SMOOTH}
    section = stage(**{**usual, "advantage": {"scale": "none"}, "iterate": rounds, **options})
    reward = RewardModelReward("model", 1.0, RewardModelOptions(model=str(judge)))
    loop = IterativeLoop(section, recipe(), PROMPTS, engine, RewardMix([reward]), folder, world)
    reports = [loop.step(n) for n in (1, 2, 3)]
    outcome = outcome_of(
        world, reports[-1], engine.policy, [loop.learner.optimiser, loop.reward_model.optimiser], loop.reward_model.model
    )
    return replace(
        outcome, metrics=outcome.metrics | {f"round/{k}": v for k, v in reports[1].metrics.items() if k not in CLOCKS}
    )


StageCase = Callable[..., StepOutcome]
STAGES: dict[str, tuple[StageCase, dict[str, Any]]] = {
    "dpo": (dpo, {}),
    "ipo": (dpo, {"loss": "ipo", "tokens_per_pack": 20}),
    "simpo": (dpo, {"loss": "simpo", "beta": 2.0}),
    "dpo of fewer pairs than ranks": (dpo, {"batch_size": 1}),
    "reward model": (reward_model, {}),
    "reward model of ratings": (reward_model, {"kind": "ratings", "tokens_per_pack": 20}),
    "reward model of steps": (reward_model, {"kind": "steps"}),
    "reward model of fewer rows than ranks": (reward_model, {"batch_size": 1}),
    "ppo": (ppo, {"kl": {"beta": 0.1}}),
    "ppo in a shared trunk": (ppo, {"critic": {"trunk": "shared"}, "kl": {"beta": 0.1, "where": "loss"}}),
    "ppo by completions, not whitened": (ppo, {"reduction": "completions", "whiten": False, "gamma": 0.9}),
    "ppo warming up": (ppo, {"critic": {"warmup_steps": 2}}),
    "ppo in mini-batches and small packs": (ppo, {"minibatches": 2, "tokens_per_pack": 20}),
    "ppo of steps": (ppo, {"of": "steps"}),
    "ppo with failures": (ppo, {"of": "fails", "max_failure_share": 1.0, "mask_cut": True}),
    "ppo of fewer prompts than ranks": (ppo, {"prompts_per_step": 1}),
    "ppo of fewer prompts than ranks, warming up": (ppo, {"prompts_per_step": 1, "critic": {"warmup_steps": 2}}),
    "trpo": (trpo, {}),
    "trpo in small packs": (trpo, {"tokens_per_pack": 20}),
    "trpo on empty ranks": (trpo, {"of": "few", "fisher_share": 0.2}),
    "trpo of fewer prompts than ranks": (trpo, {"prompts_per_step": 1}),
    **{f"trpo, one rank short of memory in its {where}": (trpo_short_of_memory, {"where": where}) for where in SHORT},
    "rejection sampling": (rejection, {}),
    "rejection sampling of fewer prompts than ranks": (rejection, {"prompts_per_step": 1}),
    "iterative grpo": (iterative, {}),
    "distil": (distil, {"tokens_per_pack": 30}),
    "distil by advantages": (distil, {"teach_by": "advantage"}),
    "distil from the policy itself": (distil, {"teacher": {"model": "self", "context": "1+{prompt}"}}),
    "distil of fewer prompts than ranks": (distil, {"prompts_per_step": 1, "reward_weight": 0.0}),
}


def stage_steps(world: World, names: list[str]) -> dict[str, StepOutcome]:
    outcomes = {}
    for name in names:
        run, options = STAGES[name]
        with TemporaryDirectory() as temporary:
            folder = Path(world.on_rank_zero(lambda path=temporary: path))  # type: ignore[misc]
            outcome = run(world, folder, **options)
            outcomes[name] = replace(outcome, written=world.on_rank_zero(lambda folder=folder: _written(folder)))  # type: ignore[misc]
    return outcomes


def _written(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.rglob("*.jsonl")))
