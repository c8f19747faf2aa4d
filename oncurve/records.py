"""The nouns of Oncurve, in the order in which a completion passes through them.

    Task ─Prompt→ Engine ─Group→ Rewards ─ScoredGroup→ Advantage ─GradedGroup→ pack ─Batch→ Learner ─StepReport→ Run

Each record is frozen and adds to the one before it. Arrays are numpy, so the studio and the run database read records without
torch.

Shape letters. A tensor's name ends with its axes (``logps_BT``). Modules use this legend unless they define a letter
themselves:

    P  prompts of a step                    N  input tokens of a pack
    G  group size: completions of a prompt  M  predicted tokens of a pack
    B  completions of a step, P·G,          R  rows of a pack: its completions
       or pairs of a preference batch       S  slots of the sampling engine
    T  tokens of a completion               C  tokens of a decode round
    V  vocabulary                           H  query heads
    D  model width (hidden size)            K  key and value heads
    A  aspects: heads of a reward model     d  size of one head
    E  experts of a token, over all layers
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # lists of runs need no arrays, and numpy takes a tenth of a second to import
    import numpy as np
    from numpy.typing import NDArray

Floats: TypeAlias = "NDArray[np.float32]"
Ints: TypeAlias = "NDArray[np.int64]"
Bools: TypeAlias = "NDArray[np.bool_]"
Routing: TypeAlias = "NDArray[np.int16]"
"""[tokens, E]: the experts that each token takes in a mixture of experts, layer by layer."""

StopReason = Literal["end", "stop_string", "length"]
"""Why a completion ended: the model's end token, a stop string of the recipe, or the length limit (it is *truncated*)."""
STOP_REASONS: Mapping[StopReason, str] = {"end": "ended", "stop_string": "stop string", "length": "truncated"}
"""Stop reasons as the terminal and the studio show them."""


class Environment(Protocol):
    """Replies to the policy in a multi-turn task: a tool that returns a result, an opponent that moves.

    A turn of the policy ends with its end token or with one of ``calls`` (`</tool>`, a question mark). `reply` then returns
    text that is appended to the context and masked out of the loss.

    `reply` must be a pure function of its arguments, or runs can't be repeated. ``turns`` alternates between policy and
    environment, starting and ending with the policy. ``dice`` is a random generator that depends only on (seed, step, prompt,
    sample, turn).

    Example: the calculator replies ``"85"`` to ``turns = ("<think>[38+47]",)``, and ``None`` to a turn without a call
    """

    @property
    def calls(self) -> tuple[str, ...]: ...

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        """The reply to the last turn; None ends the completion."""


Message: TypeAlias = "Mapping[str, Any]"
"""A chat message: a role, a content, and perhaps tool calls."""
History = Literal["tokens", "template"]
"""What the policy's next turn in a chat follows: the tokens as they were sampled, or what the chat template writes."""
Reply: TypeAlias = "str | tuple[Message, ...] | Ints"
"""An environment's reply: a text, messages that the chat template formats, or tokens."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the policy wrote, and its result. If it failed, ``failure`` says how and ``result`` is what the policy
    reads instead. ``arguments`` is a text if it could not be parsed. ``seconds`` is None if an agent program ran the tool.
    ``value`` is a result that is a list, as JSON stores it: reward functions get it instead of its text, as in TRL.

    Example: ``ToolCall("search", {"query": "tea"}, "3 kinds of tea", seconds=0.2)``
    """

    name: str
    arguments: Mapping[str, Any] | str
    result: str
    failure: str | None = None
    seconds: float | None = 0.0
    value: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """What a stateful environment answers to a turn of the policy. Without a ``reply`` the completion ends.

    ``message`` is the policy's turn as a chat message, ``calls`` its tool calls with their results, ``reward`` its own reward,
    and ``failure`` says why the environment ended the completion, if it did.
    """

    reply: Reply | None
    message: Message | None = None
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended: the environment's own reward for it if it gives one, or why that failed.

    ``instance`` is the environment itself, for reward functions that look at it in the process that ran it.
    """

    reward: float | None = None
    failure: str | None = None
    instance: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[type[Outcome], tuple[float | None, str | None]]:
        """Pickle without the instance, which stays in its process."""
        return Outcome, (self.reward, self.failure)


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """A completion's conversation with a stateful environment.

    ``turns`` holds the tokens [start, end) of each turn of the policy, and the environment's answer to it.
    """

    turns: tuple[tuple[int, int, Observation], ...]
    outcome: Outcome

    @property
    def messages(self) -> list[Message]:
        """The conversation: the policy's messages with their tool calls, and the environment's replies."""
        messages: list[Message] = []
        for _, _, observation in self.turns:
            messages += [] if observation.message is None else [observation.message]
            if isinstance(observation.reply, str):
                messages.append({"role": "user", "content": observation.reply})
            elif isinstance(observation.reply, tuple):
                values = chain((call.value for call in observation.calls), repeat(None))  # an agent says more than results
                for reply, value in zip(observation.reply, values, strict=False):
                    messages.append(reply if value is None else {**reply, "content": value})
        return messages

    @property
    def calls(self) -> list[ToolCall]:
        """Every tool call of the episode."""
        return [call for _, _, observation in self.turns for call in observation.calls]


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of the policy that has ended: its tokens, and their text without the end token. If it ``is_last``, no reply can
    follow: it was truncated, or ended by a stop string of the recipe. ``context_ids`` are the tokens before it."""

    index: int
    token_ids: Ints
    text: str
    is_last: bool = False
    context_ids: Ints | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """Which completion an episode belongs to: sample ``sample`` of a prompt in a step. ``tokenizer`` is the policy's."""

    prompt: Prompt
    seed: int
    step: int
    sample: int
    tokenizer: Any


