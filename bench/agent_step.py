"""One GRPO step of an agent with tools on a CPU, in Oncurve and in TRL: the same weights, task, environment class and work.

The task is that of recipes/agent-safe.toml: the policy turns a dial and opens a safe by tool calls. The tiny model is first
trained on demonstrations, so that it calls tools. Then each trainer runs in its own process, and they take steps in turn.

    python bench/agent_step.py            measure, print, write bench/results/agent_step.json
    python bench/agent_step.py --table    write the numbers of that file into bench/README.md
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median
from typing import Any

from reporting import commit, put
from step_cpu import machine, start, timed, versions

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results" / "agent_step.json"
NEW_TOKENS = 240
MAX_TURNS = 5

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "\n",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": "<end>", "content": "text"},
    },
}
"""TRL needs a description of the calls that transformers' parser understands. Both trainers use it."""

Step = dict[str, float]
"""Seconds of a step, wall and CPU time, seconds of sampling, and what was sampled."""


@dataclass(frozen=True)
class Work:
    model: str
    prompts: int
    group_size: int
    steps: int
    threads: int
    trl_micro_batch: int

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The recipe's safes, as often as the steps need them, as chats."""
        lines = (ROOT / "recipes" / "agent-safe.jsonl").read_text().splitlines()
        rows = [json.loads(lines[i % len(lines)]) for i in range(self.prompts * self.steps)]
        return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]


