"""One complete GRPO step on a CPU in Oncurve and TRL: sample, score, update, with the same tiny model and the same work.

Each trainer runs in its own process. The parent lets them take steps in turn and swaps the order each round, so that
they never run at the same time and a machine that slows down affects both.

    python bench/step_cpu.py            measure, print, write bench/results/step_cpu.json
    python bench/step_cpu.py --table    write the numbers of that file into bench/README.md
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reporting import commit, put

import oncurve

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "step_cpu.json"
README = HERE / "README.md"
VOCABULARY = 512
PHASES = ("sample", "score", "update", "record")
PACKAGES = ("trl", "torch", "transformers")

Seconds = dict[str, float]
"""Seconds by phase, and of the complete step as `step`."""


@dataclass(frozen=True)
class Work:
    """What a step does. Every completion has exactly ``new_tokens`` tokens, so no trainer profits from short ones."""

    prompt_tokens: int
    new_tokens: int
    prompts: int
    group_size: int
    steps: int
    threads: int
    trl_micro_batch: int

    @property
    def name(self) -> str:
        return f"{self.prompt_tokens} + {self.new_tokens} tokens"

    @property
    def texts(self) -> list[str]:
        """Prompts for every step, the same for both trainers."""
        from random_models import texts

        return texts(self.prompts * self.steps, self.prompt_tokens, VOCABULARY)


def reward(completions: Sequence[str], **_: object) -> list[float]:
    """A cheap reward that is practically never equal for all completions of a group, so no group is without signal and none is
    skipped."""
    return [float(completion.count("7") + completion.count("3")) for completion in completions]


def tiny_model(threads: int) -> tuple[Any, Any]:
    """4 layers, 128 wide, 4 query and 2 key heads of 32, random weights; a tokenizer of 512 words."""
    import torch
    from random_models import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=2,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), make_tokenizer(VOCABULARY)


def oncurve_worker(work: Work, pipe: Connection) -> None:
    """One step of the loop, recorded in the run's database as in a real run."""
    from oncurve.engines.native.engine import NativeEngine
    from oncurve.models.policy import Policy
    from oncurve.recipe.schema.sections import Engine
    from oncurve.recipe.schema.stages import Grpo
    from oncurve.rewards.mix import RewardMix
    from oncurve.rewards.python_function import as_reward
    from oncurve.runs.database.writer import RunWriter
    from oncurve.tasks.data.prompt_list import PromptList
    from oncurve.training.stages.grpo import GrpoLoop

    stage = Grpo.model_validate(
        {
            "steps": work.steps,
            "prompts_per_step": work.prompts,
            "group_size": work.group_size,
            "sampling": {"max_new_tokens": work.new_tokens, "min_new_tokens": work.new_tokens},
        }
    )
    engine = NativeEngine(Policy(*tiny_model(work.threads)), Engine())
    loop = GrpoLoop(stage, 0, PromptList.of(work.texts), engine, RewardMix([as_reward(reward)]))
    with tempfile.TemporaryDirectory() as folder, RunWriter.create(Path(folder)) as store:
        store.begin_stage(stage.label, stage.type, 0, stage.steps)
        gc.freeze()  # as the trainer does
        pipe.send("ready")
        for n in range(1, work.steps + 1):
            pipe.recv()
            start = time.perf_counter()
            report = loop.step(n)
            stepped = time.perf_counter()
            store.record_step(report)
            done = time.perf_counter()
            seconds = {**report.seconds, "record": done - stepped, "step": done - start}
            seconds["update"] += seconds.pop("grade")
            pipe.send(seconds)


def trl_worker(work: Work, pipe: Connection) -> None:
    """TRL's own trainer, paused at the start of each step until the parent continues it."""
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    seconds: Seconds = {}

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pipe.recv()
            seconds.clear()
            seconds["start"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            total = time.perf_counter() - seconds.pop("start")
            pipe.send({**seconds, "update": total - sum(seconds.values()), "step": total})

    model, tokenizer = tiny_model(work.threads)
    rows = work.prompts * work.group_size
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=work.steps,
            per_device_train_batch_size=work.trl_micro_batch,
            gradient_accumulation_steps=rows // work.trl_micro_batch,
            num_generations=work.group_size,
            max_completion_length=work.new_tokens,
            generation_kwargs={"min_new_tokens": work.new_tokens},
            loss_type="grpo",
            beta=0.0,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        data = Dataset.from_list([{"prompt": text} for text in work.texts])
        trainer = GRPOTrainer(model, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Turns()])
        trainer.remove_callback(PrinterCallback)
        trainer._generate = timed(trainer._generate, "sample", seconds)
        trainer._calculate_rewards = timed(trainer._calculate_rewards, "score", seconds)
        pipe.send("ready")
        trainer.train()


