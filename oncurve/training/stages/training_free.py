"""The stage `training_free`: samples through an endpoint, rewards the groups, and edits a library of experiences.

The relative advantage of a group's completions, a number in GRPO, is a sentence here: the teacher gets the best and the worst
completion of each group whose rewards differ, and the library, and says what to add, change, delete or keep. The library is a
readable file. Every request has its own seed, a function of (seed, step, prompt, sample), and its reply is stored in the run's
folder: a resumed run sends no request twice.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.advantages import grade
from oncurve.errors import DataError, RewardError
from oncurve.recipe.schema.stages import TrainingFree
from oncurve.records import Completion, Group, Prompt, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.judge_client import JudgeClient
from oncurve.rewards.python_function import run_coroutine
from oncurve.rng import derive_seed
from oncurve.runs.atomic_files import write_file_atomically
from oncurve.runs.preference_pairs import pair_of
from oncurve.runs.step_notes import mark_update, note, report_progress
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.stages.grpo import Budget, rollout_metrics, stop_if_rewards_fail
from oncurve.training.timing import PhaseClock

HEAD = "# Experiences\n\nEach is advice that goes before the question. Edit, add or delete lines as you like.\n\n"
_LINE = re.compile(r"- \*\*E(\d+)\*\* (.+)")
_MAX_CHARACTERS = 600
"""Length limit of one experience: advice, not an essay."""


@dataclass(frozen=True)
class Library:
    """Experiences by number. A number is never reused, so that the file's history can be followed."""

    entries: Mapping[int, str]
    last: int = 0

    @classmethod
    def load(cls, path: str | None) -> Library:
        """The experiences that a stage starts with: those of the file, or none."""
        return cls({}) if path is None else cls.read(Path(path))

    @classmethod
    def read(cls, path: Path) -> Library:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = "can't be read" if path.exists() else "no such file"
            because = f"the library starts with it ({getattr(error, 'strerror', None) or error})"
            raise DataError(str(path), what, because=because, fix="check the path, or leave it out") from None
        entries = {int(m[1]): m[2].strip() for m in map(_LINE.fullmatch, lines) if m}
        return cls(entries, max(entries, default=0))

    def write(self, path: Path) -> None:
        lines = "".join(f"- **E{number}** {text}\n" for number, text in sorted(self.entries.items()))
        write_file_atomically(path, (HEAD + (lines or "None yet.\n")).encode())

    @property
    def as_prompt(self) -> str:
        """The library as the model reads it; empty if it has no entries."""
        if not self.entries:
            return ""
        lines = "\n".join(f"E{number}. {text}" for number, text in sorted(self.entries.items()))
        return f"Experiences from problems like this one. Use those that help:\n{lines}"

    def apply(self, changes: Sequence[Change], max_entries: int) -> Library:
        """The library after the changes, in order. If it has too many entries, the oldest are removed. A change to an entry
        that does not exist is ignored."""
        entries, last = dict(self.entries), self.last
        for change in changes:
            if change.do == "add" and change.text and change.text not in entries.values():
                last += 1
                entries[last] = change.text
            elif change.do == "change" and change.number in entries and change.text:
                entries[change.number] = change.text
            elif change.do == "delete":
                entries.pop(change.number or 0, None)
        while len(entries) > max_entries:
            entries.pop(min(entries))
        return Library(entries, last)


@dataclass(frozen=True, slots=True)
class Change:
    """One edit of the library. ``keep`` changes nothing."""

    do: str
    number: int | None = None
    text: str | None = None


def parse_changes(reply: str) -> list[Change]:
    """Parses a teacher's reply: a JSON list of {"do": "add" | "change" | "delete" | "keep", "number": …, "text": …}.

    Text around the list is ignored. Raises ValueError if there is no list.
    """
    start, end = reply.find("["), reply.rfind("]")
    items = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    if not isinstance(items, list):
        raise ValueError("the teacher gave no JSON list of changes")
    return [_parse_change(item) for item in items]


def _parse_change(item: Any) -> Change:
    if not isinstance(item, dict) or item.get("do") not in ("add", "change", "delete", "keep"):
        raise ValueError(f"not a change: {str(item)[:80]}")
    number, text = item.get("number"), item.get("text")
    digits = re.sub(r"\D", "", str(number)) if number is not None else ""
    words = " ".join(str(text).split())[:_MAX_CHARACTERS] if text is not None else None
    return Change(str(item["do"]), int(digits) if digits else None, words)


