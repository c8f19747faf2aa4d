"""The nouns of Oncurve, in the order in which a completion passes through them.

    Task ─Prompt→ Engine ─Group→ Rewards ─ScoredGroup→ Advantage ─GradedGroup→ pack ─Batch→ Learner ─StepReport→ Run

Each record is frozen and adds to the one before it. Arrays are numpy, so the studio and the run database read records without
torch.

Shape letters. A tensor's name ends with its axes (``logps_BT``), and every module of the project uses this legend:

    P  prompts of a step                    N  input tokens of a pack
    G  group size: completions of a prompt  M  predicted tokens of a pack
    B  completions of a step, P·G,          R  rows of a pack: its completions
       or pairs of a preference batch       S  slots of the sampling engine
    T  tokens of a completion               C  tokens of a decode round
    V  vocabulary                           H  query heads
    D  model width (hidden size)            K  key and value heads
    A  aspects: heads of a reward model     d  size of one head
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

StopReason = Literal["end", "stop_string", "length"]
"""Why a completion stopped: the model's end token, a stop string of the recipe, or the length limit (a *cut* completion)."""
STOPPED: Mapping[StopReason, str] = {"end": "ended", "stop_string": "stop string", "length": "cut"}
"""The same as a person reads it."""


class Environment(Protocol):
    """The other side of a task of several turns: a tool that answers, a player that moves.

    A turn of the policy ends with its end token, or with one of ``calls`` (`</tool>`, a question mark). Then `reply` is asked,
    and what it says goes into the context and stays out of the loss. It must be a pure function of its arguments, so that a run
    can be repeated: ``turns`` holds what was said, the policy's and the environment's by turns, the policy's first and last;
    ``dice`` is a function of (seed, step, prompt, sample, turn), for environments that throw some.
    """

    @property
    def calls(self) -> tuple[str, ...]: ...

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """What the environment says now; None where there is nothing more to say, and the completion ends."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked, with the columns that its rewards need. Where an ``environment`` answers back, it goes on.

    ``id`` is stable and unique within a task: random numbers and the studio's 'follow one prompt' hang on it. Exactly one
    of ``text`` (sent as it is) and ``messages`` (sent through the chat template) is set.

    Example: ``Prompt(id="arithmetic/train/17", text="12+34=", columns={"answer": "46", "difficulty": "2 digits"})``
    """

    id: str
    text: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    environment: Environment | None = field(default=None, compare=False, repr=False)

    @property
    def difficulty(self) -> str | None:
        """The level under which held-out accuracy is reported, where the task has levels."""
        value = self.columns.get("difficulty")
        return None if value is None else str(value)

    @property
    def calls(self) -> tuple[str, ...]:
        """What ends a turn of the policy beside its end token."""
        return () if self.environment is None else self.environment.calls

    @property
    def shown(self) -> str:
        """The prompt as a person reads it."""
        if self.text is not None:
            return self.text
        return "\n".join(f"{m['role']}: {m['content']}" for m in self.messages or ())

    @property
    def written(self) -> str | list[dict[str, str]]:
        """The prompt as data files and TRL's reward functions have it: its text, or its messages."""
        return self.text if self.text is not None else [dict(message) for message in self.messages or ()]