class Episode(Protocol):
    """One completion's conversation with an environment that has a state or takes time.

    No method waits. The completion's slot is parked until an answer is there, while other sequences are decoded.
    """

    def start(self) -> Future[str | None] | None:
        """Begin. A text is appended to the prompt's last message; None: there is nothing to wait for."""

    def answer(self, turn: Turn) -> Future[Observation] | None:
        """The answer to a turn of the policy. None: this episode replays a recorded one, and the turn differs from the recorded
        turn, so a new episode must start."""

    def finish(self) -> Future[Outcome] | None:
        """The completion has ended, after its last turn was answered; None: there is no record of the episode."""

    def close(self) -> None:
        """The episode is not needed any more, whether it has ended or not."""


class StatefulEnvironment(Protocol):
    """Begins an `Episode` for each completion."""

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON schemas of the tools that the policy can call, for its chat template."""

    def begin(self, rollout: Rollout) -> Episode: ...


@dataclass(frozen=True, slots=True)
class AgentProgram:
    """A program of the user's that makes a rollout by calling the policy's endpoint: a command, or a function of a file.

    Example: ``AgentProgram(command="python my_agent.py", timeout_s=600.0)``
    """

    command: str | None = None
    function: str | None = None
    timeout_s: float = 600.0
    at_once: int = 32
    port: int = 0
    model_name: str = "policy"
    sandbox: bool = False
    history: History = "tokens"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is given, with the columns that its rewards need; several turns if it has an ``environment``. With an
    ``agent``, the agent gets the columns, and decides itself what to send to the model.

    ``id`` is stable and unique within a task: random numbers and the studio's 'follow one prompt' depend on it. Exactly one
    of ``text`` (used as is) and ``messages`` (formatted by the chat template) is set.

    Example: ``Prompt(id="arithmetic/train/17", text="12+34=", columns={"answer": "46", "difficulty": "2 digits"})``
    """

    id: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    environment: Environment | StatefulEnvironment | None = field(default=None, compare=False, repr=False)
    added: str | None = field(default=None, compare=False, repr=False)
    """The text that its environment began with, which is the end of its last message."""
    agent: AgentProgram | None = field(default=None, compare=False, repr=False)

    @property
    def difficulty(self) -> str | None:
        """The level under which held-out accuracy is reported; None if the task has no levels."""
        value = self.columns.get("difficulty")
        return None if value is None else str(value)

    @property
    def calls(self) -> tuple[str, ...]:
        """Texts that end a turn of the policy, besides its end token."""
        return getattr(self.environment, "calls", ())

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The JSON schemas of the tools that the policy can call."""
        return getattr(self.environment, "tools", ())

    @property
    def history(self) -> History:
        """The context of a turn if the chat template rewrites earlier turns: the sampled tokens, or the template's text."""
        return getattr(self.agent or self.environment, "history", "tokens")

    @property
    def shown(self) -> str:
        """The prompt as one text, for people: chat messages as `role: content` lines."""
        if self.text is not None:
            return self.text
        return "\n".join(f"{m['role']}: {message_text(m)}" for m in self.messages or ())

    @property
    def written(self) -> str | list[dict[str, Any]]:
        """The prompt as data files and TRL's reward functions represent it: a text, or a list of messages."""
        return self.text if self.text is not None else [dict(message) for message in self.messages or ()]


