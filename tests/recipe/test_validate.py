from __future__ import annotations

import pytest

from oncurve.recipe.load import parse_recipe
from oncurve.recipe.validate import find_problems

from .recipes import base, grpo, recipe, refusal

FREE = "stages=[{type='training_free', model='m'"
IMPOSSIBLE = [
    (["sft.name=grpo"], "stages", "identify stages by name"),
    (["sft.name=model"], "model.name", "is a top-level key"),
    (["sft.name=warm up"], "warm up.name", "letters, digits"),
    (["rewards.format.name=answer"], "rewards", "identify rewards by name"),
    (["rewards=[]"], "rewards", "learns from rewards alone"),
    (["grpo.rewards=[]"], "grpo.rewards", "learns from rewards alone"),
    (["rewards.answer.weight=0", "rewards.format.weight=0"], "rewards.answer.weight", "recorded but not trained on"),
    (["grpo.group_size=1"], "grpo.group_size", "its own mean"),
    (["grpo.group_size=1", "grpo.objective=rloo"], "grpo.group_size", "computed from the others in the group"),
    (["grpo.group_size=1", "grpo.advantage.baseline=none"], "grpo.group_size", "a single reward has none"),
    (["grpo.group_size=1", "grpo.objective=reinforce", "grpo.no_signal=resample"], "grpo.no_signal", "always equals itself"),
    (["grpo.sampling.temperature=0"], "grpo.sampling.temperature", "all the same"),
    (["grpo.kl.where=reward"], "grpo.kl.where", "there is no reference"),
    (["grpo.kl.estimator=k1"], "grpo.kl.estimator", "there is no reference"),
    (["grpo.kl.on_cpu=true"], "grpo.kl.on_cpu", "there is no reference"),
    (["stages=[{type='ppo', critic={loss_weight=0.1}}]"], "ppo.critic.loss_weight", "its own optimiser"),
    (["stages=[{type='dpo', pairs='p.jsonl', margin=0.2}]"], "dpo.margin", "only simpo has a margin"),
    (["grpo.kl.refresh_every=10"], "grpo.kl.refresh_every", "there is no reference"),
    (["grpo.kl.ratio_weighted=true"], "grpo.kl.ratio_weighted", "there is no reference"),
    (["grpo.kl.refresh_mix=0.1"], "grpo.kl.refresh_mix", "there is no reference"),
    (["grpo.kl.refresh_mix=0.1", "grpo.kl.beta=1"], "grpo.kl.refresh_mix", "never refreshed"),
    (
        ["grpo.kl={beta=1, refresh_every=1, refresh_mix=0.1}", "model.lora.dora=true"],
        "grpo.kl.refresh_mix",
        "has no magnitudes",
    ),
    (["grpo.entropy.kl_cov=0.1"], "grpo.entropy.kl_cov", "with one update per step"),
    (["grpo.entropy.target=0.1", "grpo.entropy_bonus=-1"], "grpo.entropy_bonus", "first value of a bonus"),
    (["grpo.entropy.bonus_step=0.1"], "grpo.entropy.bonus_step", "belongs to target"),
    (["grpo.entropy.clip_cov_range=[1, 2]"], "grpo.entropy.clip_cov_range", "belongs to clip_cov"),
    (["grpo.entropy={clip_cov=0.1, clip_cov_range=[2, 1]}"], "grpo.entropy.clip_cov_range", "between the bounds"),
    (
        ["grpo.kl.ratio_weighted=true", "grpo.kl.beta=1", "grpo.objective=rloo"],
        "grpo.kl.ratio_weighted",
        "before there is a ratio",
    ),
    (["grpo.minibatches=17"], "grpo.minibatches", "use 16 or less"),
    (["grpo.clip={low=0.2, high=0.2, dual=1.2}"], "grpo.clip.dual", "use more than 1.2"),
    (["grpo.clip={low=1.0, high=4.0, dual=9.0}", "grpo.objective=cispo"], "grpo.clip.dual", "a second bound"),
    (["grpo.clip={low=0.2, high=0.2}", "grpo.objective=reinforce"], "grpo.clip", "clips nothing"),
    (["grpo.clip={low=0.2, high=0.2}", "grpo.objective=sapo"], "grpo.clip", "clips nothing"),
    (["grpo.objective=rloo", "grpo.advantage.scale=group"], "grpo.advantage.scale", 'rloo is defined by scale = "none"'),
    (["grpo.objective=rloo", "grpo.advantage.baseline=mean"], "grpo.advantage.baseline", "rloo is defined by baseline"),
    (["grpo.objective=maxrl", "grpo.overlong.buffer=16"], "grpo.overlong", "would become negative"),
    (["grpo.objective=maxrl", "grpo.kl={beta=0.1, where='reward'}"], "grpo.kl.where", "minus a KL is negative"),
    (["grpo.advantage.scale=mean", "grpo.objective=reinforce", "grpo.kl.beta=0.1"], "grpo.kl.where", "minus a KL is negative"),
    (["grpo.overlong.buffer=256"], "grpo.overlong.buffer", "use less than 256"),
    (["scale.ranks=17"], "scale.ranks", "use 16 ranks or fewer"),
    (["scale.ranks=8", "scale.tensor=3"], "scale.tensor", "use a divisor of 8"),
    (["scale.ranks=2", "scale.offload=true"], "scale.offload", "optimiser.on_cpu"),
    (["scale.ranks=2", "scale.gather=false"], "scale.gather", 'shard = "full"'),
    (["scale.max_staleness=1"], "scale.max_staleness", "sample themselves"),
    (["grpo.length_budget=100"], "grpo.length_budget", "only dr_grpo"),
    (["sft.optimiser.warmup_steps=201"], "sft.optimiser.warmup_steps", "--set sft.optimiser.warmup_steps=200"),
    (["grpo.optimiser.warmup_steps=201", "grpo.updates_per_step=2"], "grpo.optimiser.warmup_steps", "use 200 or less"),
    (["model.tiny.context=256"], "grpo.sampling.max_new_tokens", "for the prompt and the completion together"),
    (["evaluation.max_new_tokens=512"], "evaluation.max_new_tokens", "raise model.tiny.context"),
    (["sft.data=stage:kept"], "sft.data", "rejection_sample before 'sft' are: none"),
    (["rewards=[{type='model', model='stage:sft'}]"], "rewards.model.model", "reward_model before 'grpo' are: none"),
    (["engine.draft=group", "scale.engine=vllm"], "engine.draft", "vLLM samples"),
    (["engine.kv_dtype=fp8", "scale.engine=vllm"], "engine.kv_dtype", "vLLM samples"),
    ([f"{FREE}, sampling={{top_k=4}}}}]"], "training_free.sampling.top_k", "no such option"),
    ([f"{FREE}, sampling={{min_p=0.1}}}}]"], "training_free.sampling.min_p", "no such option"),
    ([f"{FREE}, sampling={{min_new_tokens=4}}}}]"], "training_free.sampling.min_new_tokens", "no such option"),
    ([f"{FREE}, mask_cut=true}}]"], "training_free.mask_cut", "no weights are trained"),
    (["grpo.iterate.every=2"], "grpo.iterate.reward", "the stage's rewards are answer, format"),
]


