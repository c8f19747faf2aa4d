"""What a tool's result costs: its tokens in every slot, beside the same tokens in the prompts.

    python bench/observations.py             on a CPU, one thread; writes bench/results/observations.json
    python bench/observations.py --tiny      a toy size, to check that the script works
    python bench/observations.py --cuda      Qwen3-0.6B's shape in bfloat16; writes bench/results/observations_gpu.json

Each slot has a prompt of its own. The policy samples one token, an environment replies, and the policy samples another. Three
ways to give it the result, measured in turn, each less the time of a short prompt with a reply of one token. On a CPU the time
is CPU time; on a GPU it is wall time:

- in the prompt: the tokens are part of the prompts, before the first sampled token;
- as a result: the reply has them, and they are prefilled in one pass;
- token by token: the reply has them, and each is fed in a decode step of its own, as version 1 did.

On a CPU all three run in the torch runner, which decodes for environments, in float32. Random weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from random_models import make_policy
from reporting import commit

from oncurve.engines.base import SampleKey
from oncurve.engines.native import torch_runner
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT = 32
"""Tokens of a prompt without the result."""
ALONE, IN_PROMPT, AS_RESULT, BY_TOKEN = "without", "in the prompt", "as a result", "token by token"


@dataclass(frozen=True)
class Result:
    """Replies to the first token with this text, and ends the completion after the second."""

    text: str
    calls: tuple[str, ...] = ("w",)

    def reply(self, prompt: Prompt, turns: Sequence[str], dice: np.random.Generator) -> str | None:
        return self.text if len(turns) == 1 else None


def words(count: int, seed: int) -> str:
    """A text of this many tokens."""
    return " ".join(f"w{i}" for i in np.random.default_rng(seed).integers(3, 512, count))


def feed_by_token(by_token: bool) -> None:
    """Whether both runners feed every reply token by token, however long it is."""
    longest = sys.maxsize if by_token else torch_runner.LONGEST_FORCED
    torch_runner.TorchRunner.longest_forced = longest
    if torch.cuda.is_available():
        from oncurve.engines.cuda import runner

        runner.LONGEST_FORCED = longest  # type: ignore[attr-defined]


def seconds_of(way: str, policy: Policy, slots: int, length: int) -> float:
    """The time of one call of the sampler."""
    in_prompt = PROMPT + (length - 1 if way == IN_PROMPT else 0)
    replied = length if way in (AS_RESULT, BY_TOKEN) else 1
    environment = Result(words(replied, 0))
    prompts = [Prompt(str(slot), text=words(in_prompt, slot), environment=environment) for slot in range(slots)]
    sampling = Sampling(max_new_tokens=replied + 3, min_new_tokens=replied + 3)
    feed_by_token(way == BY_TOKEN)
    clock = time.process_time if policy.device.type == "cpu" else time.perf_counter
    engine = engine_of(policy, slots)
    began = clock()
    groups = engine.sample(prompts, 1, sampling, SampleKey(0, 1))
    if policy.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = clock() - began
    for group in groups:
        (completion,) = group.completions
        assert (len(group.prompt_ids), int((~completion.loss_mask).sum())) == (in_prompt, replied), "the reply was read"
    return seconds


@lru_cache(maxsize=1)
def engine_of(policy: Policy, slots: int) -> NativeEngine:
    """One engine for all tries, so that CUDA graphs are captured once."""
    return NativeEngine(policy, Engine(slots=slots))


def measure(slots: int, length: int, tries: int, *, on_gpu: bool = False) -> dict[str, Any]:
    """The tries of each way. Token by token is slow and is tried once."""
    where = ("0.6b", torch.device("cuda"), torch.bfloat16) if on_gpu else ("tiny", torch.device("cpu"), torch.float32)
    policy = make_policy(*where, max_positions=length + 2 * PROMPT)
    warm = (ALONE, IN_PROMPT, AS_RESULT, BY_TOKEN) if on_gpu else (ALONE, IN_PROMPT, AS_RESULT)
    seconds: dict[str, list[float]] = {ALONE: [], IN_PROMPT: [], AS_RESULT: [], BY_TOKEN: []}
    for way in warm:
        seconds_of(way, policy, slots if on_gpu else 2, length)
    for _ in range(tries):
        for way in (ALONE, IN_PROMPT, AS_RESULT):
            seconds[way].append(round(seconds_of(way, policy, slots, length), 4))
            print(way, seconds[way][-1], flush=True)
    seconds[BY_TOKEN].append(round(seconds_of(BY_TOKEN, policy, slots, length), 4))
    added = {way: median(seconds[way]) - median(seconds[ALONE]) for way in (IN_PROMPT, AS_RESULT, BY_TOKEN)}
    return {
        "slots": slots,
        "result_tokens": length,
        "prompt_tokens": PROMPT,
        "device": torch.cuda.get_device_name() if on_gpu else "CPU, 1 thread",
        "tries_s" if on_gpu else "tries_cpu_s": seconds,
        "added_s" if on_gpu else "added_cpu_s": {way: round(value, 3) for way, value in added.items()},
        "ratio": {way: round(added[way] / added[IN_PROMPT], 3) for way in (AS_RESULT, BY_TOKEN)},
        "commit": commit(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(4, 64, 1) if args.tiny else measure(64, 1024, args.tries, on_gpu=args.cuda)
    out = args.out or RESULTS / ("observations_gpu.json" if args.cuda else "observations.json")
    out.write_text(json.dumps(result, indent=1) + "\n")
    time_of = "added_s" if args.cuda else "added_cpu_s"
    print(f"\n{result['slots']} slots, a result of {result['result_tokens']} tokens:\n")
    print("| the result's tokens | added time | ratio |\n|---|---|---|")
    for way, value in result[time_of].items():
        print(f"| {way} | {value:.2f} s | {result['ratio'].get(way, 1.0):.2f} |")


if __name__ == "__main__":
    main()
