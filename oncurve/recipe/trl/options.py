"""Which TRL option is which recipe key: one table, read by `recipe from-trl`, by error messages and by the documentation.

Every option of TRL 1.16's GRPOConfig (TrainingArguments included), ModelConfig and GRPOScriptArguments is in it: with its key,
or with the reason why it has none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oncurve.objective_specs import OBJECTIVE_SPECS
from oncurve.recipe.trl.config import NoCounterpart, TrlConfig


@dataclass(frozen=True, slots=True)
class TrlOption:
    """``key`` is the recipe's (None: no counterpart). ``convert`` gives its value, None to leave the key out; without one, the
    option only has a part in another's value. ``remark`` says what is different."""

    key: str | None
    convert: Callable[[TrlConfig], Any] | None = None
    remark: str = ""


def _number(option: str) -> Callable[[TrlConfig], Any]:
    return lambda config: None if config.value(option) is None else config.number(option)


def _whole(option: str) -> Callable[[TrlConfig], Any]:
    return lambda config: None if config.value(option) is None else config.whole(option)


def _truth(option: str) -> Callable[[TrlConfig], Any]:
    return lambda config: None if config.value(option) is None else config.truth(option)


def _text(option: str) -> Callable[[TrlConfig], Any]:
    return lambda config: None if config.value(option) is None else str(config.value(option))


def _steps(config: TrlConfig) -> int:
    if config.whole("max_steps") <= 0:
        epochs = config.number("num_train_epochs")
        raise NoCounterpart(
            f"TRL runs {epochs:g} epochs here; steps = epochs × prompts in the data / grpo.prompts_per_step: set it by hand"
        )
    return config.in_steps("max_steps")


def _objective(config: TrlConfig) -> str:
    return config.objective


def _clip_low(config: TrlConfig) -> float | None:
    if config.objective == "sapo":
        return None
    return 1.0 if config.objective == "cispo" and _clip_high(config) is not None else _cispo_has_none(config, "epsilon")


def _cispo_has_none(config: TrlConfig, option: str) -> float | None:
    return None if config.objective == "cispo" else config.number(option)


def _clip_high(config: TrlConfig) -> float | None:
    """TRL's cispo takes epsilon_high as the bound on the ratio itself; elsewhere it is what lies above 1."""
    option = "epsilon" if config.value("epsilon_high") is None else "epsilon_high"
    if config.objective == "sapo":
        return None
    if config.objective != "cispo":
        return config.number(option)
    return round(config.number(option) - 1, 12) if config.number(option) > 1 else None


def _clip_dual(config: TrlConfig) -> float | None:
    if config.value("delta") is None:
        return None
    if config.objective in ("sapo", "cispo"):
        raise NoCounterpart(f"{config.objective} has no two-sided clip, in TRL neither")
    return config.number("delta")


def _scale(config: TrlConfig) -> str | None:
    value = str(config.value("scale_rewards"))
    scale = {"True": "group", "False": "none", "true": "group", "false": "none"}.get(value, value)
    own = OBJECTIVE_SPECS[config.objective].scale
    return None if scale == own and "scale_rewards" not in config.said else scale


def _ratio_weighted(config: TrlConfig) -> bool | None:
    return config.truth("use_bias_correction_kl") if config.number("beta") > 0 else None


def _refresh(config: TrlConfig) -> int | None:
    if not config.truth("sync_ref_model"):
        return None
    if config.number("beta") == 0:
        raise NoCounterpart("with beta = 0 no reference is held, so there is none to refresh")
    return config.in_steps("ref_model_sync_steps")


def _schedule(config: TrlConfig) -> str:
    name = str(config.value("lr_scheduler_type"))
    known = {"linear", "cosine", "constant"}
    same = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine"}
    if name not in known and name not in same:
        raise NoCounterpart("the schedules are constant, linear and cosine; set grpo.optimiser.schedule by hand")
    return same.get(name, name)


def _final_share(config: TrlConfig) -> float | None:
    extra = table_of(config.value("lr_scheduler_kwargs"))
    if "min_lr_rate" in extra:
        return float(extra["min_lr_rate"])
    return float(extra["min_lr"]) / config.number("learning_rate") if "min_lr" in extra else None


def _warmup(option: str) -> Callable[[TrlConfig], Any]:
    def convert(config: TrlConfig) -> int | None:
        if config.value(option) is None or config.value("lr_scheduler_type") == "constant":
            return None  # transformers' plain constant schedule has no warm-up, whatever the option says
        return round(config.in_updates(option))

    return convert


