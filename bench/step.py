"""One GRPO step on a GPU: Oncurve and TRL in the same run, and tables of the update only.

    python bench/step.py --against trl,trl+vllm       everything; writes bench/results/step.json
    python bench/step.py --only step --against …      only complete steps
    python bench/step.py --only long,linear,mfu       only the update: long prompts, growth, use of the matrix rate
    python bench/step.py --only completions           only the update: one group of two long completions
    python bench/step.py --only lora                  complete steps: full fine-tuning, LoRA, LoRA through peft's modules
    python bench/step.py --table                      write the numbers of that file into bench/README.md

Every figure is a median over steps after a warm-up, on random weights and random prompts: this measures the work, not the
learning. Completions have exactly the requested length. Peers run in their own processes, one after the other, on one GPU.
Results are written after each part, so that a run that is stopped loses only its last part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from random_models import SHAPES, each_alone, graded_groups, make_policy, random_reward, shape_of, texts
from reporting import commit, put

import oncurve
from oncurve.engines.native.engine import NativeEngine
from oncurve.models.policy import Policy
from oncurve.recipe.schema.sections import Engine
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import GradedGroup
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.learner.learner import Learner
from oncurve.training.stages.grpo import GrpoLoop, grpo_learner_settings
from oncurve.training.timing import matmul_rate

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "step.json"
README = HERE / "README.md"
PACKAGES = ("torch", "transformers", "triton", "trl", "vllm")
PARTS = ("step", "long", "completions", "linear", "mfu", "lora")
Row = dict[str, Any]


def stage(args: argparse.Namespace, beta: float, **more: Any) -> Grpo:
    sampling = {"max_new_tokens": args.new, "min_new_tokens": args.new, "temperature": 1.0}
    plain = {
        "steps": 1000,
        "prompts_per_step": args.prompts,
        "group_size": args.group,
        "kl": {"beta": beta},
        "sampling": sampling,
    }
    return Grpo.model_validate({**plain, "tokens_per_pack": args.pack, "optimiser": {"learning_rate": 1e-6}, **more})


def policy_of(size: str, lora_rank: int = 0, max_positions: int = 8192) -> Policy:
    on_gpu = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    return make_policy(size, device, dtype, lora_rank, max_positions)


def peak_gib() -> float | None:
    return round(torch.cuda.max_memory_allocated() / 2**30, 2) if torch.cuda.is_available() else None


def fresh_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def timed(do: Callable[[], object]) -> float:
    """Seconds until the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def whole_step(args: argparse.Namespace, beta: float, policy: Policy) -> Row:
    """Sample, score, grade and update as in a run, without recording."""
    fresh_peak()
    words = shape_of(args.size)["vocab_size"]
    task = PromptList.of(texts(args.prompts * (args.steps + 2), args.prompt, words))
    rewards = RewardMix([FunctionReward(random_reward, "random")])
    rewards.bind(lambda: policy.decode)
    loop = GrpoLoop(stage(args, beta), 0, task, NativeEngine(policy, Engine()), rewards)
    reports, seconds = [], []
    gc.freeze()  # as a run does
    for n in range(1, args.steps + 2):
        seconds.append(timed(lambda n=n: reports.append(loop.step(n))))  # type: ignore[misc]
    gc.unfreeze()
    names = reports[-1].seconds
    last = reports[-1].metrics
    return {
        "peer": "oncurve", "beta": beta, "first_s": round(seconds[0], 3), "steps_s": [round(s, 4) for s in seconds[1:]],
        "step_s": round(median(seconds[1:]), 4),
        "phases_s": {name: round(median(r.seconds[name] for r in reports[1:]), 4) for name in names},
        "peak_gib": peak_gib(), "mfu": round(median(r.metrics["mfu"] for r in reports[1:]), 3),
        "mismatch_kl": last["mismatch_kl"],
        "grad_norm": last["grad_norm"], "skipped_updates": sum(r.metrics["skipped_updates"] for r in reports),
    }  # fmt: skip


