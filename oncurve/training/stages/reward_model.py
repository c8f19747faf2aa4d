"""The stage `reward_model`: one optimiser update per step on comparisons, ratings or judged steps.

loss = mean over the update's rows of −log σ(±(r_chosen − r_rejected) − margin) for pairs, of the squared error for ratings,
and over judged steps of the cross-entropy at each step's last token; several heads are averaged over those that have a say.
Texts are read as the reward `model` (or `process`) will read them: through the chat template where the tokenizer has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from oncurve.algos.preference_losses import bradley_terry, calibration_error
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.heads.classifier import build_classifier, classify, load_classifier, save
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import RewardModel
from oncurve.records import StepReport
from oncurve.rewards.models.reward_model import TRAINED, batches, conversation, step_ends
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.step_notes import note, report_progress
from oncurve.tasks.data.preference_pairs import left_out_text
from oncurve.tasks.data.reward_model_data import RewardModelData, RewardModelExample, read_reward_model_data
from oncurve.tasks.prompt_order import batch_indices
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.memory_stats import peak_memory_mib
from oncurve.training.timing import PhaseClock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """A row as token ids: one text, or the chosen and the rejected one; ``ends`` are the places of steps' last tokens."""

    rows: tuple[tuple[int, ...], ...]
    values: tuple[float | None, ...]
    margin: float
    ends: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.rows))

    @property
    def cost(self) -> int:
        return len(self.rows) * self.length


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """What the model said of some rows: their loss summed, how many numbers it is a sum of, and how often it was right.

    ``probability_B`` is what it gave to the truth, for each thing it could be right about.
    """

    loss: Tensor
    count: int
    probability_B: Tensor
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class GlobalScores:
    """The same of all rows of a step, whichever rank scored them."""

    loss: float
    count: int
    probability_B: Tensor
    gap: float


