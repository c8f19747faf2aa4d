"""The table of TRL options (options.toml), and the conversions that do more than copy a value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from oncurve.objective_specs import CORRECTIONS, OBJECTIVE_SPECS, CorrectionName
from oncurve.recipe.trl.config import TRL_TABLE, NoCounterpart, TrlConfig, is_hub_dataset


@dataclass(frozen=True, slots=True)
class TrlOption:
    """``key`` is the recipe key, None if there is no counterpart. ``convert`` returns the key's value, None to leave the key
    out; without it the option only contributes to another option's value. ``remark`` says what differs."""

    key: str | None
    convert: Callable[[TrlConfig], Any] | None = None
    remark: str = ""


Conversion = Callable[[TrlConfig, str], Any]
"""(config, option) → the recipe's value, or None to leave the key out. Raises NoCounterpart with the reason."""


def _optional(read: Conversion) -> Conversion:
    """The value as read, None if the file does not set the option and TRL's default does not matter."""
    return lambda config, option: None if config.value(option) is None else read(config, option)


def _steps(config: TrlConfig, option: str) -> int:
    if config.integer("max_steps") <= 0:
        epochs = config.number("num_train_epochs")
        raise NoCounterpart(
            f"TRL runs {epochs:g} epochs here; steps = epochs × prompts in the data / grpo.prompts_per_step: set it by hand"
        )
    return config.in_steps("max_steps")


def _clip_low(config: TrlConfig, option: str) -> float | None:
    """TRL's cispo has no lower bound, which is low = 1 here."""
    spec = OBJECTIVE_SPECS[config.objective]
    if spec.clip is None:
        return None
    if spec.surrogate == "cispo":
        return None if _clip_high(config, "epsilon_high") is None else 1.0
    return config.number("epsilon")


def _clip_high(config: TrlConfig, option: str) -> float | None:
    """TRL's cispo takes epsilon_high as the bound on the ratio itself; for other losses it is the part above 1."""
    spec = OBJECTIVE_SPECS[config.objective]
    high = config.number("epsilon" if config.value("epsilon_high") is None else "epsilon_high")
    if spec.clip is None:
        return None
    if spec.surrogate == "cispo":
        return round(high - 1, 12) if high > 1 else None
    return high


def _clip_dual(config: TrlConfig, option: str) -> float | None:
    if config.value("delta") is None:
        return None
    if OBJECTIVE_SPECS[config.objective].surrogate != "clipped":
        raise NoCounterpart(f"{config.objective} has no two-sided clip, in TRL neither")
    return config.number("delta")


def _advantage_scale(config: TrlConfig, option: str) -> str | None:
    if config.value("multi_objective_aggregation") == "normalize_then_sum":
        return "per_reward"
    value = str(config.value("scale_rewards"))
    scale = {"True": "group", "False": "none", "true": "group", "false": "none"}.get(value, value)
    is_default = scale == OBJECTIVE_SPECS[config.objective].scale
    return None if is_default and "scale_rewards" not in config.options else scale


def _ratio_weighted(config: TrlConfig, option: str) -> bool | None:
    return config.boolean("use_bias_correction_kl") if config.number("beta") > 0 else None


def _refresh_every(config: TrlConfig, option: str) -> int | None:
    if not config.boolean("sync_ref_model"):
        return None
    if config.number("beta") == 0:
        raise NoCounterpart("with beta = 0 there is no reference to refresh")
    return config.in_steps("ref_model_sync_steps")


def _refresh_mix(config: TrlConfig, option: str) -> float | None:
    return config.number(option) if config.boolean("sync_ref_model") and config.number("beta") > 0 else None


def _adaptive_entropy(config: TrlConfig, option: str) -> float | None:
    if not config.boolean("use_adaptive_entropy"):
        return None
    return None if config.value(option) is None else config.number(option)