def update_of(learner: Learner, groups: Sequence[GradedGroup], tries: int) -> Row:
    """The update only: seconds, tokens forwarded, model FLOPs per second, peak memory."""
    fresh_peak()
    seconds, reports = [], []
    for _ in range(tries):
        seconds.append(timed(lambda: reports.append(learner.update(groups))))
    best = median(seconds)
    return {
        "seconds": round(best, 4), "tries_s": [round(s, 4) for s in seconds],
        "tflops": round(reports[-1].metrics["update_tflops"], 1),
        "mfu": round(reports[-1].metrics["mfu"], 3), "peak_gib": peak_gib(),
        "phases_s": {name: round(value, 4) for name, value in reports[-1].seconds.items()},
        "grad_norm": reports[-1].metrics["grad_norm"], "skipped_updates": sum(t.metrics["skipped_updates"] for t in reports),
    }  # fmt: skip


def warm(learner: Learner, groups: Sequence[GradedGroup]) -> Learner:
    """Compile kernels and allocate memory on a small batch."""
    learner.update(groups)
    return learner


def long_prompts(args: argparse.Namespace) -> list[Row]:
    """Prompt 2048, completion 256, G = 16: the same update with the prompt shared and repeated."""
    policy, words = policy_of(args.size), shape_of(args.size)["vocab_size"]
    prompt, new, prompts = (2048, 256, 4) if args.size != "tiny" else (64, 16, 2)
    groups = graded_groups(prompts, 16, prompt, new, words)
    rows = []
    for shared, batch in ((True, groups), (False, each_alone(groups))):
        learner = warm(Learner(policy, grpo_learner_settings(stage(args, 0.0))), batch)
        rows.append({"shared": shared, "prompt": prompt, "new": new, "group": 16, **update_of(learner, batch, args.steps)})
        del learner
    rows[0]["times_faster"] = round(rows[1]["seconds"] / rows[0]["seconds"], 2)
    return rows