def _betas(config: TrlConfig) -> list[float] | None:
    if config.value("adam_beta1") is None and config.value("adam_beta2") is None:
        return None
    return [
        0.9 if config.value("adam_beta1") is None else config.number("adam_beta1"),
        0.999 if config.value("adam_beta2") is None else config.number("adam_beta2"),
    ]


def _dtype(config: TrlConfig) -> str:
    if config.value("dtype") in ("float32", "bfloat16"):
        return str(config.value("dtype"))
    bf16 = not config.truth("fp16") if config.value("bf16") is None else config.truth("bf16")
    return "bfloat16" if bf16 else "float32"


def _save_every(config: TrlConfig) -> int:
    return config.in_steps("save_steps") if config.value("save_strategy") == "steps" else 0


def _eval_every(config: TrlConfig) -> int | None:
    if config.value("eval_strategy") != "steps":
        return None
    return config.in_steps("logging_steps" if config.value("eval_steps") is None else "eval_steps")


def _importance_cap(config: TrlConfig) -> float | None:
    old, new = config.value("vllm_importance_sampling_cap"), config.value("vllm_importance_sampling_clip_max")
    if not config.truth("use_vllm") or not config.truth("vllm_importance_sampling_correction") or (old is None and new is None):
        return None
    if config.value("vllm_importance_sampling_mode") != "token_truncate":
        raise NoCounterpart("only TRL's mode token_truncate has a counterpart, grpo.importance_cap; left off")
    return config.number("vllm_importance_sampling_clip_max" if old is None else "vllm_importance_sampling_cap")


def _moments(config: TrlConfig) -> str | None:
    """The optimiser is AdamW: its kinds for other kernels are the same, those of 8 bits are its moments' precision."""
    name = str(config.value("optim") or "adamw_torch")
    if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        return "int8"
    if "adamw" not in name or "bit" in name:
        raise NoCounterpart("the optimiser is AdamW, with moments in float32 or int8 (grpo.optimiser.moments)")
    return None


def _checkpointing(config: TrlConfig) -> str | None:
    if config.value("gradient_checkpointing") is None:
        return None
    return "on" if config.truth("gradient_checkpointing") else "off"


def _adapter(option: str, convert: Callable[[TrlConfig], Any]) -> Callable[[TrlConfig], Any]:
    """An option of the adapter: TRL reads it where `use_peft` is true."""

    def converted(config: TrlConfig) -> Any:
        if config.truth("use_peft"):
            return convert(config)
        if option in config.said:
            raise NoCounterpart("TRL reads it where use_peft is true, and trains all weights here")
        return None

    return converted


def _targets(config: TrlConfig) -> list[str]:
    said = config.value("lora_target_modules")
    if said is None:
        raise NoCounterpart(
            "peft has a choice of its own per family, often q_proj and v_proj; here all linear layers are taken"
        )
    return [str(name) for name in ([said] if isinstance(said, str) else said)]


def _quantise(config: TrlConfig) -> str | None:
    if not config.truth("load_in_8bit") and not config.truth("load_in_4bit"):
        return None
    if not config.truth("use_peft"):
        raise NoCounterpart("quantised weights are not trained themselves: set use_peft, as TRL asks for too")
    if config.truth("load_in_8bit"):
        return "int8"
    if config.value("bnb_4bit_quant_type") == "fp4":
        raise NoCounterpart("four bits are nf4 here; left off")
    return "nf4"


def _engine(config: TrlConfig) -> None:
    if config.truth("use_vllm"):
        raise NoCounterpart(
            "the native engine samples with the learner's own weights, and none are copied; to keep vLLM, "
            'set scale.engine = "vllm"'
        )


def _vllm_tensor(config: TrlConfig) -> None:
    if config.truth("use_vllm") and config.value("vllm_tensor_parallel_size") is not None:
        raise NoCounterpart('read with vLLM only: where you set scale.engine = "vllm", set scale.vllm_tensor to it')