def _schedule(config: TrlConfig, option: str) -> str:
    name = str(config.value("lr_scheduler_type"))
    variants = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine", "cosine_warmup_with_min_lr": "cosine"}
    if name not in ("linear", "cosine", "constant", *variants):
        raise NoCounterpart("the schedules are constant, linear and cosine; set grpo.optimiser.schedule by hand")
    return variants.get(name, name)


def _final_share(config: TrlConfig, option: str) -> float | None:
    extra = parse_table(config.value("lr_scheduler_kwargs"))
    if "min_lr_rate" in extra:
        return float(extra["min_lr_rate"])
    return float(extra["min_lr"]) / config.number("learning_rate") if "min_lr" in extra else None


def _warmup(config: TrlConfig, option: str) -> int | None:
    if config.value(option) is None or config.value("lr_scheduler_type") == "constant":
        return None  # transformers' plain constant schedule ignores the warm-up
    has_steps = config.value("warmup_steps") is not None and config.number("warmup_steps") > 0
    if config.value("warmup_ratio") is not None and has_steps is (option == "warmup_ratio"):
        return None  # steps above 0 override a ratio
    return math.ceil(config.in_updates(option))


def _betas(config: TrlConfig, option: str) -> list[float] | None:
    if config.value("adam_beta1") is None and config.value("adam_beta2") is None:
        return None
    return [
        0.9 if config.value("adam_beta1") is None else config.number("adam_beta1"),
        0.999 if config.value("adam_beta2") is None else config.number("adam_beta2"),
    ]


def _dtype(config: TrlConfig, option: str) -> str:
    if config.value("dtype") in ("float32", "bfloat16", "float16"):
        return str(config.value("dtype"))
    if config.boolean("fp16"):
        return "float16"
    return "bfloat16" if config.value("bf16") is None or config.boolean("bf16") else "float32"


def _save_every(config: TrlConfig, option: str) -> int:
    strategy = config.strategy("save_strategy")
    if strategy not in ("steps", "no"):
        raise NoCounterpart(
            f"save_strategy is {strategy}, and a recipe saves every grpo.save_every steps: set it by hand; until then the only "
            "checkpoint is that of the last step" + (", and grpo.keep_best keeps the best" if strategy == "best" else "")
        )
    return config.in_steps("save_steps") if strategy == "steps" else 0


def _eval_every(config: TrlConfig, option: str) -> int | None:
    strategy = config.strategy("eval_strategy")
    if strategy not in ("steps", "no"):
        raise NoCounterpart(
            f"eval_strategy is {strategy}, and a recipe evaluates every grpo.eval_every steps: set it by hand; until then it "
            "evaluates once, at the end"
        )
    if strategy == "no":
        return None
    return config.in_steps("logging_steps" if config.value("eval_steps") is None else "eval_steps")


def _heldout_share(config: TrlConfig, option: str) -> float | None:
    """Without evaluation TRL trains on all rows."""
    return 0.0 if config.strategy("eval_strategy") == "no" else None


def _importance_cap(config: TrlConfig, option: str) -> float | None:
    old, new = config.value("vllm_importance_sampling_cap"), config.value("vllm_importance_sampling_clip_max")
    is_on = config.boolean("use_vllm") and config.boolean("vllm_importance_sampling_correction")
    if not is_on or (old is None and new is None):
        return None
    mode = str(config.value("vllm_importance_sampling_mode"))
    if mode in IMPORTANCE_MODES:
        name = IMPORTANCE_MODES[mode]
        raise NoCounterpart(
            f"not set, because Oncurve samples with the learner's own weights; for another sampler, {mode} corresponds to "
            f'grpo.correction = "{name}" (limit {CORRECTIONS[name].high:g}), and token_truncate to grpo.importance_cap'
        )
    if mode != "token_truncate":
        raise NoCounterpart("TRL has no such vllm_importance_sampling_mode, so it is not converted")
    return config.number("vllm_importance_sampling_clip_max" if old is None else "vllm_importance_sampling_cap")


