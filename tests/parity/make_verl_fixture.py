"""Writes `verl_0_9_1.json`: inputs, and what verl's own functions return for them.

verl's dependencies do not go together with Oncurve's, so its functions run once, in an environment of their own, and the tests
compare with what they returned:

    python -m venv verl-env && verl-env/bin/pip install verl==0.9.1 torch
    verl-env/bin/python tests/parity/make_verl_fixture.py
"""

# mypy: ignore-errors

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.config.algorithm import RolloutCorrectionConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig, PolicyLossConfig

LENGTHS = (5, 3, 1, 4, 2, 5, 2, 3)
GROUPS = (0, 0, 0, 0, 1, 1, 1, 1)
REWARDS = {
    "binary": (1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0),
    "graded": (0.5, 0.25, -2.0, 3.0, 1.0, 2.0, 4.0, 1.5),
    "one_silent": (2.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0, 0.0),
}
MASK_BT = (torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None]).double()
INDEX = np.array(GROUPS, dtype=object)
LOSS_OPTIONS = ("dro_beta", "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")


def batch(seed: int) -> dict[str, Tensor]:
    """Log-probs of the policy, an older policy and a sampler, and one advantage per completion."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp_BT = -noise(8, 5).abs() - 0.05
    old_BT = torch.minimum(logp_BT + 0.6 * noise(8, 5), torch.tensor(-0.01))
    return {"logp": logp_BT, "old": old_BT, "sampler": old_BT + 0.4 * noise(8, 5), "advantage": noise(8)}


def policy_loss(mode: str, inputs: dict[str, Tensor], low: float, high: float, **options: Any) -> dict[str, Any]:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=8,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=options.get("cap", 3.0),
        policy_loss=PolicyLossConfig(loss_mode=mode, **{key: options[key] for key in LOSS_OPTIONS if key in options}),
    )
    leaf_BT = inputs["logp"].clone().requires_grad_()
    loss, metrics = core_algos.get_policy_loss_fn(mode)(
        old_log_prob=inputs["old"],
        log_prob=leaf_BT,
        advantages=inputs["advantage"][:, None] * MASK_BT,
        response_mask=MASK_BT,
        loss_agg_mode="token-mean",
        config=config,
    )
    (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
    share = {"dropped": metrics["actor/pg_clipfrac"]} if mode == "clip_cov" else {}
    return {"loss": loss.item(), "gradient": gradient_BT.tolist(), "low": low, "high": high, **options, **share}


def token_rewards(rewards: tuple[float, ...]) -> Tensor:
    """The reward at the last token of each completion."""
    rewards_BT = torch.zeros(8, 5, dtype=torch.float64)
    rewards_BT[torch.arange(8), torch.tensor(LENGTHS) - 1] = torch.tensor(rewards, dtype=torch.float64)
    return rewards_BT


def advantages(name: str, rewards: tuple[float, ...], **options: Any) -> list[float]:
    estimate = core_algos.get_adv_estimator_fn(name)
    values_BT, _ = estimate(token_level_rewards=token_rewards(rewards), response_mask=MASK_BT, index=INDEX, **options)
    return values_BT[:, 0].tolist()


def decoupled(first: tuple[float, ...], second: tuple[float, ...], weights: list[float]) -> list[float]:
    """GDPO's advantages, of two rewards. verl reads them from the batch that its reward manager fills."""
    lengths_B = torch.tensor(LENGTHS)
    prompts_B1 = torch.zeros(8, 1, dtype=torch.long)
    mask = torch.cat([torch.ones(8, 1), MASK_BT], 1).long()
    assert (mask[:, 1:].sum(1) == lengths_B).all()
    return advantages(
        "gdpo",
        first,
        config=OmegaConf.create({"gdpo_reward_keys": ["first", "second"], "gdpo_reward_weights": weights}),
        non_tensor_batch={"first": np.array(first), "second": np.array(second)},
        batch={"prompts": prompts_B1, "attention_mask": mask},
    )


def correction(preset: str, inputs: dict[str, Tensor]) -> dict[str, Any]:
    config = getattr(RolloutCorrectionConfig, preset)()
    weights, mask_BT, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=inputs["old"],
        rollout_log_prob=inputs["sampler"],
        response_mask=MASK_BT,
        rollout_is=config.rollout_is,
        rollout_is_threshold=config.rollout_is_threshold,
        rollout_rs=config.rollout_rs,
        rollout_rs_threshold=config.rollout_rs_threshold,
    )
    weights_BT = MASK_BT if weights is None else weights.batch["rollout_is_weights"]
    return {"weights": (weights_BT * mask_BT).tolist()}


def near(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """A sampler so near that rejection by the geometric mean keeps some completions: the gap shrinks from row to row."""
    gap_BT = (inputs["sampler"] - inputs["old"]) * (0.01 ** torch.arange(8, dtype=torch.float64) / 10)[:, None]
    return inputs | {"sampler": inputs["old"] + gap_BT}


def main() -> None:
    seeds = []
    for seed in range(3):
        inputs = batch(seed)
        cases = {
            "gmpo": policy_loss("geo_mean", inputs, 0.3, 0.4),
            "gpg": policy_loss("gpg", inputs, 0.2, 0.2),
            "dppo_tv": policy_loss("dppo_tv", inputs, 0.1, 0.15, cap=3.0),
            "dppo_kl": policy_loss("dppo_kl", inputs, 0.02, 0.05, cap=3.0),
            "dro": policy_loss("dro", inputs, 0.2, 0.2, dro_beta=0.7),
        }
        # A ratio of 1.0 drops every token within the bounds, so verl's random choice does not matter; with a wide clip range
        # none of them is clipped. With a small ratio only the number of tokens can be compared.
        bounds = {"clip_cov_lb": 0.1, "clip_cov_ub": 1.5}
        entropy = {
            "clip_cov": policy_loss("clip_cov", inputs, 0.99, 1e6, clip_cov_ratio=1.0, **bounds),
            "clip_cov_some": policy_loss("clip_cov", inputs, 0.99, 1e6, clip_cov_ratio=0.1, **bounds),
            "kl_cov": policy_loss("kl_cov", inputs, 0.2, 0.2, kl_cov_ratio=0.2, ppo_kl_coef=0.7),
        }
        close = near(inputs)
        corrections = {
            "tis": correction("decoupled_token_is", inputs),
            "seq_tis": correction("decoupled_seq_is", inputs),
            "icepop": correction("decoupled_token_icepop", inputs),
            "geo_rs": correction("decoupled_geo_rs", close) | {"sampler": close["sampler"].tolist()},
        }
        lists = {name: values.tolist() for name, values in inputs.items()}
        seeds.append({"inputs": lists, "losses": cases, "entropy": entropy, "corrections": corrections})
    passk = {norm: AlgoConfig(norm_adv_by_std_in_grpo=norm) for norm in (True, False)}
    graded = {
        name: {
            "rewards": rewards,
            "opo": advantages("opo", rewards),
            "gpg": advantages("gpg", rewards),
            "pass_at_k": advantages("grpo_passk", rewards, config=passk[True]),
            "pass_at_k_unscaled": advantages("grpo_passk", rewards, config=passk[False]),
        }
        for name, rewards in REWARDS.items()
    }
    weights = [1.0, 0.5]
    gdpo = {"weights": weights, "advantages": decoupled(REWARDS["binary"], REWARDS["graded"], weights)}
    result = {"verl": version("verl"), "torch": torch.__version__, "lengths": LENGTHS, "seeds": seeds, "graded": graded}
    text = json.dumps(result | {"gdpo": gdpo})
    Path(__file__).with_name("verl_0_9_1.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