def is_text(value: str) -> bool:
    """Whether a string can be written down. JSON may spell halves of characters (`"\\ud83d"`), which no tokenizer and no file
    takes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Example:
    """A worked example for supervised training: a prompt and the completion to imitate.

    Where an environment takes part, ``turns`` is the same completion cut where the speaker changes, the policy's part first:
    what the environment says is not imitated.
    """

    prompt: Prompt
    completion: str
    turns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. Every array has length T, the end token (where the model wrote one) included.

    ``logps`` is the log-prob of each token in the temperature-scaled, untruncated distribution: what the learner computes too,
    so that the two can be compared. ``sampled_logps`` is that of the distribution really drawn from (after top-k, top-p,
    min-p) and ``raw_logps`` that at temperature 1; they are the same array where nothing sets them apart, and NaN where a
    sampler does not tell them. ``loss_mask`` is False on tokens that an environment wrote. ``versions`` says by which weights
    it was written, where they may have changed on the way: (first token, updates that those weights had seen), in order.
    """

    token_ids: Ints
    text: str
    stop: StopReason
    logps: Floats
    sampled_logps: Floats
    raw_logps: Floats
    loss_mask: Bools
    versions: tuple[tuple[int, int], ...] | None = None

    @property
    def length(self) -> int:
        """How many tokens the policy itself wrote: |o_i| of the formulas."""
        return int(self.loss_mask.sum())

    @property
    def cut(self) -> bool:
        return self.stop == "length"


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    prompt_ids: Ints
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class Aspect:
    """What one reward said of one completion.

    ``value`` is None where the reward does not apply here, or failed: then ``failure`` says why. A failure is never a number.
    ``steps`` holds step rewards as (token index of the step's last token, reward), for process supervision.
    """

    name: str
    value: float | None
    weight: float = 1.0
    failure: str | None = None
    reason: str | None = None
    steps: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion with its reward by aspect."""

    completion: Completion
    aspects: tuple[Aspect, ...]

    @property
    def failure(self) -> str | None:
        """Why this completion has no reward: the first failed aspect that counts, or that no reward applied."""
        for aspect in self.aspects:
            if aspect.failure is not None and aspect.weight != 0:
                return f"{aspect.name}: {aspect.failure}"
        counted = [a for a in self.aspects if a.weight != 0]
        if all(a.value is None and a.steps is None for a in counted):
            return "no reward applies"
        return None

    @property
    def total(self) -> float | None:
        """The weighted sum of its aspects; None where it failed. Aspects of weight 0 are watched, not counted."""
        if self.failure is not None:
            return None
        return float(sum(a.weight * a.value for a in self.aspects if a.value is not None and a.weight != 0))


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group whose completions have been rewarded (or have failed to be)."""

    group: Group
    scored: tuple[ScoredCompletion, ...]

    @property
    def totals(self) -> tuple[float | None, ...]:
        return tuple(s.total for s in self.scored)


@dataclass(frozen=True, slots=True)
class GradedGroup:
    """A scored group graded on its own curve: one advantage per token of each completion.

    ``advantages[i]`` has the length of completion i. ``graded[i]`` is False where completion i has no reward, or was masked
    (a cut completion, where the recipe says so): it then takes no part in the loss or its totals.
    """

    scored: ScoredGroup
    advantages: tuple[Floats, ...]
    graded: tuple[bool, ...]

    @property
    def group(self) -> Group:
        return self.scored.group

    @property
    def has_signal(self) -> bool:
        """Whether any graded token has an advantage: a group of equal rewards teaches nothing."""
        return any(bool(np.any(a != 0)) for a, g in zip(self.advantages, self.graded, strict=True) if g)

    def advantage_of(self, place: int) -> float | None:
        """A completion's advantage, the mean over its tokens where they differ; None where it takes no part in the loss."""
        values = self.advantages[place]
        return float(np.mean(values)) if self.graded[place] and len(values) else None

    @property
    def best_first(self) -> list[int]:
        """Places of the completions by their advantage; those that take no part last."""

        def key(place: int) -> tuple[bool, float]:
            value = self.advantage_of(place)
            return value is None, -(value or 0.0)

        return sorted(range(len(self.graded)), key=key)


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What the learner saw at each token of one completion, at the last update of the step. All of length T."""

    logps: Floats
    ratio: Floats
    entropy: Floats
    clipped: Bools
    kl: Floats | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimiser-visible step of a stage, as it is stored and shown.

    ``metrics`` are plain numbers by name (``oncurve.runs.metrics`` explains each); ``seconds`` is time by phase. ``stats`` runs
    parallel to ``groups`` and their completions, and is None where a completion was not forwarded (a group without signal);
    nothing at all where the stage forwards none.
    """

    stage: str
    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    groups: Sequence[GradedGroup] = ()
    stats: Sequence[Sequence[TokenStats | None]] = ()

    @property
    def took(self) -> float:
        """Seconds of the whole step: a phase called ``update/forward`` is a part of ``update``, and not counted again."""
        return sum(value for phase, value in self.seconds.items() if "/" not in phase)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """A measurement on held-out prompts: greedy by default, so that it is the same each time.

    ``accuracy`` is the share of held-out prompts solved, and None where no rule says what is right: then ``reward`` is the
    measure. ``by_difficulty`` maps a level to (solved, asked). ``groups`` keeps what was answered.
    """

    stage: str
    step: int
    accuracy: float | None
    asked: int
    by_difficulty: Mapping[str, tuple[int, int]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    groups: Sequence[ScoredGroup] = ()

    @property
    def reward(self) -> float | None:
        """The mean total reward; None where no answer could be graded."""
        return self.metrics.get("reward")