IMPORTANCE_MODES: Mapping[str, CorrectionName] = {
    "token_mask": "mis",
    "sequence_truncate": "seq_tis",
    "sequence_mask": "seq_mis",
}
"""TRL's modes of importance sampling with a counterpart in `grpo.correction`."""


def _moments(config: TrlConfig, option: str) -> str | None:
    """AdamW variants for other kernels are the same optimiser; 8-bit variants set the precision of the moments."""
    name = str(config.value("optim") or "adamw_torch")
    if name in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"):
        return "int8"
    if "adamw" not in name or "bit" in name:
        raise NoCounterpart("the optimiser is AdamW, with moments in float32 or int8 (grpo.optimiser.moments)")
    return None


def _checkpointing(config: TrlConfig, option: str) -> str:
    return "on" if config.boolean("gradient_checkpointing") else "off"


def _lora_targets(config: TrlConfig, option: str) -> list[str]:
    targets = config.value("lora_target_modules")
    if targets is None:
        raise NoCounterpart("peft chooses by model family, often q_proj and v_proj; here all linear layers are trained")
    return [str(name) for name in ([targets] if isinstance(targets, str) else targets)]


def _quantise(config: TrlConfig, option: str) -> str | None:
    if not config.boolean("load_in_8bit") and not config.boolean("load_in_4bit"):
        return None
    if not config.boolean("use_peft"):
        raise NoCounterpart("quantised weights cannot be trained: set use_peft, which TRL requires too")
    if config.boolean("load_in_8bit"):
        return "int8"
    if config.value("bnb_4bit_quant_type") == "fp4":
        raise NoCounterpart("4-bit weights are nf4 in Oncurve, so the recipe does not quantise the model")
    return "nf4"


def _engine(config: TrlConfig, option: str) -> None:
    if config.boolean("use_vllm"):
        raise NoCounterpart(
            'the native engine samples with the learner\'s own weights, without a copy; to keep vLLM, set scale.engine = "vllm"'
        )


def _vllm_tensor(config: TrlConfig, option: str) -> None:
    if config.boolean("use_vllm") and config.value("vllm_tensor_parallel_size") is not None:
        raise NoCounterpart('read with vLLM only: if you set scale.engine = "vllm", set scale.vllm_tensor to it')


def _data_file(config: TrlConfig, option: str) -> str | None:
    """A file as it is. A data set of the hub (OWNER/NAME) has several: the note says to name one."""
    name = None if config.value(option) is None else str(config.value(option))
    return f"hf://datasets/{name}/FILE" if name is not None and is_hub_dataset(name) else name


