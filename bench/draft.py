"""What drafts from the group save: tokens per pass, acceptance, and time, with and without them, on one model and its own text.

Modes run in turn, so that a busy machine slows all of them alike. CPU time is that of the process over all its threads.
Acceptance is given apart for completions that ended by themselves and for truncated ones, which often repeat themselves.

    python bench/draft.py runs/arithmetic/model --run runs/arithmetic --step 400 --group 8 --new 40     on a CPU: `make train`
    python bench/draft.py models/SmolLM2-135M-Instruct --questions data/gsm8k/test.jsonl --prompts 8 --group 16 --new 1024
    python bench/draft.py models/Qwen2.5-Coder-0.5B-Instruct --questions data/gsm8k/test.jsonl --group 16 --new 1024 \
        --dtype bfloat16 --modes off,group --against vllm,vllm-ngram,vllm-suffix

`--against` samples the same prompts with vLLM afterwards, in a process for each peer: without speculation, with its n-gram
drafts, and with its suffix decoding (which needs the package arctic-inference). Their settings are in `SPECULATION`.

The mode `rows` computes a row for each completion, as if the texts of a group had nothing in common (on a CPU only); `off` has
no drafts. All modes of one shape must give the same bits, which is checked: on a CPU all of them, on a GPU those with drafts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from reporting import commit

from oncurve.engines.base import SampleKey, SampleRequest, encode_prompts, slots_for
from oncurve.engines.native.c_decoder import SlotTexts
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.scheduler import Scheduler
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Completion, Prompt
from oncurve.runs.database.reader import RunReader

SPECULATION: dict[str, dict[str, Any] | None] = {
    "vllm": None,
    "vllm-ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 8},
    "vllm-suffix": {"method": "suffix", "num_speculative_tokens": 8},
}
"""The `speculative_config` of each peer."""
START = SlotTexts.start
ASK = "Think step by step and write the final answer in \\boxed{}."


def start_alone(self: SlotTexts, slot: int, prompt_ids: Any) -> None:
    """Every slot stores its own text from the start: no row is shared."""
    START(self, slot, prompt_ids)
    self.storage_S[slot] = slot


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.run is not None:
        with RunReader.open(args.run) as store:
            stage = store.stage_of_step(args.step)
            return [group.group.prompt for group in store.step(stage, args.step).groups]
    rows = [json.loads(line) for line in args.questions.read_text(encoding="utf-8").splitlines()[: args.prompts]]
    chats = [({"role": "user", "content": f"{row['question']}\n\n{ASK}"},) for row in rows]
    return [Prompt(f"q{i}", messages=chat) for i, chat in enumerate(chats)]


@torch.inference_mode()
def sample(engine: NativeEngine, prompts: list[Prompt], args: argparse.Namespace, step: int) -> dict[str, Any]:
    """One call: time, counts, and the completions. The runner is driven here, because it knows the counts by completion."""
    sampling = Sampling(max_new_tokens=args.new, temperature=args.temperature)
    ids = encode_prompts(engine.policy, prompts, sampling)
    requests = [SampleRequest(p, i, args.group, sampling, SampleKey(0, step)) for p, i in zip(prompts, ids, strict=True)]
    began, cpu = time.perf_counter(), time.process_time()
    runner = engine.build_runner(requests)
    groups = dict(Scheduler(engine.policy, runner, requests).completions())
    if engine.policy.device.type == "cuda":
        torch.cuda.synchronize()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    completions = [c for number in sorted(groups) for c in groups[number]]
    drafts = getattr(getattr(runner, "buffers", None), "drafts", None)
    by_text = [] if drafts is None else drafts.counts.tolist()
    sources = getattr(runner, "sources", 0)
    rows = [number * sources + 1 + i for number in sorted(groups) for i in range(args.group)]
    return {
        "seconds": seconds,
        "cpu": cpu,
        "tokens": sum(len(c.token_ids) for c in completions),
        "counts": runner.counts,
        "completions": completions,
        "by_completion": [by_text[row] for row in rows] if by_text else None,
        "width": runner.width,
    }


def bits(completions: list[Completion]) -> list[tuple[bytes, bytes]]:
    return [(c.token_ids.tobytes(), c.logps.tobytes()) for c in completions]


def by_end(result: dict[str, Any]) -> dict[str, Any]:
    """Tokens per pass and acceptance of completions that ended by themselves, and of truncated ones."""
    out = {}
    for name, truncated in (("ended", False), ("truncated", True)):
        chosen = [i for i, c in enumerate(result["completions"]) if c.is_truncated == truncated]
        tokens = sum(len(result["completions"][i].token_ids) for i in chosen)
        out[name] = {"completions": len(chosen), "tokens": tokens}
        if result["by_completion"] and chosen:
            drafted, accepted, passes = (sum(result["by_completion"][i][n] for i in chosen) for n in range(3))
            out[name] |= {"tokens_per_pass": 1 + accepted / passes, "accepted": accepted / max(drafted, 1)}
    return out


def sample_with_vllm(work: dict[str, Any], peer: str) -> dict[str, Any]:
    """In vLLM's own process: the rate of each repetition after a warm-up, with log-probs, without detokenising."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_USE_FLASHINFER_SAMPLER="0")
    import vllm

    slots = work["slots"]
    engine = vllm.LLM(
        model=work["model"], skip_tokenizer_init=True, dtype=work["dtype"], gpu_memory_utilization=0.6, max_num_seqs=slots,
        max_model_len=max(map(len, work["prompts"])) + work["new"] + 16, seed=0, speculative_config=SPECULATION[peer],
    )  # fmt: skip
    seconds, tokens, truncated = [], [], 0
    for repeat in range(work["repeats"] + 1):
        how = vllm.SamplingParams(
            n=work["group"], temperature=work["temperature"], max_tokens=work["new"], stop_token_ids=work["ends"], seed=repeat,
            detokenize=False, logprobs=0,
        )  # fmt: skip
        began = time.perf_counter()
        found = engine.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], how, use_tqdm=False)
        if repeat:
            seconds.append(round(time.perf_counter() - began, 4))
            texts = [output for request in found for output in request.outputs]
            tokens.append(sum(len(text.token_ids) for text in texts))
            truncated += sum(text.finish_reason == "length" for text in texts)
    rate = statistics.median(n / s for n, s in zip(tokens, seconds, strict=True))
    return {
        "version": vllm.__version__, "speculative_config": SPECULATION[peer], "seconds": seconds, "tokens": tokens,
        "truncated": truncated, "tokens_per_s": rate,
    }  # fmt: skip