def table_of(value: Any) -> dict[str, Any]:
    """A dict, which TRL's command line also takes as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    return dict(value) if isinstance(value, dict) else {}


def _none(reason: str, *options: str) -> dict[str, TrlOption]:
    return {option: TrlOption(None, None, reason) for option in options}


TRL_OPTIONS: dict[str, TrlOption] = {
    "run_name": TrlOption("name", _text("run_name")),
    "seed": TrlOption("seed", _whole("seed"), "the same seed draws other random numbers"),
    "model_name_or_path": TrlOption("model.source", _text("model_name_or_path")),
    "bf16": TrlOption(
        "model.dtype", _dtype, "bf16 weights with float32 masters, where TRL runs float32 weights under autocast"
    ),
    "fp16": TrlOption("model.dtype", None, "float16 is not offered: float32 is used unless bf16 is set"),
    "dtype": TrlOption("model.dtype"),
    "use_cpu": TrlOption("model.device", lambda config: "cpu" if config.truth("use_cpu") else None),
    "lora_r": TrlOption("model.lora.rank", _adapter("lora_r", _whole("lora_r"))),
    "use_peft": TrlOption("model.lora.rank", None, "an adapter is trained where [model.lora] is there"),
    "lora_alpha": TrlOption("model.lora.alpha", _adapter("lora_alpha", _number("lora_alpha"))),
    "lora_target_modules": TrlOption(
        "model.lora.targets", _adapter("lora_target_modules", _targets), "unset: all linear layers but the head"
    ),
    "use_rslora": TrlOption("model.lora.rslora", _adapter("use_rslora", _truth("use_rslora"))),
    "use_dora": TrlOption("model.lora.dora", _adapter("use_dora", _truth("use_dora"))),
    "load_in_4bit": TrlOption("model.quantise", _quantise, "nf4"),
    "load_in_8bit": TrlOption("model.quantise"),
    "bnb_4bit_quant_type": TrlOption("model.quantise"),
    "trust_remote_code": TrlOption("model.trust_remote_code", _truth("trust_remote_code")),
    "chat_template_kwargs": TrlOption("model.template_options", lambda c: table_of(c.value("chat_template_kwargs")) or None),
    "dataset_name": TrlOption(
        "task.path", _text("dataset_name"), "a local JSONL or Parquet file; save a hub data set as one first"
    ),
    "reward_funcs": TrlOption("rewards", None, "functions take the same arguments as TRL's"),
    "reward_weights": TrlOption("rewards.NAME.weight"),
    "reward_model_name_or_path": TrlOption("rewards", None, "a reward of type model; it comes first in reward_weights"),
    "report_to": TrlOption("sinks", None, "tensorboard, wandb and trackio; the run's database has everything in any case"),
    "project": TrlOption("sinks.project"),
    "use_vllm": TrlOption("scale.engine", _engine, "left native, which samples with the learner's own weights"),
    "vllm_tensor_parallel_size": TrlOption("scale.vllm_tensor", _vllm_tensor, 'with scale.engine = "vllm"'),
    "full_determinism": TrlOption("deterministic", _truth("full_determinism"), "seeds are kept to in any case"),
    "max_steps": TrlOption("grpo.steps", _steps, "TRL counts optimiser updates; a step here samples once and may update often"),
    "num_train_epochs": TrlOption("grpo.steps", None, "the length of a run is given in steps, not epochs"),
    "per_device_train_batch_size": TrlOption(
        "grpo.prompts_per_step",
        lambda config: config.prompts,
        "TRL counts completions: device batch × processes × steps_per_generation / num_generations prompts",
    ),
    "generation_batch_size": TrlOption("grpo.prompts_per_step", None, "completions in TRL, prompts here"),
    "steps_per_generation": TrlOption("grpo.minibatches", lambda config: config.minibatches, "÷ gradient_accumulation_steps"),
    "gradient_accumulation_steps": TrlOption(
        "grpo.minibatches", None, "memory is set by tokens_per_pack, apart from the batch"
    ),
    "num_generations": TrlOption("grpo.group_size", _whole("num_generations")),
    "num_iterations": TrlOption("grpo.updates_per_step", _whole("num_iterations")),
    "loss_type": TrlOption("grpo.objective", _objective, "with importance_sampling_level"),
    "importance_sampling_level": TrlOption("grpo.objective", None, "`sequence` with loss_type grpo is gspo"),
    "epsilon": TrlOption("grpo.clip.low", _clip_low),
    "epsilon_high": TrlOption("grpo.clip.high", _clip_high, "TRL's cispo takes the bound itself, here it is 1 + high"),
    "delta": TrlOption("grpo.clip.dual", _clip_dual),
    "beta": TrlOption("grpo.kl.beta", _number("beta")),
    "use_bias_correction_kl": TrlOption("grpo.kl.ratio_weighted", _ratio_weighted, "on by default in TRL; read when beta > 0"),
    "sync_ref_model": TrlOption("grpo.kl.refresh_every", _refresh, "the reference becomes the policy; TRL mixes the two"),
    "ref_model_sync_steps": TrlOption("grpo.kl.refresh_every"),
    "scale_rewards": TrlOption("grpo.advantage.scale", _scale),
    "mask_truncated_completions": TrlOption("grpo.mask_cut", _truth("mask_truncated_completions")),
    "entropy_coef": TrlOption("grpo.entropy_bonus", _number("entropy_coef")),
    "vllm_importance_sampling_clip_max": TrlOption("grpo.importance_cap", _importance_cap, "mode token_truncate only"),
    "vllm_importance_sampling_cap": TrlOption("grpo.importance_cap", None, "the old name of …_clip_max"),
    "eval_steps": TrlOption("grpo.eval_every", _eval_every, "in steps; read when eval_strategy is steps"),
    "eval_strategy": TrlOption("grpo.eval_every"),
    "save_steps": TrlOption("grpo.save_every", _save_every, "in steps, not updates"),
    "save_strategy": TrlOption("grpo.save_every"),
    "gradient_checkpointing": TrlOption("grpo.checkpointing", _checkpointing, "unset: as memory asks for"),
    "save_total_limit": TrlOption("grpo.keep_checkpoints", _whole("save_total_limit")),
    "max_completion_length": TrlOption("grpo.sampling.max_new_tokens", _whole("max_completion_length")),
    "temperature": TrlOption("grpo.sampling.temperature", _number("temperature")),
    "top_p": TrlOption("grpo.sampling.top_p", _number("top_p")),
    "top_k": TrlOption("grpo.sampling.top_k", lambda c: None if c.value("top_k") is None else max(0, c.whole("top_k"))),
    "min_p": TrlOption("grpo.sampling.min_p", _number("min_p")),
    "learning_rate": TrlOption("grpo.optimiser.learning_rate", _number("learning_rate")),
    "lr_scheduler_type": TrlOption("grpo.optimiser.schedule", _schedule),
    "lr_scheduler_kwargs": TrlOption("grpo.optimiser.final_share", _final_share, "min_lr_rate, or min_lr / learning_rate"),
    "warmup_steps": TrlOption(
        "grpo.optimiser.warmup_steps", _warmup("warmup_steps"), "in updates, as in TRL; below 1: a share"
    ),
    "warmup_ratio": TrlOption("grpo.optimiser.warmup_steps", _warmup("warmup_ratio"), "a share of max_steps"),
    "adam_beta1": TrlOption("grpo.optimiser.betas", _betas),
    "adam_beta2": TrlOption("grpo.optimiser.betas"),
    "optim": TrlOption("grpo.optimiser.moments", _moments, "AdamW; int8 for its kinds of 8 bits"),
    "adam_epsilon": TrlOption("grpo.optimiser.eps", _number("adam_epsilon")),
    "weight_decay": TrlOption("grpo.optimiser.weight_decay", _number("weight_decay")),
    "max_grad_norm": TrlOption("grpo.optimiser.max_grad_norm", _number("max_grad_norm")),
    "num_generations_eval": TrlOption(
        "evaluation.samples",
        _whole("num_generations_eval"),
        "held-out problems are answered greedily unless evaluation.temperature is set",
    ),
}
"""TRL option → recipe key, in the order in which a recipe is written."""

TRL_OPTIONS |= {
    **_none("give the run's folder on the command line: oncurve train RECIPE --out DIR", "output_dir"),
    **_none("resume on the command line: oncurve train RECIPE --resume", "resume_from_checkpoint"),
    **_none(
        "everything is always kept in the run's database and can be looked at there",
        *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter", "log_level"),
        *("log_level_replica", "disable_tqdm", "trackio_space_id", "trackio_bucket_id", "log_completions"),
        *("trackio_static_space_id", "include_num_input_tokens_seen", "log_multimodal", "num_completions_to_print"),
        *("log_unique_prompts", "log_completions_hub_repo", "include_for_metrics", "skip_memory_metrics", "debug"),
    ),
    **_none(
        "the native engine samples with the learner's own weights: there is no second copy to place, sync or put to sleep",
        *("vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_server_base_url", "vllm_server_host"),
        *("vllm_server_port", "vllm_server_timeout", "vllm_group_port", "vllm_max_model_length"),
        *("ds3_gather_for_generation", "cache_implementation", "use_cache", "pad_to_multiple_of"),
        *("use_transformers_continuous_batching", "transformers_continuous_batching_config", "use_transformers_paged"),
    ),
    **_none("engine.pool_share is the most of the free memory, of vLLM's too", "vllm_gpu_memory_utilization"),
    **_none("sampling is not constrained to a pattern", "vllm_structured_outputs_regex"),
    **_none(
        "sampler and learner share their weights, so the mismatch is rounding; only token_truncate has a counterpart",
        *("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min"),
    ),
    **_none("generation options are keys of grpo.sampling; set those you need by hand", "generation_kwargs"),
    **_none("a repetition penalty makes the sampler another policy than the learner's", "repetition_penalty"),
    **_none("the reference is replaced, not mixed: the same only at 1.0", "ref_model_mixup_alpha"),
    **_none("every token counts: there is no entropy quantile", "top_entropy_quantile"),
    **_none(
        "the entropy bonus has a fixed weight",
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    ),
    **_none("sequences are never masked by their KL", "off_policy_mask_threshold"),
    **_none("rewards are summed by weight, then normalised: TRL's sum_then_normalize", "multi_objective_aggregation"),
    **_none("sapo has the temperatures of its paper, 1.0 and 1.05", "sapo_temperature_neg", "sapo_temperature_pos"),
    **_none("there is no vespo objective", "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    **_none(
        "tools are a task's environment (task.environment), which says itself when it ends",
        "max_tool_calling_iterations",
    ),
    **_none("a mixture-of-experts model's balancing loss is not added", "router_aux_loss_coef"),
    **_none("dropout is always off, so that sampler and learner are one policy", "disable_dropout", "lora_dropout"),
    **_none("log-probs are always computed in float32", "cast_lm_head_to_fp32", "tf32", "bf16_full_eval", "fp16_full_eval"),
    **_none("model loading takes no extra arguments", "model_init_kwargs", "model_revision", "attn_implementation"),
    **_none(
        "an adapter takes whole linear layers, and trains nothing beside them",
        *("lora_target_parameters", "lora_task_type", "lora_modules_to_save"),
    ),
    **_none("four bits are nf4, quantised twice, as QLoRA has them", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    **_none("the optimiser is AdamW", "optim_args", "optim_target_modules"),
    **_none(
        "memory is set by tokens_per_pack, and the log-prob head is chunked anyway",
        *("gradient_checkpointing_kwargs", "auto_find_batch_size", "torch_empty_cache_steps"),
        *("use_liger_kernel", "liger_kernel_config", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
    ),
    **_none(
        "the loss is divided by the step's own totals, however it is split",
        *("average_tokens_across_devices", "label_smoothing_factor", "neftune_noise_alpha"),
    ),
    **_none(
        "processes are scale.ranks (oncurve train --gpus N), and what they share out is scale.shard; give from-trl TRL's "
        "number of them, as its batch sizes are per device",
        *("local_rank", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
        *("ddp_backend", "fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config"),
    ),
    **_none("scale.timeout_s is the longest that a rank waits", "ddp_timeout"),
    **_none(
        "grpo.keep_best names the metric whose best checkpoint is kept",
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    ),
    **_none(
        "every run is repeatable, and prompts are drawn by (seed, step) in shuffled epochs",
        *("data_seed", "shuffle_dataset", "ignore_data_skip", "train_sampling_strategy"),
        *("length_column_name", "restore_callback_states_from_checkpoint"),
    ),
    **_none(
        "data is read by the task, whose columns all reach the rewards",
        *("remove_unused_columns", "label_names", "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("dataloader_in_order", "dataset_config", "dataset_train_split", "dataset_test_split", "dataset_streaming"),
        *("datasets", "streaming", "test_split_size", "ignore_bias_buffers"),
    ),
    **_none(
        "held-out problems are measured at every stage's end and every grpo.eval_every steps",
        *("do_train", "do_eval", "do_predict", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        "batch_eval_metrics",
    ),
    **_none(
        "checkpoints are whole, so that a resumed run ends in the same bits",
        *("save_only_model", "save_on_each_node", "enable_jit_checkpoint"),
    ),
    **_none(
        "nothing is uploaded; oncurve export writes a folder in Hugging Face format",
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
    ),
    **_none("set environment variables where you start the run", "env"),
}
