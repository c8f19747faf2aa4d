"""The stage `reward_model`: one optimiser update per step on comparisons, ratings or judged steps of reasoning.

The loss is a mean over the batch: −log σ(±(r_chosen − r_rejected) − margin) for pairs, the squared error for ratings, and the
cross-entropy at each step's last token for judged steps. With several heads it is averaged over those that have a label.
Texts are encoded as the rewards `model` and `process` encode them: through the chat template, if the tokenizer has one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from oncurve.algos.preference_losses import bradley_terry, calibration_error
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError
from oncurve.models.heads.classifier import build_classifier, check_classifier, classify, load_classifier, save
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Optimiser as OptimiserSettings
from oncurve.recipe.schema.stages import RewardModel
from oncurve.rewards.models.reward_model import TRAINED, batches, conversation, step_ends
from oncurve.runs.atomic_files import write_folder_atomically
from oncurve.runs.step_notes import report_progress
from oncurve.tasks.base import Task
from oncurve.tasks.data.reward_model_data import RewardModelData, RewardModelExample, read_reward_model_data
from oncurve.training.learner.activation_checkpointing import Checkpointing, checkpoint_modules, decoder_layers
from oncurve.training.learner.oom_retry import PackedStage
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.offline import OfflineStage
from oncurve.training.timing import PhaseClock

T = TypeVar("T")
Kind = Literal["pairs", "ratings", "steps"]


@dataclass(frozen=True, slots=True)
class TokenizedExample:
    """One text, or the chosen and the rejected one, as token ids. ``ends`` are the indices of the steps' last tokens."""

    texts: tuple[tuple[int, ...], ...]
    values: tuple[float | None, ...]
    margin: float
    ends: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return max(map(len, self.texts))

    @property
    def cost(self) -> int:
        """Tokens in a batch, where texts are padded to the longest."""
        return len(self.texts) * self.length

    @property
    def label_count(self) -> int:
        """How many terms the example adds to the loss."""
        return sum(v is not None for v in self.values) if len(self.texts) == 1 else sum(v != 0 for v in self.values)


@dataclass(frozen=True, slots=True)
class BatchScores:
    """What the model scored on a batch: the summed loss, and the number of its terms.

    ``probability_B`` is the probability of each label that can be right or wrong; ``gap`` sums r_chosen − r_rejected.
    """

    loss: Tensor
    count: int
    probability_B: Tensor
    gap: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreSums:
    """`BatchScores` of several batches, on the host."""

    loss: float
    count: int
    probability_B: Tensor
    gap: float


class RewardModelTrainer(PackedStage):
    """A reward model with its optimiser: starts from the policy's backbone, or from ``source``. It is written to ``folder``."""

    def __init__(
        self,
        policy: Policy,
        folder: Path,
        *,
        kind: Kind,
        heads: Sequence[str],
        source: str | None,
        optimiser: OptimiserSettings,
        updates: int,
        tokens_per_pack: int,
        checkpointing: Checkpointing,
        seed: int,
        world: World,
    ) -> None:
        self.policy, self.folder, self.kind, self.heads, self.world = policy, folder, kind, heads, world
        self.tokens_per_pack = tokens_per_pack
        by_token = kind == "steps"
        self.model = (
            build_classifier(policy, heads, seed, by_token=by_token)
            if source is None
            else load_classifier(source, heads, policy, by_token=by_token)
        )
        if checkpointing == "on":
            layers = decoder_layers(self.model.base_model)
            checkpoint_modules(layers, len(layers))
        world.broadcast_([p.detach() for p in self.model.parameters()])  # transformers may have initialised a head at random
        self.optimiser = build_optimiser(self.model, optimiser, updates, world)

    def state(self) -> dict[str, dict[str, Tensor]]:
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"optimiser": self.optimiser.state(), "reward_model": weights}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        for name, p in self.model.named_parameters():
            p.copy_(tensors["reward_model"][name])

    def update(self, examples: Sequence[TokenizedExample]) -> dict[str, float]:
        """One optimiser update. The loss is divided by the update's own count, so the split into batches changes nothing."""
        total = sum(example.label_count for example in examples)

        def attempt(parts: list[list[TokenizedExample]]) -> ScoreSums:
            self.optimiser.zero_grad()
            sums = []
            for part in parts:
                scores = self._score(part)
                self.optimiser.scaled(scores.loss / total).backward()  # type: ignore[no-untyped-call]
                self.optimiser.add_autograd_grads()
                sums.append(to_host(scores))
            return add_scores(sums)

        sums = self._on_fitting_batches(examples, attempt)
        done = self.optimiser.step(lambda: {"loss": sums.loss / total})
        return {
            "loss": sums.loss / total,
            **_pair_metrics(sums),
            **done.metrics,
            "tokens": float(sum(len(text) for example in examples for text in example.texts)),
        }

    @torch.no_grad()
    def measure(self, examples: Sequence[TokenizedExample]) -> dict[str, float]:
        """Loss, accuracy and calibration error on held-out examples."""
        if not examples:
            return {}

        def attempt(parts: list[list[TokenizedExample]]) -> ScoreSums:
            sums: list[ScoreSums] = []
            for part in parts:
                report_progress(len(sums) / len(parts))
                sums.append(to_host(self._score(part)))
            return add_scores(sums)

        sums = self._on_fitting_batches(examples, attempt)
        metrics = {"heldout_loss": sums.loss / sums.count}
        if len(sums.probability_B):
            metrics["heldout_pair_accuracy"] = _accuracy(sums.probability_B)
            metrics["calibration_error"] = calibration_error(sums.probability_B)
        return metrics

    def write(self) -> None:
        """Collective: rank 0 writes the model as a standard checkpoint."""
        self.world.on_rank_zero(
            lambda: write_folder_atomically(self.folder, lambda folder: save(self.model, self.policy.tokenizer, folder))
        )

    def _score(self, examples: Sequence[TokenizedExample]) -> BatchScores:
        return SCORERS[self.kind](self.model, examples)

    def _on_fitting_batches(
        self, examples: Sequence[TokenizedExample], work: Callable[[list[list[TokenizedExample]]], ScoreSums]
    ) -> ScoreSums:
        """The sum over ranks of ``work`` on each rank's share of the examples, in batches that fit into memory."""
        costs = [example.cost for example in examples]
        budget = max(min(self.tokens_per_pack, len(examples) * max(costs)), max(costs))

        def attempt(local: list[int], fitting: int) -> ScoreSums:
            return work([[examples[i] for i in part] for part in batches(local, costs, fitting)])

        sums = self.world.all_gather_dict({self.world.rank: self.on_local_rows(costs, budget, attempt)})
        return add_scores([sums[rank] for rank in sorted(sums)])