def measure_peer(work: dict[str, Any], peer: str, path: str) -> dict[str, Any]:
    """Runs this script for one peer; what failed is recorded as such."""
    with tempfile.TemporaryDirectory() as folder:
        task, result = Path(folder, "work.json"), Path(folder, "result.json")
        task.write_text(json.dumps(work), encoding="utf-8")
        environment = dict(os.environ)
        if path:
            environment["PYTHONPATH"] = path + os.pathsep + environment.get("PYTHONPATH", "")
        command = [sys.executable, __file__, "--worker", peer, "--work", str(task), "--out", str(result)]
        done = subprocess.run(command, check=False, env=environment)
        if done.returncode:
            return {"failed": f"exit code {done.returncode}"}
        measured: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--slots", type=int)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--modes", default="rows,off,auto")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", default="", help=f"peers, separated by commas: {', '.join(SPECULATION)}")
    parser.add_argument("--peer-path", default="", help="prepended to PYTHONPATH of the peers' processes")
    parser.add_argument("--worker", choices=SPECULATION, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        result = sample_with_vllm(json.loads(args.work.read_text(encoding="utf-8")), args.worker)
        args.out.write_text(json.dumps(result), encoding="utf-8")
        return
    if args.model is None:
        parser.error("name a model folder")
    policy = load_policy(Model.model_validate({"source": args.model, "dtype": args.dtype}), alphabet=None, seed=0)
    prompts, modes = read_prompts(args), args.modes.split(",")
    engines = {m: NativeEngine(policy, Engine(slots=args.slots, draft="off" if m == "rows" else m)) for m in modes}
    for engine in engines.values():  # on a GPU all use one set of graphs and pages
        if policy.device.type == "cuda" and engine is not engines[modes[0]]:
            engine.__dict__["graph_decoder"] = engines[modes[0]].graph_decoder
    results: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    for repeat in range(args.repeats + 1):
        expected: dict[int, list[tuple[bytes, bytes]]] = {}  # by rows of a slot
        for mode, engine in engines.items():
            SlotTexts.start = start_alone if mode == "rows" else START  # type: ignore[method-assign]
            if engine.graph_decoder is not None:
                engine.graph_decoder.settings = engine.settings
            result = sample(engine, prompts, args, 1 if args.repeats == 1 else max(repeat, 1))
            if repeat:  # the first is a warm-up
                results[mode].append(result)
                found = bits(result["completions"])
                assert expected.setdefault(result["width"], found) == found, f"{mode} changed a bit"
    report: dict[str, Any] = {
        "commit": commit(), "model": args.model, "prompts": len(prompts), "group": args.group, "new": args.new,
        "slots": slots_for(engines[modes[0]], len(prompts) * args.group), "modes": {},
    }  # fmt: skip
    for mode, runs in results.items():
        total = runs[0]["counts"]
        for run in runs[1:]:
            total += run["counts"]
        report["modes"][mode] = {
            "width": runs[0]["width"],
            "seconds": [round(run["seconds"], 4) for run in runs],
            "cpu_seconds": [round(run["cpu"], 4) for run in runs],
            "tokens_per_s": statistics.median(run["tokens"] / run["seconds"] for run in runs),
            "tokens_per_cpu_s": statistics.median(run["tokens"] / run["cpu"] for run in runs),
            **total.metrics(),
            **by_end(runs[-1]),
        }
    if args.against:
        work = {
            "model": str(Path(args.model).resolve()), "dtype": args.dtype, "group": args.group, "new": args.new,
            "temperature": args.temperature, "repeats": args.repeats, "slots": report["slots"],
            "ends": list(policy.eos_ids), "prompts": [policy.encode(prompt).tolist() for prompt in prompts],
        }  # fmt: skip
        engines.clear()
        del policy, engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        report["peers"] = {peer: measure_peer(work, peer, args.peer_path) for peer in args.against.split(",")}
    text = json.dumps(report, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
