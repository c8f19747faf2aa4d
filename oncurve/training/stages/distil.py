"""The stage `distil`: the policy samples, and learns to predict the tokens of its samples as a teacher does.

A step is that of GRPO. With ``teach_by = "gradient"`` the loss gets the divergence between policy and teacher, averaged over
the step's tokens; with ``"advantage"`` each token gets the teacher's log-prob minus the policy's as an advantage. Rewards are
added if ``reward_weight`` is set.

A teacher gets no gradient, so a checkpoint does not hold it. It runs once per step, before the updates. A teacher with a model
of its own is a second set of weights next to the policy's, in GPU or CPU memory, as a reference is. A teacher that is the
policy itself, or the base model of a LoRA policy, takes no further memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oncurve.algos.divergences import support_divergence
from oncurve.algos.objectives import LossInputs, LossOutputs
from oncurve.algos.reductions import LossDenominators
from oncurve.distributed.world import SINGLE_PROCESS, World
from oncurve.engines.base import Engine
from oncurve.errors import DataError, ModelError, RecipeError
from oncurve.models import lora
from oncurve.models.heads.divergence_head import DivergenceSettings, TeacherStates, support_logps, token_divergences
from oncurve.models.loading.load import check_source, load_policy, load_tokenizer
from oncurve.models.packing import Pack, PrefixGroup, build_pack, to_device
from oncurve.models.policy import Policy, dummy_passes
from oncurve.plugins import without_place
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.stages import SELF, Distil, Teacher
from oncurve.records import Floats, GradedGroup, Ints, Prompt, ScoredCompletion, ScoredGroup, StepReport
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.judge_client import JudgeClient
from oncurve.rewards.python_function import run_coroutine
from oncurve.tasks.base import Task
from oncurve.training.learner.learner import Learner, LearnerSettings, repack, tokens_of
from oncurve.training.learner.micro_batch import CompletionIndex, MicroBatch
from oncurve.training.learner.update_stats import UpdateResult
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.stages.grpo import GrpoLoop, check_curriculum, grpo_learner_settings
from oncurve.training.timing import PhaseClock, model_flops


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What an endpoint says of a completion's tokens: the log-prob of each [T], and the most likely ones with theirs [T, k]."""

    logps: Floats
    ids: Ints
    top: Floats


class PromptedTeacher:
    """The prompts that a teacher reads. ``policy`` encodes them: both have one vocabulary."""

    max_positions: int
    reads_contexts = False
    """Whether completions may follow contexts of their own, as an agent's do."""

    def __init__(self, settings: Teacher, policy: Policy) -> None:
        self.settings, self._encoder = settings, policy

    def prefix_groups(self, scored: ScoredGroup, completions: Sequence[int], keys: Sequence[int]) -> list[PrefixGroup]:
        """Completions of a group behind the teacher's prompt; with feedback, each behind its own."""
        if self.settings.context is None:
            prompts = [scored.group.prompt_ids] * len(completions)
        elif "{feedback}" in self.settings.context:
            prompts = [self._encode(scored.group.prompt, scored.scored[c]) for c in completions]
        else:
            prompts = [self._encode(scored.group.prompt)] * len(completions)
        chosen = [scored.scored[c].completion for c in completions]
        if any(completion.contexts for completion in chosen) and not self.reads_contexts:
            raise ModelError(
                self.settings.label,
                "an agent's completion, with contexts of its own",
                because="the teacher reads other prompts than the policy, or is behind an endpoint",
                fix="use a teacher in a folder, without teacher.context",
            )
        groups = []
        for _, same in groupby(range(len(chosen)), key=lambda i: id(prompts[i])):
            rows = list(same)
            own = [chosen[i] for i in rows]
            contexts = tuple(completion.contexts for completion in own)
            ids = tuple(completion.token_ids for completion in own)
            groups.append(PrefixGroup(prompts[rows[0]], ids, tuple(keys[i] for i in rows), contexts))
        for group in groups:
            for i in range(len(group.keys)):
                self._check_length(max(len(context) + len(tokens) for context, tokens in group.sequences(i)))
        return groups

    def _encode(self, prompt: Prompt, scored: ScoredCompletion | None = None) -> Ints:
        return self._encoder.encode(teacher_prompt(self.settings, prompt, scored))

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_positions:
            raise ModelError(
                self.settings.label,
                f"a prompt and completion of {tokens} tokens",
                because=f"the teacher has {self.max_positions} positions",
                fix="use shorter prompts, completions or contexts, or a teacher with a longer context",
            )


