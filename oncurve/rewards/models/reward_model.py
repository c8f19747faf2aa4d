"""The reward `model`: a reward model, any sequence-classification checkpoint with one or more heads; and `StepModel`, a process
reward model, which classifies tokens.

    r = Σ_h w_h · logit_h        over the heads; a model with one head has weight 1 by default

Completions are sorted by length and batched by a token budget, so that batches have little padding. The conversation is
formatted by the model's chat template if it has one, else prompt and completion are concatenated.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from oncurve.errors import ModelError
from oncurve.models.chat_template import apply_chat_template
from oncurve.recipe.schema.base import STAGE_PREFIX, Section
from oncurve.records import Group, Prompt
from oncurve.rewards.base import Result, Score

TRAINED = "reward_models"
"""The folder of a run with the reward models that its stages train."""


class RewardModelOptions(Section):
    """The output of a sequence-classification model, one head or several."""

    model: str
    """A folder or hub id of a sequence-classification model, or `stage:NAME` for the one that an earlier `reward_model` stage
    of this run trains."""
    heads: dict[str, float] = Field(default_factory=dict)
    """Weight of each head, by its label in the model's config or by its index; other heads have weight 0. May be unset for a
    model with one head, which then has weight 1."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1` …, or `auto`: a GPU if there is one."""
    dtype: str = "float32"
    """Precision of its weights: `float32` or `bfloat16`."""
    tokens_per_batch: PositiveInt = 8192
    """Tokens of a batch, padding included."""
    max_tokens: PositiveInt = 4096
    """A longer conversation is a failure: the score of a truncated answer would be meaningless."""


@dataclass(frozen=True)
class RewardModelReward:
    """Scores each completion by the model; the reason lists every head."""

    name: str
    weight: float
    options: RewardModelOptions
    _lock: Any = field(default_factory=threading.Lock)
    _runs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.options.model.startswith(STAGE_PREFIX):
            _ = self._weights

    def set_run_folder(self, run: Path) -> None:
        """Sets the run's folder, which will hold the models that its stages train."""
        self._runs[:] = [run]

    @property
    def heads(self) -> list[str]:
        """The labels of the model's heads, in order."""
        return list(self._labels.values())

    @property
    def source(self) -> str:
        """The folder or hub id of the model."""
        name = self.options.model
        if not name.startswith(STAGE_PREFIX):
            return name
        folder = [run / TRAINED / name.removeprefix(STAGE_PREFIX) for run in self._runs]
        if not folder or not folder[0].is_dir():
            raise ModelError(
                f"rewards.{self.name}.model",
                name,
                because="no stage of that name has trained a reward model in this run yet",
                fix="put the reward_model stage before this one, or name a folder",
            )
        return str(folder[0])

    def score(self, group: Group) -> list[Result]:
        texts = [conversation(self._tokenizer, group.prompt, completion.text) for completion in group.completions]
        inputs = [self._tokenizer(text, add_special_tokens=special)["input_ids"] for text, special in texts]
        results: list[Result] = [
            ValueError(f"{len(ids)} tokens, and max_tokens is {self.options.max_tokens}") for ids in inputs
        ]
        short = [index for index, ids in enumerate(inputs) if len(ids) <= self.options.max_tokens]
        with self._lock:
            for batch in batches(short, [len(ids) for ids in inputs], self.options.tokens_per_batch):
                for index, logits in zip(batch, self._logits([inputs[index] for index in batch]), strict=True):
                    results[index] = self._score(logits)
        return results

    def _score(self, logits: Sequence[float]) -> Score:
        heads = [(name, logits[index]) for index, name in self._labels.items()]
        total = sum(weight * logits[index] for index, weight in self._weights.items())
        return Score(total, ", ".join(f"{name} {value:.3g}" for name, value in heads))

    def _logits(self, inputs: Sequence[Sequence[int]]) -> list[list[float]]:
        import torch

        width = max(map(len, inputs))
        padding = self._tokenizer.pad_token_id or 0
        input_ids = torch.tensor([[*ids, *[padding] * (width - len(ids))] for ids in inputs])
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs])
        with torch.inference_mode():
            output = self._model(input_ids=input_ids.to(self._model.device), attention_mask=mask.to(self._model.device))
        return output.logits.float().cpu().tolist()  # type: ignore[no-any-return]

    @cached_property
    def _model(self) -> Any:
        model = load_reward_model(
            self.source, "AutoModelForSequenceClassification", f"rewards.{self.name}.model", self.options.dtype
        )
        if model.config.pad_token_id is None:  # such a model finds a padded sequence's last token by it
            model.config.pad_token_id = self._tokenizer.pad_token_id or 0
        import torch

        auto_device = "cuda" if torch.cuda.is_available() else "cpu"
        return model.to(auto_device if self.options.device == "auto" else self.options.device)

    def use(self, model: Any) -> None:
        """Scores by this model from now on: one that is trained along with the policy."""
        self.__dict__["_model"] = model

    @cached_property
    def _tokenizer(self) -> Any:
        return load_reward_model(self.source, "AutoTokenizer", f"rewards.{self.name}.model")

    @cached_property
    def _labels(self) -> dict[int, str]:
        return {int(index): str(name) for index, name in self._model.config.id2label.items()}

    @cached_property
    def _weights(self) -> dict[int, float]:
        indices = {name: index for index, name in self._labels.items()} | {str(index): index for index in self._labels}
        unknown = next((name for name in self.options.heads if name not in indices), None)
        if unknown is None and (self.options.heads or len(self._labels) == 1):
            return {indices[name]: weight for name, weight in self.options.heads.items()} or {0: 1.0}
        raise ModelError(
            f"rewards.{self.name}.heads",
            "no weights" if unknown is None else f"no head '{unknown}'",
            because=f"the model's heads are: {', '.join(self._labels.values())}",
            fix="give heads a weight: heads = { NAME = 1.0 }",
        )