def long_completions(args: argparse.Namespace) -> list[Row]:
    """One group of two long completions in one pack: the fastest setting for the memory there is, and the smallest memory."""
    rows = []
    for new in map(int, args.lengths.split(",")):
        for checkpointing in ("auto", "on"):
            policy, words = policy_of(args.size, max_positions=new + args.prompt), shape_of(args.size)["vocab_size"]
            groups = graded_groups(1, 2, args.prompt, new, words)
            settings = stage(args, 0.0, tokens_per_pack=2 * new + args.prompt, checkpointing=checkpointing)
            learner = warm(Learner(policy, grpo_learner_settings(settings)), graded_groups(1, 2, args.prompt, new // 4, words))
            rows.append({"new": f"2 × {new:,}", "checkpointing": checkpointing, **update_of(learner, groups, 2)})
            print(rows[-1], flush=True)
            del policy, learner
            fresh_peak()
    return rows


def growth(args: argparse.Namespace) -> list[Row]:
    """1×, 2×, 4×, 8× the prompts of an eighth of a step: seconds should grow in proportion to tokens."""
    policy, words = policy_of(args.size), shape_of(args.size)["vocab_size"]
    base = max(1, args.prompts // 4)
    learner = warm(
        Learner(policy, grpo_learner_settings(stage(args, 0.0))), graded_groups(base, args.group, args.prompt, args.new, words)
    )
    rows = []
    for times in (1, 2, 4, 8):
        groups = graded_groups(base * times, args.group, args.prompt, args.new, words)
        row = update_of(learner, groups, args.steps)
        completions = base * times * args.group
        rows.append(
            {
                "times": times,
                "completions": completions,
                **row,
                "ms_per_completion": round(1e3 * row["seconds"] / completions, 3),
            }
        )
    return rows


def matrix_use(args: argparse.Namespace) -> list[Row]:
    """Larger models with 512 + 1024 tokens: the update's model FLOPs relative to the measured matrix rate."""
    rows = []
    for size in args.mfu_sizes.split(","):
        policy, words = policy_of(size), shape_of(size)["vocab_size"]
        prompt, new = (512, 1024) if size != "tiny" else (24, 48)
        learner = warm(
            Learner(policy, grpo_learner_settings(stage(args, 0.0))), graded_groups(2, args.group, prompt, new, words)
        )
        groups = graded_groups(args.prompts, args.group, prompt, new, words)
        rows.append({"size": size, "prompt": prompt, "new": new, **update_of(learner, groups, 1)})
        del policy, learner
    return rows


def adapters(args: argparse.Namespace) -> list[Row]:
    """A step of full fine-tuning, of LoRA, and of LoRA through peft's modules."""
    rows = []
    for trained, rank, modules in (("all weights", 0, False), ("LoRA", args.rank, False), ("LoRA by modules", args.rank, True)):
        policy = policy_of(args.size, rank)
        if modules:
            policy.fast_backbone = None
        row = whole_step(args, 0.0, policy)
        phases = row["phases_s"]
        rows.append({"trained": trained, "rank": rank, "sample_s": phases["sample"], "update_s": phases["update"], **row})
        del policy
        fresh_peak()
    return rows


def peer(args: argparse.Namespace, name: str) -> Iterator[Row]:
    """TRL in its own process, one β after the other. `trl+vllm` runs vLLM in that process, with enough memory for the work.

    Without vLLM a step takes so long that only β = 0, the faster one, is measured, with two steps.
    """
    betas = sorted(map(float, args.betas.split(",")), reverse=True) if name == "trl+vllm" else [0.0]
    steps = args.steps if name == "trl+vllm" else min(args.steps, 2)
    command = [
        sys.executable, str(HERE / "trl_step.py"), "--size", args.size, "--prompts", str(args.prompts),
        "--group", str(args.group), "--prompt", str(args.prompt), "--new", str(args.new),
        "--steps", str(steps), "--betas", ",".join(map(str, betas)),
    ]  # fmt: skip
    path = os.pathsep.join(filter(None, (args.peer_path, os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile("w+") as output:
        begun = subprocess.Popen(
            command + (["--vllm"] if name == "trl+vllm" else []), stdout=subprocess.PIPE, stderr=output, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        assert begun.stdout is not None
        killer = threading.Timer(args.peer_limit, begun.kill)
        killer.start()
        lines_read = 0
        for line in begun.stdout:
            if line.startswith("RESULT "):
                lines_read += 1
                yield {"peer": name, **json.loads(line.removeprefix("RESULT "))}
        code = begun.wait()
        killer.cancel()
        output.seek(0)
        error = output.read()
    if lines_read < len(betas):
        print(error[-4000:], file=sys.stderr)
    for beta in betas[lines_read:]:
        yield {"peer": name, "beta": beta, "failed": f"exit {code}: {(error.strip().splitlines() or ['no output'])[-1][:200]}"}


def environment(args: argparse.Namespace) -> Row:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {name: metadata.version(name) for name in PACKAGES if _installed(name)}
    work = {name: getattr(args, name) for name in ("size", "prompts", "group", "prompt", "new", "steps", "pack")}
    return {
        "gpu": gpu, "matrix_tflops": round(_rate() / 1e12, 1), "python": platform.python_version(),
        "versions": {"oncurve": oncurve.__version__, **versions}, "commit": args.commit or commit(), "work": work,
    }  # fmt: skip


def _rate() -> float:
    gpu = torch.cuda.is_available()
    return matmul_rate(torch.device("cuda" if gpu else "cpu"), torch.bfloat16 if gpu else torch.float32)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """All results, written after each part. Parts that are not requested keep their values from the file."""
    stored: Row = json.loads(RESULTS.read_text()) if RESULTS.exists() and args.out == RESULTS else {}
    results: Row = {**stored, "environment": environment(args)}
    selected = args.only.split(",")
    results["commits"] = stored.get("commits", {}) | dict.fromkeys(selected, results["environment"]["commit"])
    if "step" in selected:
        results["step"] = []
        for beta in args.betas.split(","):
            results["step"].append(whole_step(args, float(beta), policy_of(args.size)))
            fresh_peak()
            yield results
        for name in filter(None, args.against.split(",")):
            for row in peer(args, name):
                results["step"].append(row)
                yield results
    for name, part in (
        ("long", long_prompts), ("completions", long_completions), ("linear", growth), ("mfu", matrix_use), ("lora", adapters),
    ):  # fmt: skip
        if name in selected:
            results[name] = part(args)
            fresh_peak()
            yield results


def _cells(row: Row, ours: dict[float, float]) -> tuple[object, ...]:
    if "step_s" not in row:
        return row["peer"], row["beta"], row["failed"], "", "", ""
    sample = row.get("phases_s", {}).get("sample", row.get("gen_s"))
    skipped = f" ({row['skipped_updates']:.0f} updates left out)" if row.get("skipped_updates") else ""
    times = f"{row['step_s'] / ours[row['beta']]:.1f}" if row["peer"] != "oncurve" and row["beta"] in ours else ""
    return row["peer"], row["beta"], f"{row['step_s']} s{skipped}", f"{sample} s", f"{row['peak_gib']} GiB", times


def tables(results: Row) -> str:
    """The tables of bench/README.md."""
    lines: list[str] = []
    if "step" in results:
        lines += ["| trainer | β | step | of it sampling | peak memory | ÷ Oncurve |", "|---|---|---|---|---|---|"]
        ours = {row["beta"]: row["step_s"] for row in results["step"] if row["peer"] == "oncurve"}
        lines += ["| " + " | ".join(map(str, _cells(row, ours))) + " |" for row in results["step"]]
        lines.append("")
    for name, columns in (
        ("long", ("shared", "prompt", "new", "group", "seconds", "tflops", "peak_gib", "times_faster")),
        ("completions", ("new", "checkpointing", "seconds", "tflops", "peak_gib")),
        ("linear", ("times", "completions", "seconds", "ms_per_completion", "mfu", "peak_gib")),
        ("mfu", ("size", "prompt", "new", "seconds", "tflops", "mfu", "peak_gib")),
        ("lora", ("trained", "rank", "step_s", "sample_s", "update_s", "mfu", "peak_gib")),
    ):
        if name in results:
            lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
            lines += ["| " + " | ".join(str(row.get(c, "")) for c in columns) + " |" for row in results[name]]
            lines.append("")
    env = results["environment"]
    versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    commits = ", ".join(f"{results['commits'][name]} ({name})" for name in PARTS if name in results)
    return "\n".join([*lines, f"{env['gpu']}, matrix rate {env['matrix_tflops']} TFLOP/s; {versions}; measured at {commits}."])


def write_table() -> None:
    """Write the tables between the markers of bench/README.md."""
    put(README, "step-gpu", tables(json.loads(RESULTS.read_text())))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="0.6b", choices=list(SHAPES))
    for name, value in (("prompts", 32), ("group", 8), ("prompt", 128), ("new", 256), ("steps", 3), ("pack", 16384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--betas", default="0,0.04")
    parser.add_argument("--mfu-sizes", default="1.7b,4b")
    parser.add_argument("--lengths", default="16384,65536", help="tokens of a completion for --only completions")
    parser.add_argument("--rank", type=int, default=32, help="adapter rank for --only lora")
    parser.add_argument("--against", default="", help="peers, separated by commas: trl, trl+vllm")
    parser.add_argument("--peer-path", default="", help="prepended to PYTHONPATH of the peers' processes")
    parser.add_argument("--peer-limit", type=float, default=300.0, help="seconds after which a peer is stopped")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--commit", default="", help="the measured commit, if this is not a git repository")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.table:
        write_table()
        return
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for results in measure(args):
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(tables(results))


if __name__ == "__main__":
    main()