class RewardModelLoop(OfflineStage[RewardModel, TokenizedExample]):
    """The loop of the stage `reward_model`: the policy does not change; the model starts from its backbone, or from ``source``.
    ``folder`` is the run's."""

    def __init__(
        self, stage: RewardModel, seed: int, policy: Policy, folder: Path, data: RewardModelData | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:  # fmt: skip
        super().__init__(stage, seed, policy, world)
        data = data or read_reward_model_data(stage)
        self.trainer = RewardModelTrainer(
            policy, folder / TRAINED / stage.label, kind=stage.kind, heads=stage.heads, source=stage.source,
            optimiser=stage.optimiser, updates=stage.steps, tokens_per_pack=stage.tokens_per_pack,
            checkpointing=stage.checkpointing, seed=seed, world=world,
        )  # fmt: skip
        limit = max_example_tokens(stage, policy)
        self.rows, self.heldout = (
            tokenize_examples(policy.tokenizer, examples, stage.kind, limit) for examples in (data.train, data.heldout)
        )
        too_long = len(data.train) + len(data.heldout) - len(self.rows) - len(self.heldout)
        self.left_out = {**data.left_out, **({f"of more than {limit} tokens": too_long} if too_long else {})}

    @property
    def model(self) -> Any:
        return self.trainer.model

    def state(self) -> dict[str, dict[str, Tensor]]:
        return self.trainer.state()

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.trainer.load_state(tensors)

    def update(self, batch: Sequence[TokenizedExample]) -> tuple[dict[str, float], None]:
        return self.trainer.update(batch), None

    def after_update(self, n: int, clock: PhaseClock) -> dict[str, float]:
        """Measures the held-out examples, if it is due. The last update also writes the model."""
        metrics: dict[str, float] = {}
        if self.is_measured(n):
            with clock("eval"):
                metrics = self.trainer.measure(self.heldout)
        if n == self.stage.steps:
            self.trainer.write()
        return metrics


def max_example_tokens(stage: RewardModel, policy: Policy) -> int:
    """Tokens of the longest text that the stage trains on: the stage's limit and the model's."""
    return min(stage.max_tokens, policy.max_positions)


def tokenize_examples(tokenizer: Any, examples: Sequence[RewardModelExample], kind: Kind, limit: int) -> list[TokenizedExample]:
    """The examples of at most ``limit`` tokens."""
    tokenized = [tokenize_example(tokenizer, example, kind) for example in examples]
    return [example for example in tokenized if example.length <= limit]


def tokenize_example(tokenizer: Any, example: RewardModelExample, kind: Kind) -> TokenizedExample:
    """An example, encoded as the reward will encode it."""
    if kind == "steps":
        ids, ends = step_ends(tokenizer, example.prompt, example.texts)
        return TokenizedExample((tuple(ids),), example.values, 0.0, tuple(ends))
    texts = [conversation(tokenizer, example.prompt, text) for text in example.texts]
    ids_of_texts = tuple(tuple(tokenizer(text, add_special_tokens=special)["input_ids"]) for text, special in texts)
    return TokenizedExample(ids_of_texts, example.values, example.margin)


def score_pairs(model: Any, examples: Sequence[TokenizedExample]) -> BatchScores:
    """Both completions of a pair in one batch. Heads without a label do not count."""
    out = classify(model, [text for example in examples for text in example.texts])
    chosen_BA, rejected_BA = out[0::2], out[1::2]
    sign_BA = torch.tensor([example.values for example in examples], dtype=torch.float32, device=out.device)
    margin_B = torch.tensor([example.margin for example in examples], device=out.device)
    loss_BA = bradley_terry(chosen_BA, rejected_BA, sign_BA, margin_B)
    gap_BA = (sign_BA * (chosen_BA - rejected_BA)).detach()
    labelled_BA = sign_BA != 0
    gap_B = gap_BA[labelled_BA]
    return BatchScores(loss_BA.sum(), int(labelled_BA.sum()), torch.sigmoid(gap_B).cpu(), float(gap_B.sum()))


def score_ratings(model: Any, examples: Sequence[TokenizedExample]) -> BatchScores:
    out_BA = classify(model, [example.texts[0] for example in examples])
    ratings = [[float("nan") if v is None else v for v in example.values] for example in examples]
    rating_BA = torch.tensor(ratings, dtype=torch.float32, device=out_BA.device)
    labelled_BA = ~rating_BA.isnan()
    loss = ((out_BA - rating_BA)[labelled_BA]).square().sum()
    return BatchScores(loss, int(labelled_BA.sum()), torch.empty(0))


def score_steps(model: Any, examples: Sequence[TokenizedExample]) -> BatchScores:
    out = classify(model, [example.texts[0] for example in examples])
    positions = [(i, end) for i, example in enumerate(examples) for end in example.ends]
    rows, ends = (torch.tensor(x, device=out.device) for x in zip(*positions, strict=True))
    labels = torch.tensor([int(v or 0) for example in examples for v in example.values], device=out.device)
    logits = out[rows, ends]
    probability_B = logits.detach().softmax(-1).gather(1, labels[:, None])[:, 0]
    return BatchScores(functional.cross_entropy(logits, labels, reduction="sum"), len(labels), probability_B.cpu())


SCORERS: dict[Kind, Callable[[Any, Sequence[TokenizedExample]], BatchScores]] = {
    "pairs": score_pairs,
    "ratings": score_ratings,
    "steps": score_steps,
}


def to_host(scores: BatchScores) -> ScoreSums:
    return ScoreSums(float(scores.loss.detach()), scores.count, scores.probability_B, scores.gap)


def add_scores(parts: Sequence[ScoreSums]) -> ScoreSums:
    """The sum of several, or of none."""
    probability_B = torch.cat([torch.empty(0), *(part.probability_B for part in parts)])
    loss, gap = sum(part.loss for part in parts), sum(part.gap for part in parts)
    return ScoreSums(loss, sum(part.count for part in parts), probability_B, gap)


def _pair_metrics(sums: ScoreSums) -> dict[str, float]:
    if not len(sums.probability_B):
        return {}
    return {"pair_accuracy": _accuracy(sums.probability_B), "pair_margin": sums.gap / len(sums.probability_B)}


def _accuracy(probability_B: Tensor) -> float:
    """The fraction of labels with more than half of the probability; ties count half."""
    return float((probability_B > 0.5).double().mean() + 0.5 * (probability_B == 0.5).double().mean())


def check_data(stage: RewardModel) -> None:
    read_reward_model_data(stage)


def check_policy(stage: RewardModel, task: Task, checker: PromptChecker) -> None:
    """Raises an OncurveError if all examples are too long, or if the chat template refuses one. Single examples that are too
    long are left out. Without a chat template a chat is encoded as plain text."""
    policy, data = checker.policy, read_reward_model_data(stage)
    check_classifier(policy, stage.source, by_token=stage.kind == "steps", where=f"{stage.label}.source")
    for example in (*data.train, *data.heldout) if policy.tokenizer.chat_template else ():
        if example.prompt.messages is not None and checker.has_new_roles(example.prompt):
            policy.encode(example.prompt)
    limit = max_example_tokens(stage, policy)
    if not any(tokenize_example(policy.tokenizer, example, stage.kind).length <= limit for example in data.train):
        raise DataError(
            stage.data,
            "nothing to learn from",
            because=f"all {len(data.train)} rows have more than {limit} tokens: {stage.label}.max_tokens is "
            f"{stage.max_tokens}, and the model has {policy.max_positions} positions",
            fix=f"raise {stage.label}.max_tokens, use a model with a longer context, or give shorter rows",
        )
