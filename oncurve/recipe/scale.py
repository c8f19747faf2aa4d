"""The section `[scale]`: over how many processes a run is spread, and who does what in them. Everything else stays as it is."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt, model_validator

from oncurve.recipe.sections import Count, Section, impossible


class Scale(Section):
    """Past one GPU: learner processes, what they share out, and, on a Ray cluster, samplers and reward workers apart from
    them. The gradient of a step is that of one process within 1e-5, whatever stands here."""

    ranks: PositiveInt = 1
    """Learner processes, one for each GPU (or, on a CPU, each with its share of the threads). Every rank samples its share of a
    step's prompts with its own weights. `oncurve train --gpus N` sets it."""
    shard: Literal["none", "optimiser", "full"] = "none"
    """What the ranks share out in place of each holding all of it. `optimiser`: master weights and moments, with whole weights
    and gradients on each rank and all fast paths kept. `full`: weights and gradients too, by FSDP2; the model goes through its
    own modules, and weights are gathered for sampling. With one rank there is nothing to share out."""
    tensor: PositiveInt = 1
    """With `shard = "full"`: ranks that split each layer between them (tensor parallel, by the plan that transformers has for
    the model), and learn from the same groups. Must divide `ranks`, and the model's heads, key heads and widths."""
    offload: bool = False
    """With `shard = "full"`: keep shards of weights and moments in the CPU's memory, for GPUs without room; slower."""
    gather: bool = True
    """With `shard = "full"`: gather all weights once for sampling. Without it every token gathers them anew, a layer at a time:
    many times slower, and the only way where the weights alone are larger than a GPU."""
    engine: Literal["native", "vllm"] = "native"
    """What samples. `native`: with the learner's own weights, none of them copied. `vllm`: vLLM, in a process of its own, to
    which new weights are pushed after each step."""
    vllm_tensor: PositiveInt = 1
    """With `engine = "vllm"`: GPUs over which vLLM splits each layer, for models that one does not hold beside the learner. The
    learner's own is the first of them; with Ray, each sampler has so many."""
    samplers: Count = 0
    """With Ray: sampling processes apart from the learners; 0: the learners sample."""
    reward_workers: Count = 0
    """With Ray: processes that compute rewards, anywhere with CPUs; 0: those that sample do."""
    max_staleness: Count = 0
    """With `samplers`: how many updates the weights that wrote a completion may be older than those that learn from it. 0:
    synchronous, and exact."""
    timeout_s: PositiveFloat = 600.0
    """The longest that a collective or a remote call may take. Then the run stops and says which rank waited for whom."""

    @model_validator(mode="after")
    def _fits_together(self) -> Scale:
        if self.ranks % self.tensor:
            because = f"{self.tensor} ranks hold one copy of the model together, and ranks is {self.ranks}"
            raise impossible(
                "tensor",
                self.tensor,
                because=because,
                fix=f"use a divisor of {self.ranks}, or a multiple of {self.tensor} for ranks",
            )
        if self.tensor > 1 and self.shard != "full":
            because = f'layers are split where weights are shared out, and shard is "{self.shard}"'
            raise impossible("tensor", self.tensor, because=because, fix='use shard = "full", or leave it out')
        if self.offload and self.shard != "full":
            because = f'only shards of weights are kept there, and shard is "{self.shard}"'
            fix = 'use shard = "full", or optimiser.on_cpu in the stage'
            raise impossible("offload", "true", because=because, fix=fix)
        if not self.gather and (self.shard != "full" or self.engine == "vllm"):
            because = (
                "vLLM samples with whole weights"
                if self.engine == "vllm"
                else f'weights are whole where shard is "{self.shard}"'
            )
            raise impossible(
                "gather", "false", because=because, fix='use shard = "full" and engine = "native", or leave it out'
            )
        if self.vllm_tensor > 1 and self.engine != "vllm":
            because, fix = "the native engine samples with the learner's own weights", 'use engine = "vllm", or leave it out'
            raise impossible("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.vllm_tensor > 1 and self.ranks > 1 and not self.samplers:
            because = f"each of the {self.ranks} ranks has a vLLM of its own on its GPU, and the next GPU is the next rank's"
            fix = "use ranks = 1, or samplers apart from the learners (Ray)"
            raise impossible("vllm_tensor", self.vllm_tensor, because=because, fix=fix)
        if self.max_staleness and not self.samplers:
            because = "the learners sample themselves, with the weights that they have"
            raise impossible("max_staleness", self.max_staleness, because=because, fix="set samplers (Ray), or leave it out")
        return self

    @property
    def copies(self) -> int:
        """Whole copies of the model among the ranks: each samples its own share of the prompts."""
        return self.ranks // self.tensor
