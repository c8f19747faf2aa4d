"""lm-eval's tasks over our engine, in this process: its prompts and metrics, our log-probs and completions.

The package lm_eval is imported here and nowhere else. Log-likelihoods come from the learner's forward, completions from the
native engine. Texts are encoded as lm-eval's Hugging Face backend does: with the tokenizer's special tokens, unless a text
begins with them already.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.sampler_check import check_sampler
from oncurve.errors import RecipeError, did_you_mean
from oncurve.models.heads.divergence_head import most_likely
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from oncurve.runs.step_notes import report_progress

MAX_NEW_TOKENS = 256
"""lm-eval's default if a task sets no limit."""
LENGTH_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""How tasks name their limit, in lm-eval's order of priority."""


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """A policy with the interface that lm-eval calls: log-likelihoods of continuations, and generation up to a stop string."""

    def __init__(self, policy: Policy, seed: int = 0) -> None:
        super().__init__()
        self.policy, self.seed = policy, seed
        self.tokenizer = policy.tokenizer
        self.engine = NativeEngine(policy, Engine())
        check_sampler(self.engine)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What a text without a context follows."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.policy.max_positions

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        has_prefix = string.startswith(self.tokenizer.decode([self.prefix_token_id]))
        special = not has_prefix if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special).input_ids)

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any) -> list[tuple[float, bool]]:
        return [self._score(context, continuation) for _, context, continuation in _with_progress(requests)]

    @torch.inference_mode()
    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """(log-prob of the continuation, whether it is what greedy decoding would write). A long context loses its start."""
        ids = torch.tensor([*context, *continuation][-self.max_length :]).numpy()
        pack = build_pack([PrefixGroup(ids[:1], (ids[1:],), (0,))], self.policy.device)
        logps_M, _, likeliest_MK = most_likely(self.policy.head, self.policy.pack_hidden(pack), pack.target_M, 1)
        count = min(len(continuation), len(ids) - 1)
        is_greedy = bool((likeliest_MK[-count:, 0] == pack.target_M[-count:]).all())
        return float(logps_M[-count:].double().sum()), is_greedy

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        return [self._score_text(request.args[0]) for request in _with_progress(requests)]

    def _score_text(self, text: str) -> float:
        """A text longer than the context is scored in windows, one token shorter than those of lm-eval's own backend, because
        every token of a pack is forwarded, the last one too."""
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
        )
        return sum(self._score(*make_disjoint_window(window))[0] for window in windows)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        texts = [""] * len(requests)
        alike: dict[Sampling, list[int]] = {}
        done = count(1)
        report_progress(0.0)
        for index, request in enumerate(requests):
            alike.setdefault(sampling_of(request.args[1], self.max_length // 2), []).append(index)
        for sampling, indices in alike.items():
            room = self.max_length - sampling.max_new_tokens
            prompts = [Prompt(f"harness/{index}", text=self._shorten(requests[index].args[0], room)) for index in indices]
            groups = self.engine.sample(
                prompts,
                1,
                sampling,
                SampleKey(self.seed, 0),
                on_group=lambda *_: report_progress(next(done) / len(requests)),
            )
            for index, group in zip(indices, groups, strict=True):
                text = group.completions[0].text
                for stop in sampling.stop:
                    text = text.partition(stop)[0]
                texts[index] = text
        return texts

    def _shorten(self, text: str, room: int) -> str:
        """A prompt that the engine's context has room for; a longer one loses its start, as in lm-eval's own backend."""
        ids = self.policy.encode(Prompt("harness", text=text))
        return text if len(ids) <= room else str(self.tokenizer.decode(ids[-room:].tolist()))


def _with_progress(requests: Sequence[Any]) -> Iterator[Any]:
    for index, request in enumerate(requests):
        report_progress(index / len(requests))
        yield request


def sampling_of(settings: dict[str, Any], max_new_tokens: int) -> Sampling:
    """lm-eval's generation settings as ours. Greedy unless the task samples; at most ``max_new_tokens``."""
    stops = settings.get("until") or ()
    temperature = float(settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0))
    samples = settings.get("do_sample", True) and temperature > 0
    limits = (settings.get(key) for key in LENGTH_KEYS)
    limit = next((int(value) for value in limits if value is not None), MAX_NEW_TOKENS)
    return Sampling(
        temperature=temperature if samples else 0.0,
        top_p=float(settings.get("top_p", 1.0)) if samples else 1.0,
        top_k=int(settings.get("top_k", 0)) if samples else 0,
        max_new_tokens=min(limit, max_new_tokens),
        stop=(stops,) if isinstance(stops, str) else tuple(stop for stop in stops if stop),
    )


def run_harness(
    policy: Policy, tasks: Sequence[str], *, include: Path | None = None, limit: int | None = None, shots: int | None = None
) -> dict[str, Any]:
    """lm-eval's results by task: {"gsm8k": {"exact_match,strict-match": 0.27, "exact_match_stderr,strict-match": 0.012}}."""
    manager = TaskManager(include_path=None if include is None else str(include))
    for task in tasks:
        if not manager.match_tasks([task]):
            raise RecipeError(
                "--tasks",
                task + did_you_mean(task, set(manager.all_tasks)),
                because="lm-eval has no such task",
                fix="name one of lm-eval's tasks, or a folder of task files with --include",
            )
    model = HarnessModel(policy)
    done = simple_evaluate(
        model=model, tasks=list(tasks), task_manager=manager, limit=limit, num_fewshot=shots, log_samples=False
    )
    return {
        task: {name: value for name, value in result.items() if isinstance(value, int | float) and not isinstance(value, bool)}
        for task, result in done["results"].items()
    }