def timed(function: Callable[..., Any], phase: str, seconds: Seconds) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        start = time.perf_counter()
        out = function(*arguments, **named)
        seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - start
        return out

    return call


WORKERS = {"oncurve": oncurve_worker, "trl": trl_worker}


def start(worker: Callable[[Any, Connection], None], work: Any) -> Connection:
    """Start a worker process that is ready to step; returns the pipe that drives it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=worker, args=(work, theirs), daemon=True).start()
    theirs.close()
    ours.recv()
    return ours


def measure(work: Work, warm_up: int) -> dict[str, list[Seconds]]:
    """Seconds of every step after the warm-up, by trainer."""
    pipes = {name: start(worker, work) for name, worker in WORKERS.items()}
    seconds: dict[str, list[Seconds]] = {name: [] for name in WORKERS}
    for n in range(work.steps):
        for name in sorted(pipes, reverse=n % 2 == 1):
            pipes[name].send("step")
            seconds[name].append(pipes[name].recv())
    return {name: steps[warm_up:] for name, steps in seconds.items()}


def summary(work: Work, seconds: dict[str, list[Seconds]]) -> dict[str, Any]:
    """Medians by trainer and phase, and the ratio of the two step times."""
    medians = {
        name: {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in (*PHASES, "step")}
        for name, steps in seconds.items()
    }
    ratio = medians["trl"]["step"] / medians["oncurve"]["step"]
    return {"name": work.name, "work": asdict(work), "medians": medians, "ratio": ratio, "steps": seconds}


def show(result: dict[str, Any]) -> None:
    steps = len(result["steps"]["oncurve"])
    print(f"\n{result['name']}, {result['work']['prompts']} prompts × {result['work']['group_size']}: medians of {steps} steps")
    print(f"  {'':8}" + "".join(f"{phase:>10}" for phase in (*PHASES, "step")))
    for name, medians in result["medians"].items():
        print(f"  {name:8}" + "".join(f"{medians[phase]:9.3f}s" for phase in (*PHASES, "step")))
    print(f"  TRL's step takes {result['ratio']:.2f} times as long", flush=True)


def machine() -> dict[str, Any]:
    names = re.findall(r"^model name\s*: (.+)$", _read("/proc/cpuinfo"), re.M)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    cpu = names[0] if names else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "system": platform.system(), "load": load}


def _read(path: str) -> str:
    return Path(path).read_text() if Path(path).exists() else ""


def versions() -> dict[str, str]:
    peers = {package: metadata.version(package) for package in PACKAGES}
    return {"oncurve": oncurve.__version__, **peers, "python": platform.python_version()}


def table(results: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    lines = ["| prompt + completion | TRL | Oncurve | TRL ÷ Oncurve | Oncurve's phases |", "|---|---|---|---|---|"]
    for result in results["results"]:
        ours, theirs = result["medians"]["oncurve"], result["medians"]["trl"]
        phases = ", ".join(f"{phase} {ours[phase]:.3f}" for phase in PHASES)
        steps = f"{theirs['step']:.3f} s | {ours['step']:.3f} s"
        lines.append(f"| {result['name']} | {steps} | {result['ratio']:.2f} | {phases} |")
    of = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    count = len(results["results"][0]["steps"]["oncurve"])
    where = f"{results['machine']['cpu']}, {results['results'][0]['work']['threads']} threads"
    return "\n".join([*lines, "", f"Medians of {count} steps. {where}; {of}; commit {results['commit']}."])


def fill_readme() -> None:
    filled = table(json.loads(RESULTS.read_text()))
    put(README, "table", filled)
    print(filled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before the measured ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="completions per TRL micro-batch")
    parser.add_argument("--table", action="store_true", help="only write the last results into bench/README.md")
    args = parser.parse_args()
    if args.table:
        fill_readme()
        return
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS=str(args.threads))
    print(" · ".join(f"{name} {version}" for name, version in versions().items()))
    results: list[dict[str, Any]] = []
    report = {"commit": commit(), "machine": machine(), "versions": versions(), "results": results}
    for prompt_tokens in (32, 192):
        work = Work(prompt_tokens, 48, 8, 8, args.steps + args.warm_up, args.threads, args.trl_micro_batch)
        result = summary(work, measure(work, args.warm_up))
        results.append(result)
        show(result)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nwritten to {RESULTS.relative_to(HERE.parent)}")


if __name__ == "__main__":
    main()
