"""The section `[model]`: the model that is trained, its adapter, and the shape of the built-in model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.recipe.schema.base import Section, conflict


class TinyModel(Section):
    """The built-in model: a small Qwen3 decoder with random weights, and a tokenizer built from the task's characters."""

    layers: PositiveInt = 4
    """Decoder layers."""
    width: PositiveInt = 128
    """Hidden size."""
    heads: PositiveInt = 4
    """Query heads."""
    kv_heads: PositiveInt = 2
    """Key and value heads; must divide `heads`."""
    head_size: PositiveInt = 32
    """Size of one head."""
    mlp_width: PositiveInt = 384
    """Width of the gated MLP; 3 × `width` is usual for small models."""
    context: PositiveInt = 512
    """Maximum number of positions."""
    chat: bool = False
    """Give the tokenizer a chat template, for tasks with messages or tools: a line `role: content` for each message that the
    model did not write. The tags of tool calls are then one token each."""

    @model_validator(mode="after")
    def _check_heads(self) -> TinyModel:
        if self.heads % self.kv_heads:
            because = f"every KV head serves the same number of query heads, and heads is {self.heads}"
            raise conflict("kv_heads", self.kv_heads, because=because, fix=f"use a divisor of {self.heads}")
        return self


class Lora(Section):
    """A LoRA adapter (Hu et al. 2021): each target W gets a trained low-rank term s·B·A, and all other weights are frozen."""

    rank: PositiveInt = 16
    """r: the rank of the trained matrices. RL needs little: 8 to 32 comes close to full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """α: the adapter is scaled by s = α/r."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Linear layers that get an adapter, by the ends of their names (`q_proj`, `v_proj` …). `all-linear`: all of them except
    the LM head."""
    rslora: bool = False
    """Scale by s = α/√r instead of α/r (Kalajdzievski 2023), so that higher ranks do not learn more slowly."""
    dora: bool = False
    """Train the magnitude of each column separately from its direction (DoRA, Liu et al. 2024); slower."""


class Model(Section):
    """The model that is trained, and its precision."""

    source: str = "tiny"
    """`tiny` for the built-in model, a folder in Hugging Face format, a hub id, a `.gguf` file, or the folder of a LoRA
    adapter. `oncurve models` lists the models on this machine."""
    lora: Lora | None = None
    """Train a LoRA adapter instead of all weights. The reference of a KL term is then the same model with the adapter off."""
    adapter: str | None = None
    """Folder of a saved LoRA adapter for `source`. If `lora` is set, the adapter is trained further, with the rank and targets
    of the folder; otherwise it is merged into the weights."""
    quantise: Literal["nf4", "int8"] | None = None
    """QLoRA: hold the linear layers of the frozen base model in 4 or 8 bits (bitsandbytes); needs `lora`. A mixture of experts
    is refused, because its experts are not linear layers and would stay in 16 bits."""
    tiny: TinyModel = TinyModel()
    """The shape of the built-in model; used only if `source` is `tiny`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of the weights, which sampler and learner share. In 16 bits the optimiser keeps float32 master weights.
    `float16` is for GPUs without bfloat16 (before Ampere): the loss is scaled, and an update whose gradient overflows is
    skipped; it has been tested on CPUs only."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` uses a GPU if there is one."""
    compiled: bool = True
    """On a CPU, sample and learn with C functions compiled for this processor, if the machine has a C compiler and the model is
    a Llama, Mistral or Qwen in float32. Sampling with top-k, top-p or min-p uses torch in any case. A new run records whether
    they are used."""
    compile_blocks: bool = False
    """Run norms and gated MLPs through torch.compile when learning, for model families without fused kernels (Gemma, Phi, OLMo
    …). The first update waits up to a minute for the compiler."""
    system_prompt: str | None = None
    """System message put before every prompt of a task (chat models only)."""
    template_options: dict[str, Any] = Field(default={})
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. If false, a model that needs it is refused."""

    def at(self, source: str) -> Model:
        """The same settings for a complete model at another source: no adapter, not quantised."""
        return self.model_copy(update={"source": source, "lora": None, "adapter": None, "quantise": None})
