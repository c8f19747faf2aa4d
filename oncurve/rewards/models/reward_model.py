"""A learned reward model: any sequence-classification checkpoint, one head or several; and its like for single steps.

    r = Σ_h w_h · logit_h        over the heads; one head of weight 1 where the recipe says nothing

Completions are sorted by length and run in batches of about as many tokens as the recipe says, so that little of a batch is
padding. The model reads the conversation through its own chat template where it has one, else prompt and completion as texts.
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
"""The folder of a run in which its stages leave the reward models that they train."""


class RewardModelOptions(Section):
    """Options of the reward `model`."""

    model: str
    """A folder or hub id of a sequence-classification model, or `stage:NAME` for the one that an earlier stage of this run
    trains (`reward_model`)."""
    heads: dict[str, float] = Field(default_factory=dict)
    """Weight of each head, by its label in the model's config or by its number; heads not named weigh nothing. Unset: a model
    with one head counts with weight 1."""
    device: str = "cpu"
    """`cpu`, `cuda`, `cuda:1` …, or `auto`: a GPU where there is one."""
    dtype: str = "float32"
    """Precision of its weights: `float32` or `bfloat16`."""
    tokens_per_batch: PositiveInt = 8192
    """Tokens run at once, padding counted."""
    max_tokens: PositiveInt = 4096
    """A longer conversation has no reward: a model that sees half an answer says nothing of the whole."""


@dataclass(frozen=True)
class RewardModelReward:
    """What the model says of each completion; the reason names every head."""

    name: str
    weight: float
    options: RewardModelOptions
    _lock: Any = field(default_factory=threading.Lock)
    _runs: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.options.model.startswith(STAGE_PREFIX):
            _ = self._weights

    def set_run_folder(self, run: Path) -> None:
        """The folder of the run, where models that its own stages train will lie."""
        self._runs[:] = [run]

    @property
    def heads(self) -> list[str]:
        """The names of the model's outputs, in order."""
        return list(self._labels.values())

    @property
    def source(self) -> str:
        """Where the model lies."""
        name = self.options.model
        if not name.startswith(STAGE_PREFIX):
            return name
        folder = [run / TRAINED / name.removeprefix(STAGE_PREFIX) for run in self._runs]
        if not folder or not folder[0].is_dir():
            raise ModelError(
                f"rewards.{self.name}.model",
                name,
                because="no stage of that name has trained a reward model in this run yet",
                fix="put the reward_model stage before, or name a folder",
            )
        return str(folder[0])

    def score(self, group: Group) -> list[Result]:
        texts = [conversation(self._tokenizer, group.prompt, completion.text) for completion in group.completions]
        rows = [self._tokenizer(text, add_special_tokens=special)["input_ids"] for text, special in texts]
        results: list[Result] = [ValueError(f"{len(row)} tokens, and max_tokens is {self.options.max_tokens}") for row in rows]
        short = [place for place, row in enumerate(rows) if len(row) <= self.options.max_tokens]
        with self._lock:
            for places in batches(short, [len(row) for row in rows], self.options.tokens_per_batch):
                for place, logits in zip(places, self._logits([rows[place] for place in places]), strict=True):
                    results[place] = self._score(logits)
        return results

    def _score(self, logits: Sequence[float]) -> Score:
        heads = [(name, logits[number]) for number, name in self._labels.items()]
        total = sum(weight * logits[number] for number, weight in self._weights.items())
        return Score(total, ", ".join(f"{name} {value:.3g}" for name, value in heads))

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        import torch

        longest = max(map(len, rows))
        padding = self._tokenizer.pad_token_id or 0
        ids = torch.tensor([[*row, *[padding] * (longest - len(row))] for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        with torch.inference_mode():
            seen = self._model(input_ids=ids.to(self._model.device), attention_mask=mask.to(self._model.device))
        return seen.logits.float().cpu().tolist()  # type: ignore[no-any-return]

    @cached_property
    def _model(self) -> Any:
        model = load_reward_model(
            self.source, "AutoModelForSequenceClassification", f"rewards.{self.name}.model", self.options.dtype
        )
        if model.config.pad_token_id is None:  # it is how such a model finds the last token of a padded row
            model.config.pad_token_id = self._tokenizer.pad_token_id or 0
        import torch

        chosen = "cuda" if torch.cuda.is_available() else "cpu"
        return model.to(chosen if self.options.device == "auto" else self.options.device)

    def use(self, model: Any) -> None:
        """From now on this model speaks: one that is being trained beside the policy."""
        self.__dict__["_model"] = model

    @cached_property
    def _tokenizer(self) -> Any:
        return load_reward_model(self.source, "AutoTokenizer", f"rewards.{self.name}.model")

    @cached_property
    def _labels(self) -> dict[int, str]:
        return {int(number): str(name) for number, name in self._model.config.id2label.items()}

    @cached_property
    def _weights(self) -> dict[int, float]:
        named = {name: number for number, name in self._labels.items()} | {str(number): number for number in self._labels}
        wrong = next((name for name in self.options.heads if name not in named), None)
        if wrong is None and (self.options.heads or len(self._labels) == 1):
            return {named[name]: weight for name, weight in self.options.heads.items()} or {0: 1.0}
        raise ModelError(
            f"rewards.{self.name}.heads",
            "no weights" if wrong is None else f"no head '{wrong}'",
            because=f"the model's heads are: {', '.join(self._labels.values())}",
            fix="give each head that counts a weight: heads = { NAME = 1.0 }",
        )


def conversation(tokenizer: Any, prompt: Prompt, text: str) -> tuple[str, bool]:
    """What a reward model reads, and whether its tokenizer still has to add special tokens: a chat template wrote its own."""
    if getattr(tokenizer, "chat_template", None):
        asked = [dict(m) for m in prompt.messages] if prompt.messages else [{"role": "user", "content": prompt.text or ""}]
        chat = [*asked, {"role": "assistant", "content": text}]
        return str(apply_chat_template(tokenizer, chat, prompt.id, "the reward model's", tokenize=False)), False
    return prompt.shown + text, True


def batches(places: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """The places in batches of like length, each with at most `budget` tokens, padding counted; at least one row each."""
    made: list[list[int]] = []
    for place in sorted(places, key=lambda p: lengths[p]):
        if made and (len(made[-1]) + 1) * lengths[place] <= budget:
            made[-1].append(place)
        else:
            made.append([place])
    return made


@dataclass(frozen=True)
class StepModel:
    """A process reward model: a token-classification head, read at each step's last token."""

    model: Any
    tokenizer: Any
    label: int

    def score(self, prompt: Prompt, text: str, spans: Sequence[tuple[int, int]]) -> list[float]:
        """The probability of a good step, for each span of the text's characters."""
        import torch

        before = len(prompt.shown)
        coded = self.tokenizer(prompt.shown + text, return_offsets_mapping=True, return_tensors="pt")
        offsets = [(int(begin), int(end)) for begin, end in coded.pop("offset_mapping")[0]]
        with torch.inference_mode():
            logits = self.model(**{key: value.to(self.model.device) for key, value in coded.items()}).logits[0].float()
        good = logits.softmax(-1)[:, self.label].cpu().tolist()
        return [good[_last_of(offsets, before + end)] for _, end in spans]


def step_ends(tokenizer: Any, prompt: Prompt, steps: Sequence[str]) -> tuple[list[int], list[int]]:
    """A completion of these steps as `StepModel` reads it: token ids, and the place of each step's last token."""
    coded = tokenizer(prompt.shown + "".join(steps), return_offsets_mapping=True)
    offsets = [(int(begin), int(end)) for begin, end in coded["offset_mapping"]]
    ends = itertools.accumulate(map(len, steps), initial=len(prompt.shown))
    return list(coded["input_ids"]), [_last_of(offsets, end) for end in itertools.islice(ends, 1, None)]


def _last_of(offsets: Sequence[tuple[int, int]], end: int) -> int:
    """The token that holds the character before `end`; special tokens, which hold none, are passed over."""
    return max(place for place, (begin, after) in enumerate(offsets) if begin < after and begin < end)


def step_model(source: str, label: int, device: str, where: str) -> StepModel:
    model = load_reward_model(source, "AutoModelForTokenClassification", where)
    return StepModel(model.to(device), load_reward_model(source, "AutoTokenizer", where), label)


def load_reward_model(source: str, kind: str, where: str, dtype: str = "float32") -> Any:
    """A model or tokenizer by transformers' own class for it; code in its folder is never run."""
    import torch
    import transformers

    from oncurve.models.loading.load import check_source

    check_source(source)
    model = {"dtype": getattr(torch, dtype), "use_safetensors": True, "output_loading_info": True}
    options = {} if kind == "AutoTokenizer" else model
    try:
        loaded = getattr(transformers, kind).from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # a damaged folder makes its readers raise errors of every kind
        raise ModelError(
            where,
            source,
            because=f"{str(error).strip().partition(chr(10))[0]} ({type(error).__name__})",
            fix="name a folder or hub id of such a model",
        ) from None
    if kind == "AutoTokenizer":
        return loaded
    found, told = loaded
    if told["missing_keys"]:
        raise ModelError(
            where,
            f"{source} is no such model",
            because=f"{', '.join(sorted(told['missing_keys'])[:3])} of a {type(found).__name__} would be drawn at random",
            fix="name a trained reward model; a stage of type reward_model makes one from a language model",
        )
    return found.eval()
