"""The input of a plan: model, device, algorithm, the size of a step, and the memory-saving settings."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from oncurve.errors import RecipeError, did_you_mean
from oncurve.plan.hardware import Gpu
from oncurve.plan.model_shape import ModelShape
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.sections import Engine, KVDtype
from oncurve.recipe.schema.stages import Distil, Trpo

Sharding = Literal["none", "optimiser", "full"]
Moments = Literal["float32", "int8"]
Checkpointing = Literal["auto", "on", "off"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What an algorithm holds in memory and does in a step."""

    samples: bool = True
    critic: bool = False
    sequences: int = 0
    """Sequences per prompt if nothing is sampled: a demonstration, or a chosen and a rejected answer."""
    always_reference: bool = False
    curvature: bool = False
    """Solves for a natural gradient instead of using Adam."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(),
    "distil": Algorithm(),
    "rloo": Algorithm(),
    "reinforce": Algorithm(),
    "ppo": Algorithm(critic=True),
    "trpo": Algorithm(curvature=True),
    "dpo": Algorithm(samples=False, sequences=2, always_reference=True),
    "sft": Algorithm(samples=False, sequences=1),
}


@dataclass(frozen=True, slots=True)
class Job:
    """What one plan is computed for. Lengths are limits; ``mean_tokens`` is the expected length of a completion.

    Field names are keys of `oncurve plan --json`, and with dashes the flags of the command.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: int
    algorithm: str
    prompts: int
    group_size: int
    prompt_tokens: int
    new_tokens: int
    mean_tokens: float
    tokens_per_pack: int
    updates: int
    minibatches: int
    beta: float
    dtype: str
    slots: int
    lora_rank: int | None = None
    checkpointing: Checkpointing = "off"
    """`auto`: on a GPU, for as many layers as necessary."""
    moments: Moments = "float32"
    optimiser_on_cpu: bool = False
    reference_on_cpu: bool = False
    mixes_reference: bool = False
    """The policy is mixed into the reference, which keeps float32 means next to its 16-bit weights."""
    sharding: Sharding = "none"
    gather: bool = True
    tensor: int = 1
    """GPUs of a tensor-parallel group."""
    pool_share: float = Engine().pool_share
    kv_dtype: KVDtype = "auto"
    quantise: str | None = None
    """The format of a frozen base model under an adapter."""
    reward_model: ModelShape | None = None
    teacher: ModelShape | None = None
    """The largest teacher that has weights of its own in this process."""
    teacher_on_cpu: bool = False
    reference_free: bool = False
    """An offline loss without a reference (SimPO)."""
    critic: ModelShape | None = None
    """The critic's shape if it differs from the policy's."""
    fisher_share: float = Trpo().fisher_share
    """Fraction of a step's groups on which a natural gradient measures curvature."""

    @property
    def does(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def precision(self) -> str:
        """The dtype of the weights: ``dtype``, except that a natural gradient is solved in float32."""
        return "float32" if self.does.curvature else self.dtype

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.precision]

    @property
    def sequences(self) -> int:
        """Sequences that share a prompt."""
        return self.does.sequences or self.group_size

    @property
    def rank_prompts(self) -> int:
        """Prompts of the GPU that has the most."""
        return math.ceil(self.prompts / self.gpus)

    @property
    def rows(self) -> int:
        """Completions of one GPU in a step."""
        return self.rank_prompts * self.sequences

    @property
    def samples(self) -> int:
        """Completions of a step, over all GPUs."""
        return self.prompts * self.sequences

    @property
    def trained(self) -> int:
        """Trained parameters of the policy."""
        return self.shape.parameters if self.lora_rank is None else self.shape.adapter_parameters(self.lora_rank)

    @property
    def adapters(self) -> int:
        """Parameters that LoRA adds."""
        return 0 if self.lora_rank is None else self.shape.adapter_parameters(self.lora_rank)

    @property
    def has_reference(self) -> bool:
        if not self.does.samples:
            return self.does.always_reference and not self.reference_free
        return self.beta > 0 and not self.does.curvature

    @property
    def holds_reference(self) -> bool:
        """Whether there is a second copy of the weights. With LoRA the reference is the model with the adapter disabled."""
        return self.has_reference and self.lora_rank is None

    @property
    def reference_bytes(self) -> int:
        """Bytes of the reference per parameter."""
        return self.dtype_bytes + (4 if self.mixes_reference and self.dtype_bytes < 4 else 0)

    @property
    def critic_shape(self) -> ModelShape | None:
        """The critic's embeddings and layers; it predicts values, so it has no LM head."""
        return replace(self.critic or self.shape, tied=True) if self.does.critic else None

    @property
    def step_tokens(self) -> float:
        """Tokens that one GPU's learner forwards in a pass over its part of the step, each prompt once."""
        return self.rank_prompts * self.prompt_tokens + self.rows * self.mean_tokens

    @property
    def packs(self) -> int:
        """Packs of the largest mini-batch, at maximum lengths."""
        return math.ceil((self._groups * self.prompt_tokens + self._completion_tokens) / self.pack_tokens)

    @property
    def _groups(self) -> int:
        """Groups of a mini-batch."""
        return math.ceil(self.rank_prompts / self.minibatches)

    @property
    def _completion_tokens(self) -> int:
        """Tokens of a mini-batch's completions, at maximum length."""
        return self._groups * self.sequences * self.new_tokens

    @property
    def pack_tokens(self) -> int:
        """Tokens of the fullest pack: ``tokens_per_pack``, or all tokens if fewer; a sequence is never split."""
        longest = self.prompt_tokens + self.new_tokens
        return max(min(self.tokens_per_pack, self._groups * self.prompt_tokens + self._completion_tokens), longest)

    @property
    def pack_predicted(self) -> int:
        """The maximum number of tokens that a pack predicts: nearly all if prompts are short."""
        return min(self.pack_tokens, self._completion_tokens)