class LocalTeacher(PromptedTeacher):
    """A teacher in this process: a frozen model, the policy itself, or its base model (``shares_policy``)."""

    def __init__(self, settings: Teacher, policy: Policy, model: Policy) -> None:
        super().__init__(settings, policy)
        self.model, self.shares_policy = model, model is policy
        self.max_positions = model.max_positions
        self.reads_contexts = settings.context is None
        self._host: list[tuple[torch.UntypedStorage, Tensor]] = []
        """Storages on the GPU that are freed between passes, with their bytes in CPU memory. Fused layers share one. The head
        stays: the loss needs it."""
        if settings.on_cpu and not self.shares_policy and model.device.type == "cuda":
            self.move_to_host()

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Within this context the teacher's weights are on its device."""
        uses_base = self.shares_policy and self.settings.model != SELF
        with lora.adapter_disabled(self.model.model) if uses_base else nullcontext(), self._on_device():
            yield

    @torch.no_grad()
    def hidden(self, pack: Pack) -> Tensor:
        return self.model.pack_hidden(pack)

    @torch.no_grad()
    def logps(self, pack: Pack, temperature: float) -> Tensor:
        return self.model.pack_logps(pack, temperature)[0]

    def move_to_host(self) -> None:
        """Keep the weights in CPU memory, except for the head's, and free theirs on the device until the next pass."""
        head = {p.untyped_storage().data_ptr() for p in self.model.model.get_output_embeddings().parameters()}
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage() for p in self.model.model.parameters()}
        for storage in (storage for address, storage in storages.items() if address not in head):
            copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            self._host.append((storage, copy.copy_(_bytes_of(storage))))
        self._free()

    def _free(self) -> None:
        for storage, _ in self._host:
            storage.resize_(0)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        for storage, copy in self._host:
            storage.resize_(len(copy))
            _bytes_of(storage).copy_(copy, non_blocking=True)
        try:
            yield
        finally:
            self._free()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A view of a storage's bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class EndpointTeacher(PromptedTeacher):
    """A teacher behind an endpoint that returns log-probs of the prompt's tokens."""

    def __init__(self, settings: Teacher, policy: Policy, where: str) -> None:
        super().__init__(settings, policy)
        self.where, self.max_positions = where, policy.max_positions if settings.context is None else 1 << 30
        self._client = JudgeClient(
            where, settings.base_url, settings.key_env, retries=settings.retries, seconds=settings.request_seconds,
            at_once=settings.at_once, cache=None,
        )  # fmt: skip

    def scores(self, groups: Sequence[PrefixGroup]) -> dict[int, TokenScores]:
        """What the endpoint says of each completion, by key."""
        rows = [
            (key, group.prompt_ids, ids) for group in groups for key, ids in zip(group.keys, group.completion_ids, strict=True)
        ]
        texts = [[*prompt.tolist(), *ids.tolist()] for _, prompt, ids in rows]
        replies = run_coroutine([self._client.prompt_logprobs(self._request(text)) for text in texts])
        failure = next((reply for reply in replies if isinstance(reply, BaseException)), None)
        if failure is not None:
            raise ModelError(
                f"{self.where}.base_url",
                f"the teacher did not answer ({sum(isinstance(r, BaseException) for r in replies)} of {len(replies)})",
                because=str(failure),
                fix="check that the endpoint runs and has this model; the run resumes from its last checkpoint",
            )
        return {
            key: self._parse(reply, text, len(ids)) for (key, _, ids), text, reply in zip(rows, texts, replies, strict=True)
        }

    def _request(self, prompt: Sequence[int] | str) -> dict[str, Any]:
        options = {"echo": True, "logprobs": self.settings.top, "max_tokens": 0, "temperature": 1.0}
        return {"model": self.settings.model, "prompt": prompt, "extra_body": {"return_tokens_as_token_ids": True}, **options}

    def _parse(self, reply: Mapping[str, Any], text: Sequence[int], length: int) -> TokenScores:
        """The scores of the last ``length`` tokens of a request."""
        ids = [parse_token_id(token) for token in reply.get("tokens") or ()]
        logps, top = reply.get("token_logprobs") or (), reply.get("top_logprobs") or ()
        if None in ids or len(ids) < len(text) or len(logps) < len(text) or len(top) < len(text):
            raise self._without_logprobs("it returned no token ids with log-probs for the prompt")
        if ids[: len(text)] != list(text):
            raise ModelError(
                self.where,
                "the endpoint read other tokens than were sent",
                because="its model has another vocabulary than the policy",
                fix="use a teacher with the policy's tokenizer",
            )
        own, likely = logps[len(text) - length : len(text)], top[len(text) - length : len(text)]
        k = self.settings.top
        top_ids, top_logps = np.zeros((length, k), np.int64), np.full((length, k), -np.inf, np.float32)
        for t, entries in enumerate(likely):
            known = {parse_token_id(token): logp for token, logp in (entries or {}).items()}
            ranked = sorted(((i, lp) for i, lp in known.items() if i is not None), key=lambda pair: -pair[1])[:k]
            for j, (token_id, logp) in enumerate(ranked):
                top_ids[t, j], top_logps[t, j] = token_id, logp
        if any(logp is None for logp in own) or not np.isfinite(top_logps[:, 0]).all():
            raise self._without_logprobs("log-probs of some tokens are missing")
        return TokenScores(np.asarray(own, np.float32), top_ids, top_logps)

    def _without_logprobs(self, because: str) -> ModelError:
        return ModelError(
            f"{self.where}.base_url",
            "an endpoint without log-probs of the prompt",
            because=because,
            fix="use an endpoint whose /v1/completions takes echo, logprobs and return_tokens_as_token_ids, such as that of "
            "`oncurve serve` or vLLM, or a teacher in a folder",
        )

    def check(self, policy: Policy) -> None:
        """Raises an OncurveError if the endpoint does not answer, returns no log-probs, or has another vocabulary."""
        probe = Prompt("probe", text="0 1 2")
        ids = policy.encode(probe).tolist()
        (reply,) = run_coroutine([self._client.prompt_logprobs(self._request(probe.text or ""))])
        if isinstance(reply, BaseException):
            fix = f"start it, or check {self.where}.base_url, .model and the key in {self.settings.key_env}"
            raise ModelError(f"{self.where}.base_url", "the teacher did not answer", because=str(reply), fix=fix) from None
        self._parse(reply, ids, len(ids) - 1)