def message_text(message: Message) -> str:
    """A chat message's text with its tool calls, for people."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "".join((message["content"], *calls))


def is_text(value: str) -> bool:
    """Whether a string can be encoded. JSON can hold lone surrogates (`"\\ud83d"`), which no tokenizer or file accepts."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Example:
    """A demonstration for supervised training: a prompt and the completion to imitate.

    With an environment, ``turns`` is the same completion split between policy and environment, the policy first. Only the
    policy's turns are in the loss. An answer that calls tools is a ``message``, which the chat template writes; ``completion``
    is then its text for people. ``tools`` are the schemas that the chat template gets, unless the prompt's environment has
    its own.

    Example: ``Example(prompt, "[38+47]85</think><answer>85</answer>", ("[38+47]", "85", "</think><answer>85</answer>"))``
    """

    prompt: Prompt
    completion: str
    turns: tuple[str, ...] = ()
    message: Message | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion. Every array has length T, including the end token if the model sampled one.

    ``logps`` are log-probs under the temperature-scaled, untruncated distribution, as the learner computes them too, so that
    the two can be compared. ``sampled_logps`` are those of the distribution that was sampled from (after top-k, top-p, min-p),
    and ``raw_logps`` those at temperature 1. They are the same array if the settings make no difference, and NaN if a sampler
    does not return them. ``loss_mask`` is False on tokens of an environment. ``versions`` lists the weights that sampled it, if
    they can change during a rollout: (first token, number of updates of those weights), in order. ``episode`` is set if it
    talked to a stateful environment.

    An agent's rollout may have several sequences, and so may a conversation whose chat template rewrites its history. They are
    one completion, so that they share its reward and advantage.
    ``contexts`` lists all but the first as (first token, context): from that token on, the completion follows these token ids
    instead of its prompt and the tokens before.

    ``routing``, if it was recorded, has the experts of the pass that predicted each token: those that the token before it
    took.

    Example: a completion "46" of two tokens, of which the second is the end token, has ``token_ids = [31, 2]``, ``text =
    "46"``, ``stop = "end"``, three arrays of 2 log-probs and ``loss_mask = [True, True]``
    """

    token_ids: Ints
    text: str
    stop: StopReason
    logps: Floats
    sampled_logps: Floats
    raw_logps: Floats
    loss_mask: Bools
    versions: tuple[tuple[int, int], ...] | None = None
    episode: EpisodeRecord | None = None
    contexts: tuple[tuple[int, Ints], ...] = ()
    routing: Routing | None = None

    @property
    def length(self) -> int:
        """Tokens that the policy sampled: |o_i| of the formulas."""
        return int(self.loss_mask.sum())

    @property
    def is_truncated(self) -> bool:
        return self.stop == "length"

    @property
    def packed_tokens(self) -> int:
        """Tokens in a pack, the contexts of further sequences included."""
        return len(self.token_ids) + sum(len(ids) for _, ids in self.contexts)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt. ``prompt_routing``, if it was recorded, has the experts of all prompt tokens but the
    last, whose experts are the first in the routing of each completion."""

    prompt: Prompt
    prompt_ids: Ints
    completions: tuple[Completion, ...]
    prompt_routing: Routing | None = None


@dataclass(frozen=True, slots=True)
class Aspect:
    """One reward's result for one completion.

    ``value`` is None if the reward does not apply, or if it failed: ``failure`` then says why. A failure is never a number.
    ``steps`` holds step rewards as (token index of the step's last token, reward), for process supervision.

    Example: ``Aspect("answer", 1.0, reason="'46' is right")``, ``Aspect("judge", None, failure="TimeoutError: …")``
    """

    name: str
    value: float | None
    weight: float = 1.0
    failure: str | None = None
    reason: str | None = None
    steps: tuple[tuple[int, float], ...] | None = None


