"""TODO"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from oncurve.recipe.schema.base import Section, conflict


class TinyModel(Section):
    """The built-in model: a small Qwen3 decoder with random weights and a tokenizer made from the task's own characters."""

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
    """Width of the gated MLP: 3 × `width` is usual for small models."""
    context: PositiveInt = 512
    """Positions the model can address."""

    @model_validator(mode="after")
    def _heads_divide(self) -> TinyModel:
        if self.heads % self.kv_heads:
            because = f"every key and value head serves the same number of query heads, and heads is {self.heads}"
            raise conflict("kv_heads", self.kv_heads, because=because, fix=f"use a divisor of {self.heads}")
        return self


class Lora(Section):
    """A LoRA adapter (Hu et al. 2021): beside each target W a trained s·B·A of small rank, everything else left alone."""

    rank: PositiveInt = 16
    """r: the rank of the trained matrices. RL needs little: 8 to 32 comes close to full fine-tuning."""
    alpha: PositiveFloat = 32.0
    """α: the adapter counts with weight s = α/r."""
    targets: Annotated[tuple[str, ...], Field(min_length=1)] = ("all-linear",)
    """Which linear layers, by the ends of their names (`q_proj`, `v_proj` …); `all-linear` takes all but the head."""
    rslora: bool = False
    """s = α/√r in place of α/r (Kalajdzievski 2023): higher ranks do not learn more slowly."""
    dora: bool = False
    """Train each column's length apart from its direction (DoRA, Liu et al. 2024); slower."""


class Model(Section):
    """Which model is trained, and in what precision."""

    source: str = "tiny"
    """`tiny` for the built-in model, a folder in Hugging Face format, a hub id, a `.gguf` file, or the folder of a LoRA
    adapter. `oncurve models` lists what is on this machine."""
    lora: Lora | None = None
    """Train a LoRA adapter in place of all weights. The reference of a KL term is then the same model with the adapter off."""
    adapter: str | None = None
    """Folder of a saved LoRA adapter, put on top of `source`: trained further where `lora` is set (its rank and targets are
    then the folder's own), else merged into the weights."""
    quantise: Literal["nf4", "int8"] | None = None
    """QLoRA: hold the frozen base in 4 or 8 bits (bitsandbytes); needs `lora`."""
    tiny: TinyModel = TinyModel()
    """The shape of the built-in model; read only when `source` is `tiny`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the weights that sampler and learner share. With bfloat16 the optimiser keeps float32 master weights."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a GPU where there is one."""
    compiled: bool = True
    """On a CPU, sample and learn by functions compiled for the processor, where the machine has a C compiler and the model is a
    Llama, Mistral or Qwen in float32. Sampling with top-k, top-p or min-p is torch's all the same. What was found is frozen
    into the run."""
    compile_blocks: bool = False
    """Learn through norms and gated units compiled by torch, in families that have no kernels of ours (Gemma, Phi, OLMo …). The
    first update waits for the compiler, up to a minute."""
    system_prompt: str | None = None
    """Put before every prompt of a task as a system message (chat models only)."""
    template_options: dict[str, Any] = Field(default={})
    """Extra variables for the chat template, such as `enable_thinking = false`."""
    trust_remote_code: bool = False
    """Run Python code that lies in the model's folder. Off: such a model is refused."""

    def at(self, source: str) -> Model:
        """The same settings for a whole model that lies there: with no adapter on top, and not quantised."""
        return self.model_copy(update={"source": source, "lora": None, "adapter": None, "quantise": None})