def parse_token_id(token: str) -> int | None:
    """The id in `token_id:17`, the form that `return_tokens_as_token_ids` asks for; None for any other text."""
    prefix, _, number = token.partition(":")
    return int(number) if prefix == "token_id" and number.isdigit() else None


def teacher_prompt(teacher: Teacher, prompt: Prompt, scored: ScoredCompletion | None = None) -> Prompt:
    """A prompt with the teacher's context. In a chat it replaces the last message's text. The feedback leaves out where a
    reward's file failed, because what is trained must not change when a line of that file moves."""
    assert teacher.context is not None
    last = prompt.text if prompt.messages is None else str(prompt.messages[-1]["content"])
    said = ((a, a.reason or without_place(a.failure or "") or a.value) for a in (() if scored is None else scored.aspects))
    feedback = "; ".join(f"{a.name}: {what}" for a, what in said)
    try:
        text = teacher.context.format_map({**prompt.columns, "prompt": last, "feedback": feedback})
    except (KeyError, IndexError, ValueError) as error:
        columns = ", ".join(sorted(prompt.columns)) or "none"
        raise DataError(
            "teacher.context",
            teacher.context,
            because=f"the prompt {prompt.id} can't fill it ({type(error).__name__}: {error}); its columns are: {columns}",
            fix="use {prompt}, {feedback} and columns of the task in braces; write {{ and }} for braces",
        ) from None
    if prompt.messages is None:
        return replace(prompt, text=text)
    return replace(prompt, messages=(*prompt.messages[:-1], {**prompt.messages[-1], "content": text}))