def load_safe() -> Any:
    """recipes/agent_safe.py, which is no installed module."""
    spec = importlib.util.spec_from_file_location("agent_safe", ROOT / "recipes" / "agent_safe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_model(folder: Path, threads: int) -> Path:
    """The tiny model after sft on the recipe's demonstrations, whose calls here also have empty `arguments`: TRL needs them."""
    from transformers import AutoTokenizer

    import oncurve

    dice, safe = random.Random(0), load_safe()
    rows = [safe.demonstration(dice) for _ in range(400)]
    text = "".join(json.dumps({"prompt": row}) + "\n" for row in rows)
    (folder / "demos.jsonl").write_text(text.replace('\\"}</tool_call>', '\\",\\"arguments\\":{}}</tool_call>'))
    changes = [
        f"sft.data={folder / 'demos.jsonl'}",
        "model.tiny.context=320",
        "grpo.steps=1",
        "grpo.optimiser.warmup_steps=0",
        f"threads={threads}",
    ]
    recipe = oncurve.load_recipe(str(ROOT / "recipes" / "agent-safe.toml"), [*changes, "grpo.optimiser.learning_rate=1e-12"])
    run = oncurve.train(recipe, out=folder / "sft", quiet=True)
    model = folder / "model"
    shutil.copytree(run.model_path, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(model)
    return model


def oncurve_worker(work: Work, pipe: Connection) -> None:
    """A run as a user starts it, with recording, paused after each step until the parent continues it."""
    import torch
    from transformers import TrainerCallback

    import oncurve

    torch.set_num_threads(work.threads)
    began = {"wall": 0.0, "cpu": 0.0}

    def wait() -> None:
        pipe.recv()
        began.update(wall=time.perf_counter(), cpu=time.process_time())

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            pipe.send("ready")
            wait()

        def on_step_end(self, *_: Any, report: Any, **__: Any) -> None:
            wall, cpu = time.perf_counter() - began["wall"], time.process_time() - began["cpu"]
            figures = {name: report.metrics[name] for name in ("reward", "tokens", "tool_calls")}
            pipe.send({"step": wall, "cpu": cpu, "sample": report.seconds["sample"], **figures})
            if report.step < work.steps:
                wait()

    with tempfile.TemporaryDirectory() as folder:
        oncurve.train(
            model=work.model, prompts=work.rows, environment_factory=load_safe().Safe, max_turns=MAX_TURNS, steps=work.steps,
            prompts_per_step=work.prompts, group_size=work.group_size, sampling={"max_new_tokens": NEW_TOKENS},
            optimiser={"learning_rate": 1e-6}, threads=work.threads, callbacks=[Turns()], out=Path(folder) / "run", quiet=True,
        )  # fmt: skip


def trl_worker(work: Work, pipe: Connection) -> None:
    """TRL's own trainer, paused at the start of each step until the parent continues it."""
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(work.threads)
    seconds: Step = {}
    began = {"wall": 0.0, "cpu": 0.0}

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            pipe.recv()
            seconds.clear()
            began.update(wall=time.perf_counter(), cpu=time.process_time())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            wall, cpu = time.perf_counter() - began["wall"], time.process_time() - began["cpu"]
            metrics = trainer._metrics["train"]
            figures = {
                "reward": metrics["reward"][-1],
                "tokens": metrics["completions/mean_length"][-1] * work.prompts * work.group_size,
                "tool_calls": metrics["tools/call_frequency"][-1],
            }
            pipe.send({"step": wall, "cpu": cpu, **seconds, **figures})

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder, max_steps=work.steps, per_device_train_batch_size=work.trl_micro_batch,
            gradient_accumulation_steps=work.prompts * work.group_size // work.trl_micro_batch, num_generations=work.group_size,
            max_completion_length=NEW_TOKENS, max_tool_calling_iterations=MAX_TURNS - 1, loss_type="grpo", beta=0.0,
            learning_rate=1e-6, lr_scheduler_type="constant", bf16=False, use_cpu=True, gradient_checkpointing=False,
            logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, shuffle_dataset=False,
            model_init_kwargs={"dtype": "float32"},
        )  # fmt: skip
        trainer = GRPOTrainer(
            work.model, args=config, train_dataset=Dataset.from_list(work.rows), environment_factory=load_safe().Safe,
            callbacks=[Turns()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer._generate = timed(trainer._generate, "sample", seconds)
        pipe.send("ready")
        trainer.train()


def measure(work: Work, warm_up: int) -> dict[str, list[Step]]:
    """The steps after the warm-up, by trainer."""
    pipes = {"oncurve": start(oncurve_worker, work), "trl": start(trl_worker, work)}
    steps: dict[str, list[Step]] = {name: [] for name in pipes}
    for n in range(work.steps):
        for name in sorted(pipes, reverse=n % 2 == 1):
            pipes[name].send("step")
            steps[name].append(pipes[name].recv())
            print(n, name, {key: round(value, 3) for key, value in steps[name][-1].items()}, flush=True)
    return {name: rows[warm_up:] for name, rows in steps.items()}


def table(report: dict[str, Any]) -> str:
    lines = [
        "| | step | of it sampling | CPU time | tokens per step | calls per completion | reward |",
        "|---|---|---|---|---|---|---|",
    ]
    medians = {}
    for name, steps in report["steps"].items():
        medians[name] = median(step["step"] for step in steps)
        sample, cpu = median(step["sample"] for step in steps), median(step["cpu"] for step in steps)
        tokens, calls, reward = (mean(step[key] for step in steps) for key in ("tokens", "tool_calls", "reward"))
        lines.append(
            f"| {name} | {medians[name]:.2f} s | {sample:.2f} s | {cpu:.2f} s | {tokens:,.0f} | {calls:.2f} | {reward:.2f} |"
        )
    of = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    where = f"{report['machine']['cpu']}, threads: {report['work']['threads']}, load {report['machine']['load']:.1f}"
    count = len(report["steps"]["oncurve"])
    ratio = medians["trl"] / medians["oncurve"]
    summary = f"TRL's step takes {ratio:.1f} times as long. Medians of {count} steps, and means of what was sampled."
    return "\n".join([*lines, "", f"{summary} {where}; {of}; commit {report['commit']}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12, help="measured steps")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the measured ones")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="completions per TRL micro-batch")
    parser.add_argument("--table", action="store_true", help="only write the last results into bench/README.md")
    args = parser.parse_args()
    if args.table:
        put(ROOT / "bench" / "README.md", "agent-step", table(json.loads(RESULTS.read_text())))
        return
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS=str(args.threads))
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder), args.threads)
        work = Work(str(model), 12, 8, args.steps + args.warm_up, args.threads, args.trl_micro_batch)
        before = machine()  # its load is that before the measurement
        steps = measure(work, args.warm_up)
    settings = {key: value for key, value in asdict(work).items() if key != "model"}
    report = {"commit": commit(), "machine": before, "versions": versions(), "work": settings, "steps": steps}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))


if __name__ == "__main__":
    main()
