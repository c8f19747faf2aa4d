"""Loading a model: the built-in tiny one, a folder in Hugging Face format, or a hub id."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from oncurve.errors import ModelError
from oncurve.models.policy import Policy
from oncurve.models.tiny import make_model, make_tokenizer
from oncurve.recipe.sections import Model


def load_policy(config: Model, *, alphabet: str | None, seed: int) -> Policy:
    """The model a recipe names, on its device and in its precision.

    ``alphabet`` is what the tiny model's tokenizer must know (None: printable ASCII); ``seed`` decides its first weights.
    """
    if config.source == "tiny":
        tokenizer = make_tokenizer(alphabet or "".join(map(chr, range(32, 127))) + "\n")
        model = make_model(config.tiny, tokenizer, seed)
    else:
        model, tokenizer = _from_folder_or_hub(config)
    model.to(device=choose_device(config.device), dtype=getattr(torch, config.dtype))
    return Policy(model, tokenizer, system_prompt=config.system_prompt, template_options=config.template_options)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device", "cuda", because="this machine shows no CUDA GPU", fix="use device = 'auto' or 'cpu'")
    return torch.device(name)


def _from_folder_or_hub(config: Model):  # type: ignore[no-untyped-def]
    folder = Path(config.source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:6]) or "nothing"
        raise ModelError(
            config.source,
            f"a folder without config.json (it holds {found})",
            because="that file says what the model is",
            fix="name a folder in Hugging Face format, such as RUN/model, or a run",
        )
    if not folder.exists() and (config.source.startswith((".", "/", "~")) or config.source.count("/") > 1):
        raise ModelError(
            config.source, "no such folder", because="it looks like a path", fix="check the path; a hub id is OWNER/NAME"
        )
    trust = config.trust_remote_code
    try:
        settings = AutoConfig.from_pretrained(config.source, trust_remote_code=trust)
        if not trust and getattr(settings, "auto_map", None):
            raise ModelError(
                config.source, "a model that brings its own code", because="code from a model folder runs with your rights",
                fix="set model.trust_remote_code = true if you trust it",
            )  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(config.source, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(config.source, dtype=getattr(torch, config.dtype), trust_remote_code=trust)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            config.source,
            "can't be loaded as a causal language model",
            because=str(error).strip().splitlines()[0],
            fix="name a folder in Hugging Face format, or a hub id that is cached or can be reached",
        ) from error
    return model, tokenizer