class RewardModelLoop(PackedStage):
    """Trains the reward model; the policy is only where it starts from. ``folder`` is the run's own."""

    out_of_time = False
    """Its length is counted in steps alone."""

    def __init__(
        self, stage: RewardModel, seed: int, policy: Policy, folder: Path, judgements: RewardModelData | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        self.stage, self.seed, self.policy, self.folder = stage, seed, policy, folder / TRAINED / stage.label
        self.world, self.tokens_per_pack = world, stage.tokens_per_pack
        told = judgements or read_reward_model_data(stage)
        by_token = stage.kind == "steps"
        self.model = (
            build_classifier(policy, stage.heads, seed, by_token=by_token)
            if stage.source is None
            else load_classifier(stage.source, stage.heads, policy, by_token=by_token)
        )
        world.broadcast_([p.detach() for p in self.model.parameters()])  # transformers may have drawn a head
        self.left_out = dict(told.left_out)
        self.train, self.heldout = self._coded(told.train), self._coded(told.heldout)
        self.optimiser = build_optimiser(self.model, stage.optimiser, stage.steps, world)

    def state(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"optimiser": self.optimiser.state(), "reward_model": weights}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        for name, p in self.model.named_parameters():
            p.copy_(tensors["reward_model"][name])

    def step(self, n: int) -> StepReport:
        """Update number n, from 1. The last one writes the model."""
        clock = PhaseClock(self.world.set_phase)
        if n == 1 and self.left_out:
            note("data", f"{left_out_text(self.left_out)} left out")
        chosen = [self.train[i] for i in batch_indices(len(self.train), self.seed, n - 1, self.stage.batch_size)]
        with clock("update"):
            metrics = self.update(chosen)
        if n == self.stage.steps or (self.stage.eval_every and n % self.stage.eval_every == 0):
            with clock("eval"):
                metrics |= self.measure(self.heldout)
        if n == self.stage.steps:
            self.write()
        metrics |= {
            "examples_seen": float(n * self.stage.batch_size),
            "epoch": n * self.stage.batch_size / len(self.train),
            "tokens_per_s": metrics["tokens"] / clock.seconds["update"],
            "memory_mib": peak_memory_mib(self.model.device),
        }
        return StepReport(self.stage.label, n, metrics, clock.seconds)

    def update(self, chosen: Sequence[TokenizedExample]) -> dict[str, float]:
        """One optimiser update. The split into batches and over ranks changes nothing: losses are divided by the update's own
        count."""
        total = sum(_count(coded) for coded in chosen)

        def attempt(parts: list[list[TokenizedExample]]) -> GlobalScores:
            self.optimiser.zero_grad()
            seen = []
            for part in parts:
                scored = self.score(part)
                (scored.loss / total).backward()  # type: ignore[no-untyped-call]
                self.optimiser.add_autograd_grads()
                seen.append(to_global(scored))
            return merge_scores(seen)

        found = self._of_all(self._in_fitting_parts(chosen, attempt))
        done = self.optimiser.step(lambda: {"loss": found.loss / total})
        return {
            "loss": found.loss / total,
            **_right(found),
            **done.metrics,
            "tokens": float(sum(len(row) for coded in chosen for row in coded.rows)),
        }

    @torch.no_grad()
    def measure(self, rows: Sequence[TokenizedExample]) -> dict[str, float]:
        """Loss, accuracy and calibration on rows that were kept aside."""
        if not rows:
            return {}

        def attempt(parts: list[list[TokenizedExample]]) -> GlobalScores:
            seen: list[GlobalScores] = []
            for part in parts:
                report_progress(len(seen) / len(parts))
                seen.append(to_global(self.score(part)))
            return merge_scores(seen)

        found = self._of_all(self._in_fitting_parts(rows, attempt))
        told = {"heldout_loss": found.loss / found.count}
        if len(found.probability_B):
            told["heldout_pair_accuracy"] = _accuracy(found.probability_B)
            told["calibration_error"] = calibration_error(found.probability_B)
        return told

    def _of_all(self, own: GlobalScores) -> GlobalScores:
        """What all ranks heard of their rows, the same on each."""
        parts = self.world.all_gather_dict({self.world.rank: own})
        return merge_scores([parts[rank] for rank in sorted(parts)])

    def score(self, rows: Sequence[TokenizedExample]) -> ScoreSums:
        return SCORES[self.stage.kind](self.model, rows)

    def write(self) -> None:
        """As a standard checkpoint; by the first rank."""
        self.world.on_rank_zero(
            lambda: write_folder_atomically(self.folder, lambda aside: save(self.model, self.policy.tokenizer, aside))
        )

    def _in_fitting_parts(self, rows: Sequence[TokenizedExample], work: Callable[[list[list[TokenizedExample]]], T]) -> T:
        """What ``work`` makes of this rank's part of the rows in batches."""
        costs = [coded.cost for coded in rows]
        own = self.world.local_indices(costs)

        def attempt(budget: int) -> T:
            return work([[rows[i] for i in part] for part in batches(own, costs, budget)])

        budget = max(min(self.tokens_per_pack, len(rows) * max(costs)), max(costs))
        return self.with_oom_retry(attempt, budget, max(costs))

    def _coded(self, judged: Sequence[RewardModelExample]) -> list[TokenizedExample]:
        coded = [tokenize_example(self.policy.tokenizer, one, self.stage.kind) for one in judged]
        limit = longest_example(self.stage, self.policy)
        short = [one for one in coded if one.length <= limit]
        if len(short) < len(coded):
            reason = f"of more than {limit} tokens"
            self.left_out[reason] = self.left_out.get(reason, 0) + len(coded) - len(short)
        return short


def longest_example(stage: RewardModel, policy: Policy) -> int:
    """Tokens of the longest text that is learned from: as many as the stage says, and as the model addresses."""
    return min(stage.max_tokens, policy.max_positions)


def check_lengths(stage: RewardModel, policy: Policy, judged: Sequence[RewardModelExample]) -> None:
    """Raises where every row is too long; the first that is not ends the search."""
    limit = longest_example(stage, policy)
    if not any(tokenize_example(policy.tokenizer, one, stage.kind).length <= limit for one in judged):
        raise DataError(
            stage.data,
            "nothing to learn from",
            because=f"all {len(judged)} rows have more than {limit} tokens: {stage.label}.max_tokens is {stage.max_tokens}, "
            f"and the model addresses {policy.max_positions} positions",
            fix=f"raise {stage.label}.max_tokens, use a model with a longer context, or give shorter rows",
        )


def tokenize_example(tokenizer: Any, judged: RewardModelExample, kind: str) -> TokenizedExample:
    """A row as the reward will read it."""
    if kind == "steps":
        ids, ends = step_ends(tokenizer, judged.prompt, judged.texts)
        return TokenizedExample((tuple(ids),), judged.values, 0.0, tuple(ends))
    texts = [conversation(tokenizer, judged.prompt, text) for text in judged.texts]
    rows = tuple(tuple(tokenizer(text, add_special_tokens=special)["input_ids"]) for text, special in texts)
    return TokenizedExample(rows, judged.values, judged.margin)


def score_pairs(model: Any, rows: Sequence[TokenizedExample]) -> ScoreSums:
    """Both completions of a pair in one batch; heads without a say count nothing."""
    out = classify(model, [row for coded in rows for row in coded.rows])
    chosen_BA, rejected_BA = out[0::2], out[1::2]
    sign_BA = torch.tensor([coded.values for coded in rows], dtype=torch.float32, device=out.device)
    margin_B = torch.tensor([coded.margin for coded in rows], device=out.device)
    loss_BA = bradley_terry(chosen_BA, rejected_BA, sign_BA, margin_B)
    gap_BA = (sign_BA * (chosen_BA - rejected_BA)).detach()
    said_BA = sign_BA != 0
    return ScoreSums(loss_BA.sum(), int(said_BA.sum()), torch.sigmoid(gap_BA[said_BA]).cpu(), float(gap_BA[said_BA].sum()))


def score_ratings(model: Any, rows: Sequence[TokenizedExample]) -> ScoreSums:
    out_BA = classify(model, [coded.rows[0] for coded in rows])
    nothing = float("nan")
    wanted = [[nothing if v is None else v for v in coded.values] for coded in rows]
    wanted_BA = torch.tensor(wanted, dtype=torch.float32, device=out_BA.device)
    said_BA = ~wanted_BA.isnan()
    loss = ((out_BA - wanted_BA)[said_BA]).square().sum()
    return ScoreSums(loss, int(said_BA.sum()), torch.empty(0))


def score_steps(model: Any, rows: Sequence[TokenizedExample]) -> ScoreSums:
    out = classify(model, [coded.rows[0] for coded in rows])
    at = [(i, end) for i, coded in enumerate(rows) for end in coded.ends]
    where, ends = (torch.tensor(x, device=out.device) for x in zip(*at, strict=True))
    labels = torch.tensor([int(v or 0) for coded in rows for v in coded.values], device=out.device)
    picked_NL = out[where, ends]
    probability_B = picked_NL.detach().softmax(-1).gather(1, labels[:, None])[:, 0]
    return ScoreSums(functional.cross_entropy(picked_NL, labels, reduction="sum"), len(labels), probability_B.cpu())


SCORES: dict[str, Callable[[Any, Sequence[TokenizedExample]], ScoreSums]] = {
    "pairs": score_pairs,
    "ratings": score_ratings,
    "steps": score_steps,
}


def _count(coded: TokenizedExample) -> int:
    """How many numbers a row adds to the loss."""
    return sum(v is not None for v in coded.values) if len(coded.rows) == 1 else sum(v != 0 for v in coded.values)


def to_global(scored: ScoreSums) -> GlobalScores:
    return GlobalScores(float(scored.loss.detach()), scored.count, scored.probability_B, scored.gap)


def merge_scores(parts: Sequence[GlobalScores]) -> GlobalScores:
    """Of several parts, or of none."""
    probability_B = torch.cat([torch.empty(0), *(part.probability_B for part in parts)])
    loss, gap = sum(part.loss for part in parts), sum(part.gap for part in parts)
    return GlobalScores(loss, sum(part.count for part in parts), probability_B, gap)


def _right(found: GlobalScores) -> dict[str, float]:
    if not len(found.probability_B):
        return {}
    return {"pair_accuracy": _accuracy(found.probability_B), "pair_margin": found.gap / len(found.probability_B)}


def _accuracy(probability_B: Tensor) -> float:
    return float((probability_B > 0.5).double().mean() + 0.5 * (probability_B == 0.5).double().mean())