@pytest.mark.parametrize(("changes", "where", "words"), IMPOSSIBLE, ids=["+".join(case[0]) for case in IMPOSSIBLE])
def test_an_impossible_combination(changes: list[str], where: str, words: str) -> None:
    error = refusal(*changes)
    assert error.where == where
    assert words in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        [f"grpo.objective={name}"]
        for name in (
            *("grpo", "grpo_sequence", "dapo", "dr_grpo", "bnpo", "gspo", "gspo_token", "cispo", "sapo", "rloo", "reinforce"),
        )
    ]
    + [
        ["grpo.group_size=1", "grpo.objective=reinforce"],
        ["grpo.group_size=1", "grpo.advantage.baseline=none", "grpo.advantage.scale=batch"],
        ["grpo.kl.where=loss"],
        ["grpo.kl.beta=0.1", "grpo.objective=rloo", "grpo.kl.refresh_every=5"],
        ["grpo.clip={low=0.2, high=0.28, dual=3.0}"],
        ["grpo.optimiser.final_share=0.1"],
        ["grpo.optimiser.warmup_steps=100"],
        ["rewards.answer.weight=0"],
        ["model.source=folder", "model.tiny.context=16"],
        ["grpo.objective=dr_grpo", "grpo.length_budget=100"],
        ["grpo.overlong.buffer=255"],
        ["grpo.minibatches=16"],
        ["stages=[{type='ppo', critic={loss_weight=0.1, trunk='shared'}, kl={beta=0.1, estimator='k2', on_cpu=true}}]"],
        ["stages=[{type='dpo', pairs='p.jsonl', margin=0.2, loss='simpo'}]"],
        [f"{FREE}, sampling={{top_p=0.9, stop=['x']}}, tokens=9}}]"],
        ["grpo.entropy={top_share=0.2, clip_cov=0.01, kl_cov=0.01, target=0.2}", "grpo.minibatches=2"],
        ["grpo.kl={beta=1, refresh_every=1, refresh_mix=0.1}", "model.lora.rank=2"],
        ["engine.draft=own", "grpo.balance_loss=0.1"],
        ["engine.draft=group", "grpo.routing_replay=true"],
    ],
    ids="+".join,
)
def test_what_can_be_done_is_let_through(changes: list[str]) -> None:
    assert list(find_problems(recipe(*changes))) == []


def test_every_problem_is_found_not_only_the_first() -> None:
    stage = grpo().model_copy(update={"group_size": 1, "minibatches": 99})
    wrong = recipe().model_copy(update={"stages": (stage,)})
    assert {problem.where for problem in find_problems(wrong)} == {"grpo.group_size", "grpo.minibatches"}


def test_a_control_recipe_of_sft_alone_needs_no_rewards() -> None:
    data = base()
    data["stages"].pop()
    data.pop("rewards")
    assert refusal("sft.steps=0", data=data).where == "sft.steps"
    assert parse_recipe(data).stages[0].label == "sft"
