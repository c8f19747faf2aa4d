"""The reward `process` (process supervision): a reward for each reasoning step, assigned to the step's last token.

The step rewards of a group are normalised together, and a token's advantage is the sum of those of the steps that end at or
after it (`algos.advantages.process_advantages`). If no step can be judged, the reward does not apply.

A judge as source gets one request for all steps of a completion and returns one score each, r_k = (s_k − low) / (high − low).
The steps are fenced like everything that a judge reads (`judge.py`); a reply with another number of scores is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from oncurve.errors import RecipeError
from oncurve.plugins import load_function
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group, Prompt
from oncurve.rewards.base import Result, Score, score_concurrently
from oncurve.rewards.models.judge import JudgeOptions, build_request, client_for, parse_reply, rescale
from oncurve.rewards.models.judge_client import JudgeReplyError
from oncurve.rewards.models.reward_model import StepModel, load_step_model
from oncurve.rewards.models.step_spans import SPLITTERS, Decode, Span, Split, last_tokens, validate_spans
from oncurve.rewards.python_function import FunctionReward, run_coroutine
from oncurve.tasks.puzzles.expression import ExpressionError, parse

SHAPE = (
    '{{"scores": [a number from {low:g} to {high:g} for each of the {count} steps, in order], "reason": "one sentence"}}. '
    "Judge each step by itself: is it right, given the question and the steps before it?"
)


class _StepsReply(Section):
    scores: tuple[float, ...]
    reason: str = ""


class StepJudge:
    """A judge that scores the steps of one completion per request."""

    def __init__(self, options: JudgeOptions, where: str) -> None:
        self.options, self._client = options, client_for(options, where)

    def score(self, prompt: Prompt, steps: Sequence[str]) -> list[float]:
        """One reward per step. Raises if the judge fails."""
        if not steps:
            return []
        titles = [f"Step {n}" for n in range(1, len(steps) + 1)]
        shape = SHAPE.format(low=self.options.scale[0], high=self.options.scale[1], count=len(steps))
        request = build_request(self.options, prompt, titles, steps, shape)
        (scores,) = run_coroutine([self._client.ask(request, lambda reply: self._read(reply, len(steps)))])
        if isinstance(scores, BaseException):
            raise scores
        return list(scores)

    def _read(self, reply: str, count: int) -> list[float]:
        scores = parse_reply(_StepsReply, reply).scores
        if len(scores) != count:
            raise JudgeReplyError(f"the judge scored {len(scores)} steps of {count}")
        return [rescale(score, self.options.scale) for score in scores]


_SIGNS = r"-+*/×·÷−"
_EQUATION = re.compile(
    rf"([-−]?[0-9(][{_SIGNS}0-9() ]*[{_SIGNS}][{_SIGNS}0-9() ]*)=\s*([-−]?[0-9]+(?:/[0-9]+)?)"
    rf"(?![0-9/^(]|[.,][0-9]|[A-Za-z](?![A-Za-z])|\s*[{_SIGNS}]\s*[0-9(]|\s*[*/×·÷]\s*[A-Za-z])"
)
_INSIDE = re.compile(rf"[0-9A-Za-z_)}}.,%]$|(?<![A-Za-z])[A-Za-z]\s+$|[0-9A-Za-z_)}}^]\s*[{_SIGNS}^]\s*$")
"""The end of a text after which digits are a part of something longer: `1.`, `x `, `x + `."""

StepRewards = list[float | None]


class ProcessOptions(Section):
    """A number for each reasoning step: arithmetic that is checked, a function, a process reward model, or a judge."""

    source: Literal["arithmetic", "python", "model", "judge"] = "arithmetic"
    """`arithmetic`: 1 for a step whose equations (`12*3 = 36`) are all true, 0 if one is false, nothing if it has none;
    `python`: a function; `model`: a process reward model; `judge`: a language model, one request for all steps."""
    split: Split = "lines"
    """What a step is: `lines`, `numbered` (from one `Step n` to the next), `sentences`, or `tags` (`<step>…</step>`)."""
    splitter: str | None = None
    """A function instead of `split`: `file.py:name`, which takes the text and returns (first, last + 1) character pairs."""
    function: str | None = None
    """For `python`: `file.py:name`, which takes the list of steps (texts) and returns a number or None for each. Columns and
    `prompt` are passed if they are in its signature."""
    model: str | None = None
    """For `model`: a folder or hub id of a token-classification model."""
    label: int = 1
    """For `model`: the label of a good step; the reward is its probability at the step's last token."""
    device: str = "cpu"
    """For `model`: the device that it runs on."""
    judge: JudgeOptions | None = None
    """For `judge`: the model and endpoint, as in the reward `judge`; `mode` and `rubric` are not used."""