def build_teachers(stage: Distil, model: Model, policy: Policy) -> dict[str, LocalTeacher | EndpointTeacher]:
    """The teachers by name, ready to teach."""
    return {teacher.label: _build_teacher(stage, teacher, model, policy) for teacher in stage.all_teachers}


def _build_teacher(stage: Distil, teacher: Teacher, model: Model, policy: Policy) -> LocalTeacher | EndpointTeacher:
    if teacher.base_url is not None:
        return EndpointTeacher(teacher, policy, f"{stage.label}.teacher")
    if teacher.model == SELF or _is_base(teacher, model, policy):
        return LocalTeacher(teacher, policy, policy)
    plain = model.at(teacher.model).model_copy(update={"system_prompt": None, "template_options": {}})
    loaded = load_policy(plain, alphabet=None, seed=0)
    loaded.model.requires_grad_(False)
    return LocalTeacher(teacher, policy, loaded)


def _is_base(teacher: Teacher, model: Model, policy: Policy) -> bool:
    """Whether the teacher is the model that a LoRA policy adapts: then its adapter is disabled for the teacher's pass.

    Not if the LM head has an adapter: the loss reads the teacher's head while the policy's adapter is enabled.
    """
    adapts_head = model.lora is not None and any("lm_head".endswith(target) for target in model.lora.targets)
    return lora.is_attached(policy.model) and teacher.model == model.source and not adapts_head


def check_data(stage: Distil, task: Task, rewards: RewardMix) -> None:
    check_curriculum(stage, task, rewards)
    for teacher in stage.all_teachers:
        if teacher.base_url is None and teacher.model != SELF:
            check_source(teacher.model)
        if teacher.base_url is not None and stage.sampling.temperature != 1:
            raise RecipeError(
                f"{stage.label}.sampling.temperature",
                stage.sampling.temperature,
                because="an endpoint returns log-probs at temperature 1",
                fix="use 1, or a teacher in a folder",
            )
    for prompt in _known_prompts(task):
        teacher = find_teacher(stage, prompt)
        if teacher.context is not None:
            teacher_prompt(teacher, prompt)


def _known_prompts(task: Task) -> Iterator[Prompt]:
    """All training prompts of a file; the first of a task that generates them."""
    endless = task.train_size is None
    yield from (task.train_prompt(i) for i in range(1 if endless else task.train_size or 0))


def find_teacher(stage: Distil, prompt: Prompt) -> Teacher:
    """The teacher of a prompt. Raises DataError if its column names none."""
    name = None if stage.teacher_column is None else prompt.columns.get(stage.teacher_column)
    if name is None:
        return stage.teacher
    for teacher in stage.all_teachers:
        if teacher.label == name:
            return teacher
    raise DataError(
        prompt.id,
        f"{stage.teacher_column} = {name!r}",
        because=f"no teacher has this name; there are {', '.join(t.label for t in stage.all_teachers)}",
        fix=f"add the teacher to {stage.label}.teachers, or correct the column",
    )


def check_policy(stage: Distil, task: Task, checker: PromptChecker) -> None:
    policy = checker.policy
    for i, teacher in enumerate(stage.all_teachers):
        where = f"{stage.label}.teacher" + (f"s.{teacher.label}" if i else "")
        if teacher.base_url is not None:
            EndpointTeacher(teacher, policy, where).check(policy)
        elif teacher.model != SELF and load_tokenizer(teacher.model).get_vocab() != policy.tokenizer.get_vocab():
            raise ModelError(
                f"{where}.model",
                teacher.model,
                because="its vocabulary is not the policy's, so the two distributions are over different tokens",
                fix="use a teacher of the same family, with the same tokenizer",
            )


