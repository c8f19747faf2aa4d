"""The library of experiences: a readable file, and what may be done to it: add, change, delete, keep.

The stage `training_free`: a step asks an endpoint, rewards the groups, and changes the library of experiences.

The relative advantage of a group's answers, a number in GRPO, is a sentence here: the teacher is shown the best and the worst
answer of each group whose rewards differ, with the library as it is, and says what to add, change, delete or keep. Every
request has a seed of its own, made from (seed, step, prompt, sample), and its reply is kept in the run's folder: a run that
goes on asks nothing twice.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
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
from oncurve.runs.step_notes import note
from oncurve.tasks.base import Task
from oncurve.tasks.prompt_order import prompts_for_step
from oncurve.training.stages.grpo import rollout_metrics
from oncurve.training.timing import PhaseClock

HEAD = "# Experiences\n\nEach is advice that goes before the question. Edit, add or delete lines as you like.\n\n"
_LINE = re.compile(r"- \*\*E(\d+)\*\* (.+)")
_LONGEST = 600
"""Characters of one experience: advice, not an essay."""


@dataclass(frozen=True)
class Library:
    """Experiences by number; a number is never given twice, so that a file's history can be followed."""

    entries: Mapping[int, str]
    last: int = 0

    @classmethod
    def load(cls, path: str | None) -> Library:
        """What a stage begins with: the file's experiences, or none."""
        return cls({}) if path is None else cls.read(Path(path))

    @classmethod
    def read(cls, path: Path) -> Library:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = "it can't be read" if path.exists() else "no such file"
            because = f"the library begins with it ({getattr(error, 'strerror', None) or error})"
            raise DataError(str(path), what, because=because, fix="check the path, or leave it out") from None
        found = {int(m[1]): m[2].strip() for m in map(_LINE.fullmatch, lines) if m}
        return cls(found, max(found, default=0))

    def write(self, path: Path) -> None:
        lines = "".join(f"- **E{number}** {text}\n" for number, text in sorted(self.entries.items()))
        write_file_atomically(path, (HEAD + (lines or "None yet.\n")).encode())

    @property
    def as_prompt(self) -> str:
        """As the model reads it; empty where there is nothing to tell."""
        if not self.entries:
            return ""
        lines = "\n".join(f"E{number}. {text}" for number, text in sorted(self.entries.items()))
        return f"Experiences from problems like this one. Use those that help:\n{lines}"

    def apply(self, changes: Sequence[Change], most: int) -> Library:
        """With the changes made in order. Beyond ``most`` the oldest goes. A change of what is not there does nothing."""
        entries, last = dict(self.entries), self.last
        for change in changes:
            if change.do == "add" and change.text and change.text not in entries.values():
                last += 1
                entries[last] = change.text
            elif change.do == "change" and change.number in entries and change.text:
                entries[change.number] = change.text
            elif change.do == "delete":
                entries.pop(change.number or 0, None)
        while len(entries) > most:
            entries.pop(min(entries))
        return Library(entries, last)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do to the library. ``keep`` does nothing, and says so."""

    do: str
    number: int | None = None
    text: str | None = None


def read_changes(reply: str) -> list[Change]:
    """A teacher's reply: a JSON list of {"do": "add" | "change" | "delete" | "keep", "number": …, "text": …}; text around it is
    passed over. Raises ValueError where there is none."""
    start, end = reply.find("["), reply.rfind("]")
    told = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    if not isinstance(told, list):
        raise ValueError("the teacher gave no JSON list of changes")
    return [_change(one) for one in told]


def _change(told: Any) -> Change:
    if not isinstance(told, dict) or told.get("do") not in ("add", "change", "delete", "keep"):
        raise ValueError(f"no change: {str(told)[:80]}")
    number, text = told.get("number"), told.get("text")
    digits = re.sub(r"\D", "", str(number)) if number is not None else ""
    words = " ".join(str(text).split())[:_LONGEST] if text is not None else None
    return Change(str(told["do"]), int(digits) if digits else None, words)


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
    """Holds the library; the policy of the recipe is not touched."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(self, stage: TrainingFree, seed: int, task: Task, rewards: RewardMix, folder: Path) -> None:
        self.stage, self.seed, self.task, self.rewards = stage, seed, task, rewards
        self.file = folder / FOLDER / f"{stage.label}.md"
        self.library = Library.load(stage.library)
        self.without: float | None = None
        self.client = client_of(stage, str(folder / FOLDER / f"{stage.label}.sqlite"))

    def state(self) -> dict[str, dict[str, Tensor]]:
        text = "\n".join(f"{number} {entry}" for number, entry in self.library.entries.items()).encode()
        numbers = torch.tensor([self.library.last, -1.0 if self.without is None else self.without], dtype=torch.float64)
        return {"library": {"text": torch.tensor(list(text), dtype=torch.uint8), "numbers": numbers}}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        lines = bytes(tensors["library"]["text"].tolist()).decode().split("\n")
        entries = {int(number): entry for number, _, entry in (line.partition(" ") for line in lines if line)}
        last, without = tensors["library"]["numbers"].tolist()
        self.library, self.without = Library(entries, int(last)), None if without < 0 else without

    def step(self, n: int) -> StepReport:
        clock = PhaseClock()
        with clock("sample"):
            prompts = prompts_for_step(self.task, self.seed, n - 1, self.stage.prompts_per_step)
            groups = self.sample(prompts, self.library, self.stage.group_size, n)
        with clock("score"):
            scored = self.rewards.score(groups)
        with clock("update"):
            changed = self.learn(scored, n)
        graded = grade(scored, baseline="mean", scale="group", eps=1e-4, mask_cut=False)
        metrics = rollout_metrics(graded, self.rewards) | {
            "experiences": float(len(self.library.entries)),
            "changes": float(changed),
        }
        metrics["tokens_per_s"] = metrics["tokens"] / max(sum(clock.seconds.values()), 1e-9)
        if self.stage.measure and (n == self.stage.steps or (self.stage.eval_every and n % self.stage.eval_every == 0)):
            with clock("eval"):
                metrics |= self.measure()
        return StepReport(self.stage.label, n, metrics, clock.seconds, graded)

    def sample(self, prompts: Sequence[Prompt], library: Library, count: int, n: int) -> list[Group]:
        """Groups through the endpoint. What can't be had ends the stage: an endpoint that is down is not a wrong answer."""
        asked = [(p, s) for p in prompts for s in range(count)]
        replies = run_coroutine([self.client.ask(self._request(p, library, s, n), str) for p, s in asked])
        failed = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        if failed is not None:
            raise RewardError(
                f"{self.stage.label}.base_url",
                f"the endpoint did not answer ({sum(isinstance(r, BaseException) for r in replies)} of {len(replies)})",
                because=str(failed),
                fix="check that it runs and knows the model; oncurve train --resume goes on from the last step",
            )
        rows = [replies[i * count : (i + 1) * count] for i in range(len(prompts))]
        return [Group(p, np.zeros(1, np.int64), tuple(map(_completion, texts))) for p, texts in zip(prompts, rows, strict=True)]

    def learn(self, scored: Sequence[ScoredGroup], n: int) -> int:
        """Shows the teacher each group that has something to teach, and makes its changes; how many there were."""
        pairs = [pair for pair in map(pair_of, scored) if pair is not None]
        asked = [self._lesson(pair, n, i) for i, pair in enumerate(pairs)]
        replies = run_coroutine([self.client.ask(request, read_changes) for request in asked])
        made = 0
        for reply in replies:
            if isinstance(reply, BaseException):
                note("teacher", f"a reply of the teacher was left out: {str(reply)[:120]}")
                continue
            changed = self.library.apply(reply, self.stage.most)
            made += changed != self.library
            self.library = changed
        self.library.write(self.file)
        return made

    def measure(self) -> dict[str, float]:
        """Held-out accuracy, or reward where no rule says what is right, with the library and without it: the latter is asked
        once."""
        prompts = list(self.task.heldout)
        if not prompts:
            return {}
        if self.without is None:
            self.without = self._measured(prompts, Library({}))
        what = "heldout_reward" if self.rewards.accuracy_reward is None else "heldout"
        return {f"{what}_without": self.without, f"{what}_with": self._measured(prompts, self.library)}

    def _measured(self, prompts: Sequence[Prompt], library: Library) -> float:
        scored = [s for g in self.rewards.score(self.sample(prompts, library, 1, 0)) for s in g.scored]
        if self.rewards.accuracy_reward is None:
            return float(np.mean([s.total for s in scored if s.total is not None] or [math.nan]))
        return float(np.mean([self.rewards.is_correct(s) for s in scored]))

    def _request(self, prompt: Prompt, library: Library, sample: int, n: int) -> dict[str, Any]:
        messages = [dict(m) for m in prompt.messages or ()] or [{"role": "user", "content": prompt.text or ""}]
        if library.as_prompt:
            place = next(i for i, m in enumerate(messages) if m["role"] != "system")
            messages[place] = {**messages[place], "content": f"{library.as_prompt}\n\n{messages[place]['content']}"}
        how = self.stage.sampling
        warmth = how.temperature if n else 0.0
        return {
            "model": self.stage.model,
            "messages": messages,
            "temperature": warmth,
            "top_p": how.top_p,
            "max_tokens": how.max_new_tokens,
            "seed": derive_seed(self.seed, f"training_free/{n}/{prompt.id}/{sample}") & 0x7FFFFFFF,
        }

    def _lesson(self, pair: Mapping[str, Any], n: int, place: int) -> dict[str, Any]:
        asked = pair["prompt"] if isinstance(pair["prompt"], str) else pair["prompt"][-1]["content"]
        told = f"{self.library.as_prompt or 'The library is empty.'}\n\nQuestion:\n{asked}\n\n"
        told += f"Better answer:\n{pair['chosen']}\n\nWorse answer:\n{pair['rejected']}"
        return {
            "model": self.stage.teacher or self.stage.model,
            "messages": [{"role": "system", "content": TEACH}, {"role": "user", "content": told}],
            "temperature": 0.0,
            "max_tokens": self.stage.reply_tokens,
            "seed": derive_seed(self.seed, f"training_free/teach/{n}/{place}") & 0x7FFFFFFF,
        }


def client_of(stage: TrainingFree, cache: str | None = None) -> JudgeClient:
    """Who asks the stage's endpoint. Raises where it has no address, or no key that it needs."""
    return JudgeClient(
        stage.label, stage.base_url, stage.key_env, retries=stage.retries, seconds=stage.request_seconds,
        at_once=stage.at_once, cache=cache,
    )  # fmt: skip


def _completion(text: str) -> Completion:
    """An endpoint's reply as a record: its words stand for tokens, and nothing is known of their probabilities."""
    ids = np.asarray([zlib.crc32(part.encode()) for part in text.split()] or [0], np.int64)
    nothing = np.zeros(len(ids), np.float32)
    return Completion(ids, text, "end", nothing, nothing, nothing, np.ones(len(ids), bool))
