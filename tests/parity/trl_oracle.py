"""TRL's trainers as oracles: their own methods, on a trainer that was never constructed.

``object.__new__`` gives an empty trainer; the methods under test then find the few attributes they read, and the heavy parts
(the model's forward, generation, reward functions) are replaced by the numbers of the test. The formulas stay TRL's.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

GRPO_ARGS = {
    "delta": None,
    "use_bias_correction_kl": False,
    "steps_per_generation": 1,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
}
GRPO_FIELDS = {
    "loss_type": "grpo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "max_completion_length": 10,
    "entropy_coef": 0.0,
    "current_gradient_accumulation_steps": 1,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_adaptive_entropy": False,
    "use_vllm": False,
    "vllm_importance_sampling_correction": False,
}


def _alone(tensor: Tensor, **options: Any) -> Tensor:
    """Gathering and reducing over one process."""
    return tensor


def _bare(kind: type, args: dict[str, Any], fields: dict[str, Any]) -> Any:
    """A trainer with these attributes and no others, on the CPU, in training mode."""
    trainer: Any = object.__new__(kind)
    trainer.args = SimpleNamespace(**args)
    trainer.model = SimpleNamespace(training=True)
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"), process_index=0, num_processes=1, sync_gradients=True, gather=_alone, reduce=_alone
    )
    trainer._metrics = {"train": defaultdict(list)}
    trainer.aux_loss_enabled = False
    for name, value in fields.items():
        setattr(trainer, name, value)
    return trainer


def _batch(mask_BT: Tensor, **tensors: Tensor | None) -> dict[str, Tensor]:
    """The inputs of a trainer's loss. The ids are never read, because the forward pass is replaced."""
    ids_BT = torch.zeros_like(mask_BT)
    known = {"prompt_ids": ids_BT[:, :1], "prompt_mask": torch.ones_like(ids_BT[:, :1]), "completion_ids": ids_BT}
    return known | {"completion_mask": mask_BT} | {name: t for name, t in tensors.items() if t is not None}


def grpo_loss(
    logp_BT: Tensor,
    advantage_BT: Tensor,
    mask_BT: Tensor,
    *,
    old_BT: Tensor | None = None,
    ref_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
    weight_BT: Tensor | None = None,
    args: dict[str, Any] | None = None,
    **fields: Any,
) -> Tensor:
    """GRPOTrainer's loss of one batch that is the complete step. ``weight_BT`` stands for its vLLM importance weights."""
    trainer = _bare(GRPOTrainer, GRPO_ARGS | (args or {}), GRPO_FIELDS | fields)
    trainer._entropy_bonus_enabled = trainer.entropy_coef != 0
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = weight_BT is not None
    entropies_BT = torch.zeros_like(logp_BT) if entropy_BT is None else entropy_BT
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp_BT, entropies_BT, None)
    inputs = _batch(
        mask_BT,
        advantages=advantage_BT,
        num_items_in_batch=mask_BT.sum(),
        old_per_token_logps=old_BT,
        ref_per_token_logps=ref_BT,
        importance_sampling_ratio=weight_BT,
    )
    return trainer._compute_loss(None, inputs)  # type: ignore[no-any-return]


def rloo_loss(logp_BT: Tensor, old_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, *, low: float, high: float) -> Tensor:
    """RLOOTrainer's loss of one batch."""
    trainer = _bare(RLOOTrainer, {}, {"epsilon_low": low, "epsilon_high": high})
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logp_BT, torch.zeros_like(logp_BT), None)
    inputs = _batch(mask_BT, advantages=advantage_B, old_logps=(old_BT * mask_BT).sum(1))
    return trainer._compute_loss(None, inputs)  # type: ignore[no-any-return]


def _score(
    kind: type, rewards_PG: Tensor, generated: tuple[Any, ...], args: dict[str, Any], key: str = "advantages", **fields: Any
) -> Tensor:
    """What the trainer's own generate-and-score computes for its loss, with fixed completions and rewards: the advantages,
    [P, G], or another of its outputs. Rewards of several functions are [P, G, functions]."""
    prompts = rewards_PG.shape[0] * rewards_PG.shape[1]
    lists: dict[str, Any] = {name: [] for name in ("prompt", "completion", "advantages")}
    logs = lists | {"rewards": defaultdict(list), "extra": defaultdict(list)}
    shared: dict[str, Any] = {
        "num_generations": rewards_PG.shape[1],
        "reward_weights": torch.ones(1),
        "reward_funcs": [None],
        "reward_func_names": ["reward"],
        "mask_truncated_completions": False,
        "pad_to_multiple_of": None,
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_logs": logs,
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    forward = {"per_device_train_batch_size": prompts, "gradient_checkpointing_kwargs": None}
    trainer = _bare(kind, forward | args, shared | fields)
    trainer.model.is_gradient_checkpointing = False
    trainer._generate = lambda prompts: generated
    trainer._calculate_rewards = lambda *args: rewards_PG.reshape(prompts, -1)
    output = trainer._generate_and_score_completions([{"prompt": "?"} for _ in range(prompts)])
    value: Tensor = output[key]
    return value.reshape(rewards_PG.shape[:2]) if key == "advantages" else value


def grpo_advantages(rewards_PG: Tensor, scale_rewards: str) -> Tensor:
    """GRPOTrainer's advantages; a NaN is a completion that no reward function scored."""
    ids = [[1]] * rewards_PG.numel()
    generated: tuple[Any, ...] = (ids, ids, None, ["x"] * len(ids), None, {}, None, None)
    fields: dict[str, Any] = {
        "scale_rewards": scale_rewards,
        "multi_objective_aggregation": "sum_then_normalize",
        "environment_factories": None,
        "environments": None,
        "tools": None,
        "num_iterations": 1,
        "use_vllm": False,
        "beta": 0.0,
    }
    args = {"steps_per_generation": 1, "gradient_accumulation_steps": 1}
    return _score(GRPOTrainer, rewards_PG, generated, args, **fields)


def rloo_advantages(rewards_PG: Tensor, logp_BT: Tensor, ref_BT: Tensor, lengths: list[int], beta: float) -> Tensor:
    """RLOOTrainer's advantages, the KL inside the reward; completion i has ``lengths[i]`` tokens."""
    generated = ([[1]] * len(lengths), [[1] * length for length in lengths], ["x"] * len(lengths))
    fields: dict[str, Any] = {"beta": beta, "ref_model": "reference", "reward_clip_range": None, "normalize_advantages": False}

    def forward(model: object, *args: object, **kwargs: object) -> tuple[Tensor, None, None]:
        return (ref_BT if model == "reference" else logp_BT), None, None

    fields["_get_per_token_logps_and_entropies"] = forward
    return _score(RLOOTrainer, rewards_PG, generated, {}, **fields)