@dataclass(frozen=True, slots=True)
class DistilMicroBatch(MicroBatch):
    """A micro-batch with its teacher's hidden states, or its endpoint's log-probs of a few tokens at each position."""

    teacher: str = ""
    teacher_MD: Tensor | None = None
    support_ids_MK: Tensor | None = None
    support_logps_MK: Tensor | None = None
    support_valid_MK: Tensor | None = None


class DistilLearner(Learner):
    """A learner that adds the divergence from a teacher to its loss (``teach_by = "gradient"``), and that computes the
    teachers' log-probs."""

    def __init__(self, policy: Policy, settings: LearnerSettings, world: World, stage: Distil, model: Model) -> None:
        super().__init__(policy, settings, world)
        self.stage = stage
        self.teachers = build_teachers(stage, model, policy)
        self.divergence = DivergenceSettings(stage.divergence, stage.jsd_beta, settings.temperature)

    def _build_micro_batches(self, groups: Sequence[GradedGroup], chunk: Sequence[int]) -> list[MicroBatch]:
        """The packs of each teacher's groups, with what the teacher says of their tokens."""
        batch: list[MicroBatch] = []
        for name, teacher in self.teachers.items():
            own = [g for g in chunk if find_teacher(self.stage, groups[g].group.prompt).label == name]
            packed = super()._build_micro_batches(groups, own)
            batch += packed if self.stage.teach_by == "advantage" else self._add_teacher(name, teacher, groups, packed)
        return batch

    def _add_teacher(
        self, name: str, teacher: LocalTeacher | EndpointTeacher, groups: Sequence[GradedGroup], batch: list[MicroBatch]
    ) -> list[MicroBatch]:
        with self.phases("teacher"):
            if isinstance(teacher, EndpointTeacher):
                return [_extended(m, teacher=name, **self._support(teacher, groups, m)) for m in batch]
            padding = self.world.padding_passes(len(batch)) if teacher.shares_policy else 0
            with teacher.loaded():
                taught: list[MicroBatch] = []
                for micro in batch:
                    pack = self._teacher_pack(teacher, groups, micro)
                    taught.append(_extended(micro, teacher=name, teacher_MD=teacher.hidden(pack)))
                    self.other_flops += model_flops(teacher.model, [pack], forward=1, backward=0)
                dummy_passes(self.policy, padding, teacher.hidden)
            return taught

    def _teacher_pack(self, teacher: LocalTeacher, groups: Sequence[GradedGroup], micro: MicroBatch) -> Pack:
        if teacher.settings.context is None and teacher.max_positions >= self.policy.max_positions:
            return micro.pack
        return build_pack(_teacher_groups(teacher, groups, micro.indices), self.policy.device)

    def _support(self, teacher: EndpointTeacher, groups: Sequence[GradedGroup], micro: MicroBatch) -> dict[str, Tensor]:
        """The tokens over which the divergence is computed: the teacher's most likely ones and, unless it is the forward KL,
        the sampled one."""
        scores = teacher.scores(_teacher_groups(teacher, groups, micro.indices))
        rows = [scores[key] for key in range(len(micro.indices))]
        ids_MK, top_MK = (np.concatenate([getattr(row, name) for row in rows]) for name in ("ids", "top"))
        target_M, logp_M = micro.pack.target_M.cpu().numpy(), np.concatenate([row.logps for row in rows])
        is_new_M = ~((ids_MK == target_M[:, None]) & np.isfinite(top_MK)).any(1) & (self.divergence.name != "forward_kl")
        valid_MK = np.concatenate([np.isfinite(top_MK), is_new_M[:, None]], 1)
        values = {
            "support_ids_MK": np.concatenate([ids_MK, target_M[:, None]], 1),
            "support_logps_MK": np.where(valid_MK, np.concatenate([top_MK, logp_M[:, None]], 1), 0.0).astype(np.float32),
            "support_valid_MK": valid_MK,
        }
        return {name: to_device(array, self.policy.device) for name, array in values.items()}

    def repack(self, groups: Sequence[GradedGroup], batch: Sequence[MicroBatch], budget: int) -> list[MicroBatch]:
        """Packs of one teacher each."""
        by_teacher = groupby(batch, key=lambda micro: getattr(micro, "teacher", ""))
        return [micro for _, same in by_teacher for micro in repack(groups, list(same), budget)]

    def _part_loss(self, part: MicroBatch, totals: LossDenominators, hidden_MD: Tensor) -> tuple[LossInputs, LossOutputs]:
        if not isinstance(part, DistilMicroBatch):
            return super()._part_loss(part, totals, hidden_MD)
        head, target_M = self.policy.head, part.pack.target_M
        if part.teacher_MD is not None:
            teacher = self.teachers[part.teacher]
            assert isinstance(teacher, LocalTeacher)
            states = TeacherStates(teacher.model.head, part.teacher_MD)
            divergence_M, logp_M, entropy_M = token_divergences(head, hidden_MD, target_M, states, self.divergence)
        else:
            assert part.support_ids_MK is not None
            assert part.support_logps_MK is not None
            assert part.support_valid_MK is not None
            temperature = self.settings.temperature
            ours_MK, logp_M, entropy_M = support_logps(head, hidden_MD, target_M, part.support_ids_MK, temperature)
            divergence_M = support_divergence(
                ours_MK, part.support_logps_MK, part.support_valid_MK, self.divergence.name, self.divergence.beta
            )
        inputs = self._loss_inputs(part, totals, logp_M, entropy_M)
        outputs = self.objective.loss(inputs, self.loss_settings)
        mean = divergence_M.masked_fill(~part.mask_M, 0.0).sum() / max(totals.tokens, 1)
        loss = outputs.loss + self.stage.teacher_weight * mean
        return inputs, replace(outputs, loss=loss, divergence_M=divergence_M.detach())

    @torch.no_grad()
    def teacher_logps(self, scored: Sequence[ScoredGroup]) -> list[list[Floats]]:
        """The teachers' log-prob of each token of each completion, at the sampling temperature."""
        logps: list[list[Floats]] = [[np.zeros(0, np.float32)] * len(group.scored) for group in scored]
        for name, teacher in self.teachers.items():
            own = {g for g, group in enumerate(scored) if find_teacher(self.stage, group.group.prompt).label == name}
            ids = [
                {c: completion.token_ids for c, completion in enumerate(group.group.completions)} if g in own else {}
                for g, group in enumerate(scored)
            ]
            if isinstance(teacher, EndpointTeacher):
                values = self._endpoint_logps(teacher, scored, sorted(own))
            else:
                measure = partial(teacher.logps, temperature=self.settings.temperature)
                with teacher.loaded():
                    values = dict(enumerate(self.measure_tokens(scored, ids, measure, teacher.prefix_groups)))
            for g in own:
                logps[g] = values[g]
        return logps

    def _endpoint_logps(
        self, teacher: EndpointTeacher, scored: Sequence[ScoredGroup], own: Sequence[int]
    ) -> dict[int, list[Floats]]:
        local: dict[int, list[Floats]] = {}
        for g in [own[i] for i in self.world.local_indices([tokens_of(scored[g].group) for g in own])]:
            completions = range(len(scored[g].scored))
            scores = teacher.scores(teacher.prefix_groups(scored[g], completions, completions))
            local[g] = [scores[c].logps for c in completions]
        return self.world.all_gather_dict(local)