@dataclass(frozen=True, slots=True)
class ScoredCompletion:
    """A completion with one aspect per reward.

    Example: with aspects ``answer`` = 1 (weight 1) and ``format`` = 0.5 (weight 0.2), ``total`` is 1.1
    """

    completion: Completion
    aspects: tuple[Aspect, ...]

    @property
    def failure(self) -> str | None:
        """Why this completion has no reward: its episode failed, an aspect of nonzero weight did, or no reward applied."""
        if self.completion.episode is not None and self.completion.episode.outcome.failure is not None:
            return self.completion.episode.outcome.failure
        for aspect in self.aspects:
            if aspect.failure is not None and aspect.weight != 0:
                return f"{aspect.name}: {aspect.failure}"
        counted = [a for a in self.aspects if a.weight != 0]
        if all(a.value is None and a.steps is None for a in counted):
            return "no reward applies"
        return None

    @property
    def total(self) -> float | None:
        """The weighted sum of its aspects; None if it has a `failure`. Aspects of weight 0 are recorded only."""
        if self.failure is not None:
            return None
        return float(sum(a.weight * a.value for a in self.aspects if a.value is not None and a.weight != 0))


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group with the rewards of its completions."""

    group: Group
    scored: tuple[ScoredCompletion, ...]

    @property
    def totals(self) -> tuple[float | None, ...]:
        return tuple(s.total for s in self.scored)


@dataclass(frozen=True, slots=True)
class GradedGroup:
    """A scored group with advantages, relative to the group: one per token of each completion.

    ``advantages[i]`` has the length of completion i. ``graded[i]`` is False if completion i has no reward or is masked (a
    truncated completion with `mask_cut`): it is then excluded from the loss and its denominators. Entropy controls mark tokens:
    ``kept[i]`` is False where the policy gradient is dropped, ``anchored[i]`` True where a change is penalised; either is empty
    if there is no such control.

    Example: rewards (1, 0) without scaling give ``advantages = ([0.5, 0.5, 0.5], [-0.5, -0.5])`` for 3 and 2 tokens
    """

    scored: ScoredGroup
    advantages: tuple[Floats, ...]
    graded: tuple[bool, ...]
    kept: tuple[Bools, ...] = ()
    anchored: tuple[Bools, ...] = ()

    @property
    def group(self) -> Group:
        return self.scored.group

    @property
    def has_signal(self) -> bool:
        """Whether any graded token has a nonzero advantage: a group of equal rewards has no gradient."""
        return any(bool((a != 0).any()) for a, g in zip(self.advantages, self.graded, strict=True) if g)

    @property
    def has_anchored_tokens(self) -> bool:
        """Whether a change of any token is penalised."""
        return any(bool(a.any()) for a in self.anchored)

    def advantage_of(self, index: int) -> float | None:
        """A completion's advantage, averaged over its tokens; None if it is excluded from the loss."""
        values = self.advantages[index]
        return float(values.mean()) if self.graded[index] and len(values) else None

    @property
    def best_first(self) -> list[int]:
        """Indices of the completions by advantage, highest first; those excluded from the loss last."""

        def key(index: int) -> tuple[bool, float]:
            value = self.advantage_of(index)
            return value is None, -(value or 0.0)

        return sorted(range(len(self.graded)), key=key)


@dataclass(frozen=True, slots=True)
class TokenStats:
    """The learner's statistics for each token of one completion, at the last update of the step. All of length T."""

    logps: Floats
    ratio: Floats
    entropy: Floats
    clipped: Bools
    kl: Floats | None = None


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of a stage, as run.db stores it.

    ``metrics`` are numbers by name (``oncurve.runs.metrics`` explains each); ``seconds`` is time by phase. ``stats[i][j]``
    belongs to completion j of ``groups[i]``, and is None if the learner did not forward it (a group without signal). It is
    empty if the stage forwards no completions.

    Example: ``StepReport("grpo", 17, {"reward": 0.61, "kl": 0.002}, {"sample": 1.9, "update": 0.8, "update/forward": 0.3})``
    """

    stage: str
    step: int
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]
    groups: Sequence[GradedGroup] = ()
    stats: Sequence[Sequence[TokenStats | None]] = ()

    @property
    def total_seconds(self) -> float:
        """Seconds of the complete step. A phase such as ``update/forward`` is part of ``update`` and not added again."""
        return sum(value for phase, value in self.seconds.items() if "/" not in phase)


@dataclass(frozen=True, slots=True)
class EvalReport:
    """An evaluation on held-out prompts: greedy by default, so that it gives the same result each time.

    ``accuracy`` is the fraction of held-out prompts answered correctly, or None if no verifiable reward defines it; ``reward``
    is then the measure. ``asked`` is the number of prompts, and ``by_difficulty`` maps a level to (correct, asked).

    Example: ``EvalReport("grpo", 200, 0.87, 200, {"1 digit": (40, 40), "2 digits": (134, 160)}, {"reward": 0.91})``
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
        """The mean total reward; None if no completion could be graded."""
        return self.metrics.get("reward")