@dataclass(frozen=True)
class ProcessReward:
    """Step rewards from one source. It needs the policy's decode function (`set_decoder`) to find each step's last token."""

    name: str
    weight: float
    options: ProcessOptions = field(default_factory=ProcessOptions)
    _decode: list[Decode] = field(default_factory=list)

    def __post_init__(self) -> None:
        needed = {"python": "function", "model": "model", "judge": "judge"}.get(self.options.source)
        if needed is not None and getattr(self.options, needed) is None:
            raise RecipeError(
                f"rewards.{self.name}.{needed}", "missing", because=f"source is '{self.options.source}'", fix=f"add {needed}"
            )
        _ = self._splitter, self._function, self._model, self._judge

    @property
    def is_async(self) -> bool:
        return self._judge is not None

    @property
    def log_lines(self) -> list[str]:
        return [] if self._judge is None else [f"{self.name}: steps {self._judge.options.description}"]

    def set_decoder(self, decode: Decode) -> None:
        self._decode[:] = [decode]

    def score(self, group: Group) -> list[Result]:
        count = 1 if self._judge is None else self._judge.options.at_once
        return score_concurrently(group, lambda completion: self._score(completion, group.prompt), count)

    def _score(self, completion: Completion, prompt: Prompt) -> Score:
        if not self._decode:
            raise RuntimeError("the steps' tokens can't be found without a tokenizer")
        spans = self._splitter(completion.text)
        rewards = self._rewards(completion.text, spans, prompt)
        if len(rewards) != len(spans):
            raise ValueError(f"returned {len(rewards)} rewards for {len(spans)} steps")
        rewarded = [(span, reward) for span, reward in zip(spans, rewards, strict=True) if reward is not None]
        if not rewarded:
            return Score(None, "no step can be judged")
        ends = last_tokens(completion.token_ids, completion.text, [span for span, _ in rewarded], self._decode[0])
        good = sum(reward > 0.5 for _, reward in rewarded)
        steps = tuple((end, float(reward)) for end, (_, reward) in zip(ends, rewarded, strict=True))
        return Score(None, f"{good} of {len(rewarded)} steps are good", steps)

    def _rewards(self, text: str, spans: Sequence[Span], prompt: Prompt) -> StepRewards:
        texts = [text[begin:end] for begin, end in spans]
        if self._function is not None:
            return list(self._function(texts, prompt))
        if self._model is not None:
            return list(self._model.score(prompt, text, spans))
        if self._judge is not None:
            return list(self._judge.score(prompt, texts))
        return [check_arithmetic(step) for step in texts]

    @cached_property
    def _splitter(self) -> Callable[[str], list[Span]]:
        if self.options.splitter is None:
            return SPLITTERS[self.options.split]
        splitter = load_function(self.options.splitter, f"rewards.{self.name}.splitter")
        return lambda text: validate_spans(splitter(text), text)

    @cached_property
    def _function(self) -> Callable[[list[str], Prompt], Any] | None:
        if self.options.function is None:
            return None
        function = FunctionReward(load_function(self.options.function, f"rewards.{self.name}.function"), self.name)
        return lambda texts, prompt: function.call(texts, {**prompt.columns, "prompt": prompt.shown})

    @cached_property
    def _model(self) -> StepModel | None:
        if self.options.source != "model" or self.options.model is None:
            return None
        return load_step_model(self.options.model, self.options.label, self.options.device, f"rewards.{self.name}.model")

    @cached_property
    def _judge(self) -> StepJudge | None:
        if self.options.source != "judge" or self.options.judge is None:
            return None
        return StepJudge(self.options.judge, f"rewards.{self.name}.judge")


def check_arithmetic(step: str) -> float | None:
    """1 if every equation in a step is true, 0 if one is false, None if it has none.

    `3*4 = 12` and `(1+2)/3 = 1` are equations; `x = 4` and `12 = 12` are not. Our own parser evaluates them.
    """
    step = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", step)
    equations = (
        match for match in _EQUATION.finditer(step) if not _INSIDE.search(step[max(0, match.start() - 20) : match.start()])
    )
    verdicts = [verdict for match in equations if (verdict := _is_true(match[1], match[2])) is not None]
    return None if not verdicts else float(all(verdicts))


def _is_true(left: str, right: str) -> bool | None:
    is_negative = right[0] in "-−"
    try:
        value = parse(right.lstrip("-−")).value
        left = left.strip()
        return parse(f"0{left}" if left[0] in "-−" else left).value == (-value if is_negative else value)
    except ExpressionError:
        return None