FOLDER = "experience"
TEACH = (
    "You improve a small library of experiences: short, general pieces of advice that are shown to a model before it answers. "
    "Below are a question and two answers to it, a better and a worse one by the grader. Say what general advice would have "
    "turned the worse into the better one. Never give the answer to this question itself. "
    'Reply with a JSON list and nothing else. Each item is {"do": "add", "text": "…"}, '
    '{"do": "change", "number": 3, "text": "…"}, {"do": "delete", "number": 3} or '
    '{"do": "keep"}. Add only what the library does not say yet.'
)


class TrainingFreeLoop:
    """The loop of the stage `training_free`. It holds the library; the recipe's policy is not used. ``folder`` is the run's."""

    def __init__(self, stage: TrainingFree, seed: int, task: Task, rewards: RewardMix, folder: Path) -> None:
        self.stage, self.seed, self.task, self.rewards, self.budget = stage, seed, task, rewards, Budget(stage)
        self.file = folder / FOLDER / f"{stage.label}.md"
        self.library = Library.load(stage.library)
        self.without_library: float | None = None
        """The held-out measurement without a library, once it was made."""
        self.client = build_client(stage, str(folder / FOLDER / f"{stage.label}.sqlite"))

    @property
    def is_over(self) -> bool:
        return self.budget.is_spent

    def state(self) -> dict[str, dict[str, Tensor]]:
        text = "\n".join(f"{number} {entry}" for number, entry in self.library.entries.items()).encode()
        without = -1.0 if self.without_library is None else self.without_library
        numbers = torch.tensor([self.library.last, without], dtype=torch.float64)
        return {"library": {"text": torch.tensor(list(text), dtype=torch.uint8), "numbers": numbers}, **self.budget.state()}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        lines = bytes(tensors["library"]["text"].tolist()).decode().split("\n")
        entries = {int(number): entry for number, _, entry in (line.partition(" ") for line in lines if line)}
        last, without = tensors["library"]["numbers"].tolist()
        self.library, self.without_library = Library(entries, int(last)), None if without < 0 else without
        self.budget.load_state(tensors)

    def step(self, n: int) -> StepReport:
        clock = PhaseClock()
        with clock("sample"):
            prompts = prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step)
            groups = self.sample(prompts, self.library, self.stage.group_size, n)
        with clock("score"):
            scored = self.rewards.score(groups)
        stop_if_rewards_fail(self.stage, scored)
        with clock("update"):
            changes = self.edit_library(scored, n)
        graded = grade(scored, baseline="mean", scale="group", eps=1e-4, mask_cut=False)
        metrics = rollout_metrics(graded, self.rewards) | {
            "experiences": float(len(self.library.entries)),
            "changes": float(changes),
        }
        seconds = max(sum(clock.seconds.values()), 1e-9)
        self.budget.spend(metrics["tokens"], seconds)
        metrics["tokens_per_s"] = metrics["tokens"] / seconds
        is_last = n == self.stage.steps or self.is_over
        if self.stage.measure and (is_last or (self.stage.eval_every and n % self.stage.eval_every == 0)):
            with clock("eval"):
                metrics |= self.measure()
        return StepReport(self.stage.label, n, metrics, clock.seconds, graded)

    def sample(
        self,
        prompts: Sequence[Prompt],
        library: Library,
        count: int,
        n: int,
        on_reply: Callable[[float], None] = lambda share: None,
    ) -> list[Group]:
        """Groups from the endpoint. A failed request ends the stage: an endpoint that is down is not a wrong answer.
        ``on_reply`` gets the fraction of the requests that is done."""
        samples = [(p, s) for p in prompts for s in range(count)]
        done = 0

        async def ask(request: dict[str, Any]) -> str:
            nonlocal done
            reply = await self.client.ask(request, str)
            done += 1
            on_reply(done / len(samples))
            return reply

        replies = run_coroutine([ask(self._sample_request(p, library, s, n)) for p, s in samples])
        failure = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        if failure is not None:
            raise RewardError(
                f"{self.stage.label}.base_url",
                f"the endpoint did not answer ({sum(isinstance(r, BaseException) for r in replies)} of {len(replies)})",
                because=str(failure),
                fix="check that it runs and serves the model; oncurve train --resume continues from the last step",
            )
        by_prompt = [replies[i * count : (i + 1) * count] for i in range(len(prompts))]
        return [
            Group(prompt, np.zeros(1, np.int64), tuple(map(_as_completion, texts)))
            for prompt, texts in zip(prompts, by_prompt, strict=True)
        ]

    def edit_library(self, scored: Sequence[ScoredGroup], n: int) -> int:
        """Shows the teacher each group whose rewards differ, and applies its changes. Returns how many replies changed it."""
        pairs = [pair for pair in map(pair_of, scored) if pair is not None]
        requests = [self._teacher_request(pair, n, i) for i, pair in enumerate(pairs)]
        replies = run_coroutine([self.client.ask(request, parse_changes) for request in requests])
        edits = 0
        mark_update()
        for reply in replies:
            if isinstance(reply, BaseException):
                note("teacher", f"a reply of the teacher was ignored: {str(reply)[:120]}")
                continue
            edited = self.library.apply(reply, self.stage.most)
            edits += edited != self.library
            self.library = edited
        self.library.write(self.file)
        return edits

    def measure(self) -> dict[str, float]:
        """Held-out accuracy, or mean reward if there is no verifiable reward, with and without the library.

        Without the library it is measured once.
        """
        prompts = list(self.task.heldout)
        if not prompts:
            return {}
        report_progress(0.0)
        start = 0.0
        if self.without_library is None:
            self.without_library = self._measure_with(prompts, Library({}), lambda share: report_progress(share / 2))
            start = 0.5
        with_library = self._measure_with(prompts, self.library, lambda share: report_progress(start + (1 - start) * share))
        metric = "heldout_reward" if self.rewards.accuracy_reward is None else "heldout"
        return {f"{metric}_without": self.without_library, f"{metric}_with": with_library}

    def _measure_with(self, prompts: Sequence[Prompt], library: Library, on_reply: Callable[[float], None]) -> float:
        scored = [s for g in self.rewards.score(self.sample(prompts, library, 1, 0, on_reply)) for s in g.scored]
        if self.rewards.accuracy_reward is None:
            return float(np.mean([s.total for s in scored if s.total is not None] or [math.nan]))
        return float(np.mean([self.rewards.is_correct(s) for s in scored]))

    def _sample_request(self, prompt: Prompt, library: Library, sample: int, n: int) -> dict[str, Any]:
        messages = [dict(m) for m in prompt.messages or ()] or [{"role": "user", "content": prompt.text or ""}]
        if library.as_prompt:
            first = next(i for i, m in enumerate(messages) if m["role"] != "system")
            messages[first] = {**messages[first], "content": f"{library.as_prompt}\n\n{messages[first]['content']}"}
        sampling = self.stage.sampling
        request = {
            "model": self.stage.model,
            "messages": messages,
            "temperature": sampling.temperature if n else 0.0,
            "top_p": sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "seed": derive_seed(self.seed, f"training_free/{n}/{prompt.id}/{sample}") & 0x7FFFFFFF,
        }
        return {**request, "stop": list(sampling.stop)} if sampling.stop else request

    def _teacher_request(self, pair: Mapping[str, Any], n: int, index: int) -> dict[str, Any]:
        question = pair["prompt"] if isinstance(pair["prompt"], str) else pair["prompt"][-1]["content"]
        content = f"{self.library.as_prompt or 'The library is empty.'}\n\nQuestion:\n{question}\n\n"
        content += f"Better answer:\n{pair['chosen']}\n\nWorse answer:\n{pair['rejected']}"
        return {
            "model": self.stage.teacher or self.stage.model,
            "messages": [{"role": "system", "content": TEACH}, {"role": "user", "content": content}],
            "temperature": 0.0,
            "max_tokens": self.stage.reply_tokens,
            "seed": derive_seed(self.seed, f"training_free/teach/{n}/{index}") & 0x7FFFFFFF,
        }


def build_client(stage: TrainingFree, cache: str | None = None) -> JudgeClient:
    """The client of the stage's endpoint. Raises an OncurveError if the address is bad or its key is missing."""
    return JudgeClient(
        stage.label, stage.base_url, stage.key_env, retries=stage.retries, seconds=stage.request_seconds,
        at_once=stage.at_once, cache=cache,
    )  # fmt: skip


def _as_completion(text: str) -> Completion:
    """An endpoint's reply as a completion: words stand for tokens, and their probabilities are unknown (0)."""
    ids = np.asarray([zlib.crc32(word.encode()) for word in text.split()] or [0], np.int64)
    unknown = np.zeros(len(ids), np.float32)
    return Completion(ids, text, "end", unknown, unknown, unknown, np.ones(len(ids), bool))


def check_data(stage: TrainingFree) -> None:
    """Reads the library and builds the client: a missing file or key is found before the run starts."""
    Library.load(stage.library)
    build_client(stage)