def conversation(tokenizer: Any, prompt: Prompt, text: str) -> tuple[str, bool]:
    """The text that a reward model reads, and whether its tokenizer must add special tokens (a chat template includes them)."""
    if getattr(tokenizer, "chat_template", None):
        question = [dict(m) for m in prompt.messages] if prompt.messages else [{"role": "user", "content": prompt.text or ""}]
        chat = [*question, {"role": "assistant", "content": text}]
        return str(apply_chat_template(tokenizer, chat, prompt.id, "the reward model's", tokenize=False)), False
    return prompt.shown + text, True


def batches(indices: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices in batches of similar length: at most ``budget`` tokens each including padding, but at least one index."""
    result: list[list[int]] = []
    for index in sorted(indices, key=lambda i: lengths[i]):
        if result and (len(result[-1]) + 1) * lengths[index] <= budget:
            result[-1].append(index)
        else:
            result.append([index])
    return result


@dataclass(frozen=True)
class StepModel:
    """A process reward model: a token-classification head, read at each step's last token."""

    model: Any
    tokenizer: Any
    label: int

    def score(self, prompt: Prompt, text: str, spans: Sequence[tuple[int, int]]) -> list[float]:
        """The probability of a good step, for each character span of the text."""
        import torch

        prompt_length = len(prompt.shown)
        encoding = self.tokenizer(prompt.shown + text, return_offsets_mapping=True, return_tensors="pt")
        offsets = [(int(begin), int(end)) for begin, end in encoding.pop("offset_mapping")[0]]
        with torch.inference_mode():
            logits = self.model(**{key: value.to(self.model.device) for key, value in encoding.items()}).logits[0].float()
        good = logits.softmax(-1)[:, self.label].cpu().tolist()
        return [good[_token_before(offsets, prompt_length + end)] for _, end in spans]


def step_ends(tokenizer: Any, prompt: Prompt, steps: Sequence[str]) -> tuple[list[int], list[int]]:
    """A completion of these steps as `StepModel` reads it: token ids, and the index of each step's last token."""
    encoding = tokenizer(prompt.shown + "".join(steps), return_offsets_mapping=True)
    offsets = [(int(begin), int(end)) for begin, end in encoding["offset_mapping"]]
    ends = itertools.accumulate(map(len, steps), initial=len(prompt.shown))
    return list(encoding["input_ids"]), [_token_before(offsets, end) for end in itertools.islice(ends, 1, None)]


def _token_before(offsets: Sequence[tuple[int, int]], end: int) -> int:
    """Index of the token that contains the character before ``end``. Special tokens, which have no characters, are skipped."""
    return max(index for index, (begin, after) in enumerate(offsets) if begin < after and begin < end)


def load_step_model(source: str, label: int, device: str, where: str) -> StepModel:
    model = load_reward_model(source, "AutoModelForTokenClassification", where)
    return StepModel(model.to(device), load_reward_model(source, "AutoTokenizer", where), label)


def load_reward_model(source: str, kind: str, where: str, dtype: str = "float32") -> Any:
    """Loads a model or tokenizer by a class of transformers (``kind``). Code in the model's folder is never run."""
    import torch
    import transformers

    from oncurve.models.loading.load import check_source

    check_source(source)
    model = {"dtype": getattr(torch, dtype), "use_safetensors": True, "output_loading_info": True}
    options = {} if kind == "AutoTokenizer" else model
    try:
        result = getattr(transformers, kind).from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # a damaged folder can raise any exception
        raise ModelError(
            where,
            source,
            because=f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})",
            fix=f"name a folder or hub id that transformers.{kind} can load",
        ) from None
    if kind == "AutoTokenizer":
        return result
    loaded, loading_info = result
    if loading_info["missing_keys"]:
        missing = ", ".join(sorted(loading_info["missing_keys"])[:3])
        raise ModelError(
            where,
            f"{source} is not a trained reward model",
            because=f"{missing} of a {type(loaded).__name__} would be initialised at random",
            fix="name a trained reward model; a stage of type reward_model trains one from a language model",
        )
    return loaded.eval()