RECIPE_KEYS = {
    "gpus": "scale.ranks",
    "sharding": "scale.shard",
    "dtype": "model.dtype",
    "lora_rank": "model.lora.rank",
    "quantise": "model.quantise",
    "slots": "engine.slots",
    "prompts": "STAGE.prompts_per_step",
    "group_size": "STAGE.group_size",
    "new_tokens": "STAGE.sampling.max_new_tokens",
    "tokens_per_pack": "STAGE.tokens_per_pack",
    "updates": "STAGE.updates_per_step",
    "minibatches": "STAGE.minibatches",
    "beta": "STAGE.kl.beta",
    "checkpointing": "STAGE.checkpointing",
    "moments": "STAGE.optimiser.moments",
    "optimiser_on_cpu": "STAGE.optimiser.on_cpu",
    "reference_on_cpu": "STAGE.kl.on_cpu",
    "teacher_on_cpu": "STAGE.teacher.on_cpu",
}
"""The recipe key that each setting of a job stands for, ``STAGE`` being the stage's name.

A flag of `oncurve plan`, a proposed fix and `--set` all mean the same key; allowed values are those of the recipe's schema.
"""


def recipe_setting(name: str, value: object) -> str:
    """A job's setting as `--set` takes it: ``STAGE.kl.on_cpu=true``."""
    return f"{RECIPE_KEYS[name]}={str(value).lower() if isinstance(value, bool) else value}"


def allowed_values(name: str) -> tuple[str, ...]:
    """The values that the recipe's schema allows for a setting; empty if it is not a choice."""
    section: Any = Recipe
    *path, key = RECIPE_KEYS[name].split(".")
    for part in path:
        section = Distil if part == "STAGE" else _without_none(section.model_fields[part].annotation)
    annotation = _without_none(section.model_fields[key].annotation)
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _without_none(annotation: Any) -> Any:
    """The type T of ``T | None``; another type unchanged."""
    if get_origin(annotation) not in (Union, UnionType):
        return annotation
    return next(a for a in get_args(annotation) if a is not NoneType)


def check_algorithm(name: str) -> None:
    if name not in ALGORITHMS:
        raise RecipeError(
            "--algorithm",
            f"{name}{did_you_mean(name, ALGORITHMS)}",
            because=f"the planner supports {', '.join(ALGORITHMS)}",
            fix="choose one of them",
        )
