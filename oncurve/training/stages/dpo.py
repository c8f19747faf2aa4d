"""The stage `dpo`: one optimiser update per step on preference pairs, both completions packed behind their shared prompt. With
kto, rows may also be single completions with a label.

The reference is the policy at the start of the stage. Neither it nor the pairs change, so its log-probs are computed once,
before the first step, and stored as two numbers per row instead of a second model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.preference_losses import PAIR_LOSSES, Pairs, kto
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.errors import DataError, RecipeError
from oncurve.models.packing import Pack, PrefixGroup
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import Dpo
from oncurve.tasks.base import Task
from oncurve.tasks.data.preference_pairs import LabelledCompletion, Pair, TrainingRows, read_preferences
from oncurve.tasks.prompt_order import batch_indices
from oncurve.training.learner.sharded_optimiser import build_optimiser
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.offline import PackedOfflineStage
from oncurve.training.timing import PhaseClock

NOT_COMPUTED = 0.0
"""In place of the log-prob of a completion that the stage does not use. A computed one is below 0."""


class DpoLoop(PackedOfflineStage[Dpo, PrefixGroup]):
    """The loop of the stage `dpo`. ``rows`` replace the stage's file, if given."""

    def __init__(
        self,
        stage: Dpo,
        seed: int,
        policy: Policy,
        rows: Sequence[Pair | LabelledCompletion] | None = None,
        world: World = SINGLE_PROCESS,
    ) -> None:
        super().__init__(stage, seed, policy, world)
        self.tokens_per_pack = stage.tokens_per_pack
        data = read_preferences(stage) if rows is None else TrainingRows(rows)
        self.left_out = data.left_out
        self.rows = [encode_row(policy, row, i) for i, row in enumerate(data.rows)]
        self.optimiser = build_optimiser(policy.model, stage.optimiser, stage.steps, world)
        self.reference: Tensor | None = None
        """[rows, 2]: the reference's log-probs of the chosen and the rejected completion."""
        self.mismatched = mismatched_rows(self.rows, policy.max_positions) if stage.loss == "kto" else []
        """For kto: each row's completions behind the prompt of another row."""
        self.mismatched_reference: Tensor | None = None
        """[rows, 2]: the reference's log-probs of ``mismatched``."""

    def state(self) -> dict[str, dict[str, Tensor]]:
        if self.reference is None:
            return {"optimiser": self.optimiser.state()}
        reference = {"chosen_rejected": self.reference, "rows": torch.tensor(list(rows_digest(self.rows)))}
        if self.mismatched_reference is not None:
            reference["mismatched"] = self.mismatched_reference
        return {"optimiser": self.optimiser.state(), "reference_logps": reference}

    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.optimiser.load_state(tensors["optimiser"])
        if "reference_logps" in tensors:
            self._check_reference(tensors["reference_logps"])
            self.reference = tensors["reference_logps"]["chosen_rejected"].clone()
            if self.mismatched and "mismatched" in tensors["reference_logps"]:
                self.mismatched_reference = tensors["reference_logps"]["mismatched"].clone()

    def _check_reference(self, reference: Mapping[str, Tensor]) -> None:
        """Raises RecipeError if a fork needs log-probs of the policy at the stage's start that were not computed there."""
        logps = reference["chosen_rejected"].flatten()
        has_same_rows = "rows" not in reference or bytes(reference["rows"].tolist()) == rows_digest(self.rows)
        keys = [key for i in self._used_rows(len(self.rows)) for key in self.rows[i].keys]
        if not has_same_rows or (len(logps) == 2 * len(self.rows) and bool((logps[keys] == NOT_COMPUTED).any())):
            what, of = ("pairs", "other rows") if not has_same_rows else ("steps", "further rows")
            raise RecipeError(
                f"{self.stage.label}.{what}",
                getattr(self.stage, what),
                because=f"the reference is the policy at the start of the stage, and it has not scored the {of}",
                fix="start the stage anew with this setting, or add a second dpo stage after it",
            )

    def before_update(self, clock: PhaseClock) -> None:
        if self.stage.loss != "simpo" and self.reference is None:
            with clock("reference"):
                self.reference = self._logps_of_used(self.rows)
        if self.mismatched and self.mismatched_reference is None:
            with clock("reference"):
                self.mismatched_reference = self._logps_of_used(self.mismatched)

    def update(self, batch: Sequence[PrefixGroup]) -> tuple[dict[str, float], list[Pack]]:
        kl = self._mismatched_kl(batch) if self.mismatched else 0.0
        is_kto = self.stage.loss == "kto"
        count = sum(len(row.keys) for row in batch) if is_kto else len(batch)

        def pack_loss(pack: Pack, logp_M: Tensor, entropy_M: Tensor) -> tuple[Tensor, dict[str, float]]:
            sums_R = torch.zeros(pack.rows, dtype=logp_M.dtype, device=logp_M.device).index_add(0, pack.row_M, logp_M)
            reference_R = None if self.reference is None else self.reference.flatten()[list(pack.keys)].to(logp_M)
            ratio_R = sums_R if reference_R is None else sums_R - reference_R
            is_chosen_R = torch.tensor([key % 2 == 0 for key in pack.keys], device=logp_M.device)
            if is_kto:
                weights = (self.stage.desirable_weight, self.stage.undesirable_weight)
                loss_B = kto(ratio_R, is_chosen_R, kl, self.stage.beta, weights)
            else:
                loss_B = self._pair_losses(sums_R, reference_R, pack)
            terms = {"loss": float(loss_B.detach().double().sum()), "losses": float(len(loss_B))}
            terms |= self._reward_terms((self.stage.beta * ratio_R).detach(), is_chosen_R)
            terms |= {"tokens": float(len(entropy_M)), "entropy": float(entropy_M.detach().double().sum())}
            return loss_B.sum() / count, terms

        sums, packs = self.compute_gradient(batch, self._pack_budget(batch), pack_loss)
        counts = {"loss": "losses", "pair_accuracy": "pairs", "pair_margin": "pairs", "entropy": "tokens"}
        counts |= {"chosen_reward": "chosen", "rejected_reward": "rejected"}
        metrics = {name: sums[name] / sums[of] for name, of in counts.items() if sums.get(of)}
        metrics["tokens"] = sums["tokens"]
        if self.mismatched:
            metrics["kl"] = kl
        done = self.optimiser.step(lambda: {"loss": metrics["loss"]})
        return metrics | done.metrics, packs

    def _pair_losses(self, sums_R: Tensor, reference_R: Tensor | None, pack: Pack) -> Tensor:
        lengths_R = torch.tensor(pack.lengths, dtype=sums_R.dtype, device=sums_R.device)
        columns = [sums_R, lengths_R] + ([] if reference_R is None else [reference_R])
        pairs = Pairs(*(side_B for column_R in columns for side_B in (column_R[0::2], column_R[1::2])))
        assert self.stage.loss != "kto"
        return PAIR_LOSSES[self.stage.loss](pairs, self.stage.beta, self.stage.margin)

    def _reward_terms(self, reward_R: Tensor, is_chosen_R: Tensor) -> dict[str, float]:
        """Sums and counts of the implicit rewards β·h, with h the log-ratio of policy and reference. These are the rewards for
        which the policy is optimal (arXiv 2305.18290, section 4)."""
        sides = {"chosen": reward_R[is_chosen_R], "rejected": reward_R[~is_chosen_R]}
        terms = {f"{side}_reward": float(rewards.double().sum()) for side, rewards in sides.items()}
        terms |= {side: float(len(rewards)) for side, rewards in sides.items()}
        if self.stage.label_column is None:
            margin_B = sides["chosen"] - sides["rejected"]
            terms |= {"pair_accuracy": float((margin_B > 0).sum()), "pair_margin": float(margin_B.double().sum())}
            terms["pairs"] = float(len(margin_B))
        return terms

    def _pack_budget(self, rows: Sequence[PrefixGroup]) -> int:
        """Tokens of a pack: at least those of the longest row, since a pair's loss needs both of its completions at once."""
        costs = [row.tokens for row in rows]
        return max(min(self.tokens_per_pack, sum(costs)), max(costs))

    def _mismatched_kl(self, batch: Sequence[PrefixGroup]) -> float:
        """kto's z of a batch: the mean log-ratio of its completions behind other prompts, and at least 0."""
        assert self.mismatched_reference is not None
        reference: list[float] = self.mismatched_reference.flatten().tolist()
        logps = self._logps([self.mismatched[i] for i in sorted({row.keys[0] // 2 for row in batch})])
        ratios = [logps[key] - reference[key] for row in batch for key in row.keys]
        return max(sum(ratios) / len(ratios), 0.0)

    def _logps_of_used(self, rows: Sequence[PrefixGroup]) -> Tensor:
        """[rows, 2]: the current policy's log-probs of the completions that the stage will use; `NOT_COMPUTED` for others."""
        logps = self._logps([rows[i] for i in self._used_rows(len(rows))])
        return torch.tensor([logps.get(key, NOT_COMPUTED) for key in range(2 * len(rows))], dtype=torch.float64).view(-1, 2)

    def _used_rows(self, size: int) -> list[int]:
        """Which of ``size`` rows the stage's batches use."""
        steps, batch_size = range(self.stage.steps), self.stage.batch_size
        return sorted({i for step in steps for i in batch_indices(size, self.seed, step, batch_size)})

    @torch.no_grad()
    def _logps(self, rows: Sequence[PrefixGroup]) -> dict[int, float]:
        """The summed log-prob of each completion, by its key."""

        def attempt(local: list[int], budget: int) -> dict[int, float]:
            logps: dict[int, float] = {}
            for pack in self.each_pack([rows[i] for i in local], budget, self.policy.pack_logps):
                logp_M, _ = self.policy.pack_logps(pack)
                parts = torch.split(logp_M.double().cpu(), list(pack.lengths))
                logps |= {key: float(part.sum()) for key, part in zip(pack.keys, parts, strict=True)}
            return logps

        local_logps = self.on_local_rows([row.tokens for row in rows], self._pack_budget(rows), attempt)
        return self.world.all_gather_dict(local_logps)


def encode_row(policy: Policy, row: Pair | LabelledCompletion, index: int) -> PrefixGroup:
    """The completions of a row behind their prompt, as token ids. Keys are 2 · index for a chosen or desirable completion, one
    more for a rejected or undesirable one. Raises DataError if a completion is too long for the model."""
    prompt = policy.encode(row.prompt)
    texts = (row.chosen, row.rejected) if isinstance(row, Pair) else (row.completion,)
    completions = tuple(policy.encode_completion(text) for text in texts)
    longest = len(prompt) + max(map(len, completions))
    if longest > policy.max_positions:
        raise DataError(
            row.prompt.id,
            f"a {'pair' if isinstance(row, Pair) else 'prompt and completion'} of {longest} tokens",
            because=f"the model has {policy.max_positions} positions",
            fix="shorten or drop the row, or use a model with a longer context",
        )
    keys = (2 * index, 2 * index + 1) if isinstance(row, Pair) else (2 * index + (not row.is_desirable),)
    return PrefixGroup(np.asarray(prompt), completions, keys)


def rows_digest(rows: Sequence[PrefixGroup]) -> bytes:
    """A fingerprint of what the rows' keys stand for."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        for ids in (row.prompt_ids, *row.completion_ids):
            digest.update(np.asarray([len(ids), *ids], np.int64).tobytes())
    return digest.digest()


def mismatched_rows(rows: Sequence[PrefixGroup], max_positions: int) -> list[PrefixGroup]:
    """Each row's completions behind another prompt: that of the next row whose prompt differs and with which they fit the
    model's positions. Raises DataError if there is none."""
    prompts = [row.prompt_ids.tolist() for row in rows]
    mismatched = []
    for i, row in enumerate(rows):
        room = max_positions - max(map(len, row.completion_ids))
        following = (j % len(rows) for j in range(i + 1, i + len(rows)))
        other = next((j for j in following if prompts[j] != prompts[i] and len(prompts[j]) <= room), None)
        if other is None:
            raise DataError(
                "dpo.pairs",
                f"no second prompt for the completions of row {i + 1}",
                because="kto measures the KL to the reference on completions after prompts that are not their own",
                fix='use data with at least two prompts, or loss = "dpo"',
            )
        mismatched.append(PrefixGroup(rows[other].prompt_ids, row.completion_ids, row.keys))
    return mismatched


def check_data(stage: Dpo) -> None:
    read_preferences(stage)


def check_policy(stage: Dpo, task: Task, checker: PromptChecker) -> None:
    for row in read_preferences(stage).rows:
        longest = max(row.chosen, row.rejected, key=len) if isinstance(row, Pair) else row.completion
        if checker.must_encode(row.prompt, row.prompt.shown + longest, 1):
            encode_row(checker.policy, row, 0)