def parse_table(value: Any) -> dict[str, Any]:
    """A dict, which TRL's command line also takes as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError:
            return {}
    return dict(value) if isinstance(value, dict) else {}


CONVERSIONS: Mapping[str, Conversion] = {
    "text": _optional(lambda config, option: str(config.value(option))),
    "number": _optional(TrlConfig.number),
    "integer": _optional(TrlConfig.integer),
    "boolean": _optional(TrlConfig.boolean),
    "adaptive_entropy": _adaptive_entropy,
    "advantage_scale": _advantage_scale,
    "betas": _betas,
    "checkpointing": _optional(_checkpointing),
    "clip_dual": _clip_dual,
    "clip_high": _clip_high,
    "clip_low": _clip_low,
    "data_file": _data_file,
    "device": lambda config, option: "cpu" if config.boolean(option) else None,
    "dtype": _dtype,
    "engine": _engine,
    "eval_every": _eval_every,
    "final_share": _final_share,
    "heldout_share": _heldout_share,
    "importance_cap": _importance_cap,
    "lora_targets": _lora_targets,
    "minibatches": lambda config, option: config.minibatches,
    "moments": _moments,
    "objective": lambda config, option: config.objective,
    "prompts_per_step": lambda config, option: config.prompts,
    "quantise": _quantise,
    "ratio_weighted": _ratio_weighted,
    "refresh_every": _refresh_every,
    "refresh_mix": _refresh_mix,
    "save_every": _save_every,
    "schedule": _schedule,
    "steps": _steps,
    "template_options": lambda config, option: parse_table(config.value(option)) or None,
    "top_k": _optional(lambda config, option: max(0, config.integer(option))),
    "vllm_tensor": _vllm_tensor,
    "warmup": _warmup,
}
"""The kinds of options.toml."""


def _convert(config: TrlConfig, option: str, kind: str, needs: str | None) -> Any:
    if needs is None or config.boolean(needs):
        return CONVERSIONS[kind](config, option)
    if option in config.options:
        raise NoCounterpart(f"TRL reads it only if {needs} is true, and trains all weights here")
    return None


def _read_table() -> dict[str, TrlOption]:
    table = {
        name: TrlOption(
            row["key"],
            partial(_convert, option=name, kind=row["kind"], needs=row.get("needs")) if "kind" in row else None,
            row.get("remark", ""),
        )
        for name, row in TRL_TABLE["options"].items()
    }
    for group in TRL_TABLE["unsupported"]:
        table |= {name: TrlOption(None, None, group["reason"]) for name in group["options"]}
    return table


TRL_OPTIONS: Mapping[str, TrlOption] = _read_table()
"""Every TRL option, in the order in which a recipe is written."""

TRL_ARGUMENTS: Mapping[str, str] = TRL_TABLE["trainer"]
"""Arguments of GRPOTrainer that have another name in `oncurve.train`, and what to write."""

REMOVED = {"max_prompt_length": "TRL 1.16 does not have it, and prompts are never truncated here: leave out long ones"}
"""Options of older versions of TRL, and what to do instead."""


def explain_trl_key(name: str) -> str | None:
    """What to write in a recipe instead of a TRL option; None if TRL has no such option."""
    option = TRL_OPTIONS.get(name)
    if option is None:
        return REMOVED.get(name)
    if option.key is None:
        return f"remove it: {option.remark}"
    return f"TRL's {name} is {option.key} here{_in_brackets(option)}; `oncurve recipe from-trl` converts a complete config"


def explain_trl_argument(name: str) -> str | None:
    """What to write in `oncurve.train` instead of an argument of GRPOTrainer or an option; None if TRL has neither."""
    if name in TRL_ARGUMENTS:
        return TRL_ARGUMENTS[name]
    option = TRL_OPTIONS.get(name)
    if option is None:
        return REMOVED.get(name)
    if option.key is None:
        return f"leave it out: {option.remark}"
    return f"write {_as_argument(option.key)}{_in_brackets(option)}"


def _in_brackets(option: TrlOption) -> str:
    return f" ({option.remark})" if option.remark else ""


def _as_argument(key: str) -> str:
    """A recipe key as an argument of `oncurve.train`."""
    if key in ARGUMENTS:
        return ARGUMENTS[key]
    section, *rest = key.split(".")
    if section in ("grpo", "model") and len(rest) == 2:  # clip={'low': …}, lora={'rank': …}
        return f"{rest[0]}={{{rest[1]!r}: …}}"
    if section == "grpo" or key in ("model.dtype", "model.device"):
        return f"{rest[0]}=…"
    if section == "model":
        return f"model={{'source': …, {rest[0]!r}: …}}"
    if section == "evaluation":
        return f"evaluation={{{rest[0]!r}: …}}"
    return f"{key}=…" if not rest and key in ("name", "seed") else f"{key} in a recipe, and oncurve.train(load_recipe(FILE))"


ARGUMENTS = {
    "model.source": "model=…",
    "task.path": "prompts=…",
    "task.heldout_share": "heldout=… and eval_every=…",
    "rewards": "rewards=[…]",
    "rewards.NAME.weight": "rewards=[(function, weight), …]",
    "sinks": 'sinks=["wandb"]',
    "sinks.project": 'sinks=[{"type": "wandb", "project": …}]',
}
"""Recipe keys that are arguments of `oncurve.train` by another name."""
