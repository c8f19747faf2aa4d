"""What is asked of the planner: a model, a device, an algorithm, how much is sampled, and how memory is saved."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from oncurve.errors import RecipeError, did_you_mean
from oncurve.plan.hardware import Gpu
from oncurve.plan.model_shape import ModelShape
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Trpo

Sharding = Literal["none", "optimiser", "full"]
Moments = Literal["float32", "int8"]
Checkpointing = Literal["auto", "on", "off"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What an algorithm holds and does in a step."""

    samples: bool = True
    critic: bool = False
    sequences: int = 0
    """Sequences of a prompt where nothing is sampled: a worked example, or a chosen and a rejected answer."""
    always_reference: bool = False
    curvature: bool = False
    """Solves for a natural gradient in place of Adam."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(),
    "rloo": Algorithm(),
    "reinforce": Algorithm(),
    "ppo": Algorithm(critic=True),
    "trpo": Algorithm(curvature=True),
    "dpo": Algorithm(samples=False, sequences=2, always_reference=True),
    "sft": Algorithm(samples=False, sequences=1),
}


@dataclass(frozen=True, slots=True)
class Job:
    """One plan's question. Lengths are limits; ``mean_tokens`` is the expected length of a completion."""

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
    """`auto`: on a GPU, for as many layers as memory asks for."""
    moments: Moments = "float32"
    optimiser_on_cpu: bool = False
    reference_on_cpu: bool = False
    sharding: Sharding = "none"
    gather: bool = True
    tensor: int = 1
    """GPUs that split each layer between them."""
    pool_share: float = Engine().pool_share
    quantise: str | None = None
    """A frozen base in 4 or 8 bits, under an adapter."""
    reward_model: ModelShape | None = None
    reference_free: bool = False
    """An offline loss without a reference (SimPO)."""
    critic: ModelShape | None = None
    """The critic's shape where it differs from the policy's."""
    fisher_share: float = Trpo().fisher_share
    """Of a step's groups, for a natural gradient."""

    @property
    def does(self) -> Algorithm:
        return ALGORITHMS[self.algorithm]

    @property
    def precision(self) -> str:
        """The weights' type: as asked, but a natural gradient is solved in float32."""
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
        """Prompts of one GPU: the busiest one's share."""
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
        """Parameters of the policy that move."""
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
        """A second copy of the weights; LoRA needs none, its reference is the model with the adapter switched off."""
        return self.has_reference and self.lora_rank is None

    @property
    def critic_shape(self) -> ModelShape | None:
        """Embeddings and layers; it reads values, so it has no LM head of its own."""
        return replace(self.critic or self.shape, tied=True) if self.does.critic else None

    @property
    def step_tokens(self) -> float:
        """Tokens that one GPU's learner forwards for a pass over its step, each prompt once."""
        return self.rank_prompts * self.prompt_tokens + self.rows * self.mean_tokens

    @property
    def packs(self) -> int:
        """Packs of the largest mini-batch, at the longest lengths."""
        return math.ceil((self._groups * self.prompt_tokens + self._written) / self.pack_tokens)

    @property
    def _groups(self) -> int:
        """Groups of a mini-batch."""
        return math.ceil(self.rank_prompts / self.minibatches)

    @property
    def _written(self) -> int:
        """Tokens of a mini-batch's completions, at their longest."""
        return self._groups * self.sequences * self.new_tokens

    @property
    def pack_tokens(self) -> int:
        """Tokens of the fullest pack: the budget, or all there is; one sequence is never cut."""
        longest = self.prompt_tokens + self.new_tokens
        return max(min(self.tokens_per_pack, self._groups * self.prompt_tokens + self._written), longest)

    @property
    def pack_predicted(self) -> int:
        """Most tokens that a pack predicts: where prompts are short, nearly all."""
        return min(self.pack_tokens, self._written)


def find_algorithm(name: str) -> str:
    """An algorithm's name, checked."""
    if name not in ALGORITHMS:
        raise RecipeError(
            "--algorithm",
            f"{name}{did_you_mean(name, ALGORITHMS)}",
            because=f"the planner knows {', '.join(ALGORITHMS)}",
            fix="name one of them",
        )
    return name