def _teacher_groups(
    teacher: PromptedTeacher, groups: Sequence[GradedGroup], indices: Sequence[CompletionIndex]
) -> list[PrefixGroup]:
    """The completions of a micro-batch in their order, behind the teacher's prompts, with their positions as keys."""
    keyed = list(enumerate(indices))
    parts = []
    for g, same in groupby(keyed, key=lambda pair: pair[1][0]):
        rows = list(same)
        parts += teacher.prefix_groups(groups[g].scored, [c for _, (_, c) in rows], [key for key, _ in rows])
    return parts


def _extended(micro: MicroBatch, **values: Any) -> DistilMicroBatch:
    return DistilMicroBatch(**{field.name: getattr(micro, field.name) for field in fields(MicroBatch)}, **values)


class DistilLoop(GrpoLoop):
    """The loop of the stage `distil`."""

    learner: DistilLearner

    def __init__(
        self,
        stage: Distil,
        model: Model,
        seed: int,
        task: Task,
        engine: Engine,
        rewards: RewardMix,
        world: World = SINGLE_PROCESS,
    ) -> None:
        self.distil, self._model = stage, model
        self._teacher_gap = 0.0
        super().__init__(stage, seed, task, engine, rewards, world)

    def build_learner(self) -> DistilLearner:
        # The divergences are those of the untruncated policy, so its log-probs are untruncated too.
        settings = replace(grpo_learner_settings(self.distil, self.seed), truncation=None)
        if self.distil.teach_by == "gradient":  # groups of equal rewards learn from the teacher too
            settings = replace(settings, forward_silent_groups=True)
        return DistilLearner(self.engine.policy, settings, self.world, self.distil, self._model)

    def grade(self, scored: Sequence[ScoredGroup]) -> list[GradedGroup]:
        weight = self.distil.reward_weight
        if weight:
            graded = [
                replace(group, advantages=tuple((weight * a).astype(np.float32) for a in group.advantages))
                for group in super().grade(scored)
            ]
        else:
            graded = [self._ungraded(group) for group in scored]
        return self._add_teacher_advantages(graded) if self.distil.teach_by == "advantage" else graded

    def _ungraded(self, group: ScoredGroup) -> GradedGroup:
        """A group whose rewards are not learned from: advantages of 0 for every completion, and none is left out for its
        reward."""
        zeros = tuple(np.zeros(len(s.completion.token_ids), np.float32) for s in group.scored)
        kept = tuple(not (self.distil.mask_cut and s.completion.is_truncated) for s in group.scored)
        return GradedGroup(group, zeros, kept)

    def _add_teacher_advantages(self, graded: Sequence[GradedGroup]) -> list[GradedGroup]:
        """A_t + weight · (log π_teacher − log π) at each token, with the log-probs of the policy that sampled it."""
        logps = self.learner.teacher_logps([group.scored for group in graded])
        gaps = [
            [theirs - s.completion.logps for theirs, s in zip(of_group, group.scored.scored, strict=True)]
            for of_group, group in zip(logps, graded, strict=True)
        ]
        tokens = [
            gap[s.completion.loss_mask]
            for of_group, group in zip(gaps, graded, strict=True)
            for gap, s in zip(of_group, group.scored.scored, strict=True)
        ]
        self._teacher_gap = -float(np.mean(np.concatenate(tokens), dtype=np.float64)) if tokens else 0.0
        weight = self.distil.teacher_weight
        return [
            replace(
                group,
                advantages=tuple(
                    (a + weight * gap).astype(np.float32) if kept else a
                    for a, gap, kept in zip(group.advantages, of_group, group.graded, strict=True)
                ),
            )
            for group, of_group in zip(graded, gaps, strict=True)
        ]

    def _stop_if_rewards_fail(self, scored: Sequence[ScoredGroup]) -> None:
        if self.distil.reward_weight:
            super()._stop_if_rewards_fail(scored)

    def _report(self, n: int, graded: list[GradedGroup], update: UpdateResult, replaced: int, clock: PhaseClock) -> StepReport:
        report = super()._report(n, graded, update, replaced, clock)
        metrics = dict(report.metrics)
        if self.distil.teach_by == "advantage":
            metrics["teacher_divergence"] = self._teacher_gap
        if not self.distil.reward_weight:
            del metrics["no_signal_share"]  # every group has the teacher's signal
            if not any(a.weight for g in graded for s in g.scored.scored for a in s.aspects):
                del metrics["failure_share"]  # without rewards none can fail
        return replace(report, metrics=metrics)
