"""The same task and budget in TRL and Oncurve: mean reward by step and by second, both curves in one plot.

Both start from the same weights, use the same prompts in the same order and the same rewards (Oncurve's, called by TRL as a
function), and make the same number of updates at the same learning rate. They run one after the other, so each has the machine
to itself. Stages before the recipe's `grpo` stage are trained once. The learning rate is constant after its warm-up, for both.
TRL samples with transformers' `generate`, not with vLLM.

    python bench/curves.py                                     the built-in arithmetic recipe, on a CPU
    python bench/curves.py --recipe gsm8k-qwen --seconds 240   on a GPU; needs the recipe's model and data
    python bench/curves.py --draw arithmetic                   redraw the plot from the numbers of an earlier run

Writes bench/results/curves-RECIPE.json and docs/images/curves-RECIPE.svg.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from reporting import commit, plot

HERE = Path(__file__).resolve().parent
PACKAGES = ("trl", "torch", "transformers")
SAME = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo"}
"""Objectives that both have, ours and TRL's name for it."""
COLOURS = {"Oncurve": "#1f5f8b", "TRL": "#b4501e"}


def job_of(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The recipe's grpo stage, starting from weights that both trainers can load. Earlier stages are trained here, once."""
    from oncurve.models.loading.load import load_policy, resolve_source
    from oncurve.operations.run_model import export
    from oncurve.recipe.load import dump_recipe, find_recipe, load_recipe
    from oncurve.runs.checkpoints.listing import RunTarget
    from oncurve.tasks.registry import build_task
    from oncurve.terminal.errors import silence_libraries
    from oncurve.training.start import begin

    silence_libraries()
    recipe = load_recipe(find_recipe(Path(args.recipe)), tuple(args.set))
    place = next(i for i, stage in enumerate(recipe.stages) if stage.type == "grpo")
    stage, start = recipe.stages[place], str(work / "start")
    if place:
        print(f"training the stages before {stage.label}", flush=True)
        export(RunTarget(begin(recipe.model_copy(update={"stages": recipe.stages[:place]}), out=work / "before")), Path(start))
    elif recipe.model.source == "tiny":
        load_policy(recipe.model, alphabet=build_task(recipe.task).alphabet, seed=recipe.seed).save(Path(start))
    else:
        start = resolve_source(recipe.model).source
    steps = args.steps or stage.steps
    how = {"schedule": "constant", "warmup_steps": min(stage.optimiser.warmup_steps, steps)}
    changes = {"steps": steps, "optimiser": stage.optimiser.model_copy(update=how), "eval_every": 0, "save_every": 0}
    model = recipe.model.model_copy(update={"source": start})
    alone = recipe.model_copy(update={"model": model, "stages": (stage.model_copy(update=changes),)})
    (work / "job.toml").write_text(dump_recipe(alone), encoding="utf-8")
    return {"recipe": str(work / "job.toml"), "seconds": args.seconds, "micro": args.micro, "folder": str(work)}


def with_oncurve(job: dict[str, Any]) -> dict[str, Any]:
    from oncurve.recipe.load import load_recipe
    from oncurve.records import StepReport
    from oncurve.terminal.errors import silence_libraries
    from oncurve.training.listeners import Listener
    from oncurve.training.start import begin
    from oncurve.training.trainer import TimeUp

    marks: list[tuple[float, float]] = []
    began = 0.0

    class Watch(Listener):
        def on_stage_start(self, *_: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step(self, report: StepReport) -> None:
            marks.append((time.perf_counter() - began, report.metrics["reward"]))

    silence_libraries()
    out = Path(job["folder"]) / "oncurve"
    with contextlib.suppress(TimeUp):
        begin(load_recipe(Path(job["recipe"])), out=out, listeners=[Watch()], minutes=job["seconds"] / 60)
    return {"marks": marks, "model": str(out)}


def with_trl(job: dict[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import PrinterCallback, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOConfig, GRPOTrainer

    from oncurve.recipe.load import load_recipe
    from oncurve.recipe.schema.stages import Grpo
    from oncurve.records import Completion, Group
    from oncurve.tasks.prompt_order import prompts_for_step
    from oncurve.training.start import build_tasks_and_rewards

    logging.disable_progress_bar()
    recipe = load_recipe(Path(job["recipe"]))
    (stage,) = recipe.stages
    assert isinstance(stage, Grpo)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    task_of, mix_of = build_tasks_and_rewards(recipe)
    task, mix = task_of(stage), mix_of(stage)
    size, updates = stage.group_size, stage.updates_per_step
    prompts = [p for n in range(stage.steps) for p in prompts_for_step(task, recipe.seed, n, stage.prompts_per_step)]
    rows = [
        {"prompt": p.text if p.text is not None else [dict(m) for m in p.messages or ()], "place": i}
        for i, p in enumerate(prompts)
    ]
    step_rewards: list[float] = []
    marks: list[tuple[float, float]] = []
    began = 0.0

    def reward(completions: Sequence[Any], completion_ids: Sequence[list[int]], place: Sequence[int], **_: Any) -> list[float]:
        sampled = []
        for completion, ids in zip(completions, completion_ids, strict=True):
            text, zeros = (
                completion if isinstance(completion, str) else completion[0]["content"],
                np.zeros(max(len(ids), 1), np.float32),
            )
            tokens = np.asarray(ids or [0], np.int64)
            sampled.append(Completion(tokens, text, "end", zeros, zeros, zeros, np.ones(len(tokens), bool)))
        groups = [
            Group(prompts[place[i]], np.zeros(1, np.int64), tuple(sampled[i : i + size])) for i in range(0, len(sampled), size)
        ]
        totals = [0.0 if s.total is None else s.total for group in mix.score(groups) for s in group.scored]
        step_rewards.append(float(np.mean(totals)))
        return totals

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, control: Any, **__: Any) -> None:
            if state.global_step % updates == 0:
                marks.append((time.perf_counter() - began, step_rewards[-1]))
            control.should_training_stop |= time.perf_counter() - began > job["seconds"]

    many, on_gpu, how = stage.prompts_per_step * size, torch.cuda.is_available(), stage.optimiser
    config = GRPOConfig(
        output_dir=f"{job['folder']}/trl", max_steps=stage.steps * updates, num_iterations=updates, num_generations=size,
        per_device_train_batch_size=min(job["micro"], many), gradient_accumulation_steps=many // min(job["micro"], many),
        max_completion_length=stage.sampling.max_new_tokens, temperature=stage.sampling.temperature, top_k=0,
        loss_type=SAME[stage.objective], beta=stage.kl.beta, learning_rate=how.learning_rate, adam_beta1=how.betas[0],
        adam_beta2=how.betas[1], adam_epsilon=how.eps, weight_decay=how.weight_decay, max_grad_norm=how.max_grad_norm,
        lr_scheduler_type="constant_with_warmup", warmup_steps=how.warmup_steps, shuffle_dataset=False, seed=recipe.seed,
        bf16=on_gpu, use_cpu=not on_gpu, gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True,
        **({"epsilon_high": 0.28} if stage.objective == "dapo" else {}),
    )  # fmt: skip
    trainer = GRPOTrainer(recipe.model.source, reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[Watch()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    out = Path(job["folder"]) / "trl-model"
    trainer.save_model(str(out))
    return {"marks": marks, "model": str(out)}


WORKERS = {"Oncurve": with_oncurve, "TRL": with_trl}


def alone(name: str, work: Path) -> dict[str, Any]:
    """Run one trainer in its own process, then evaluate its model on the held-out problems."""
    result_file = work / f"{name}.json"
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--worker",
        name,
        "--job",
        str(work / "job.json"),
        "--told",
        str(result_file),
    ]
    with (work / f"{name}.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        raise SystemExit(f"{name} failed:\n{(work / f'{name}.log').read_text()[-3000:]}")
    result: dict[str, Any] = json.loads(result_file.read_text())
    evaluation = [sys.executable, "-m", "oncurve", "eval", result.pop("model"), "--task", str(work / "job.toml"), "--json"]
    measured = json.loads(subprocess.run(evaluation, capture_output=True, text=True, check=True).stdout)
    return {**result, "accuracy": measured["accuracy"], "interval": measured["interval"], "asked": measured["asked"]}


def machine() -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = {package: metadata.version(package) for package in PACKAGES}
    return {"device": name, "load": round(os.getloadavg()[0], 2), "commit": commit(), **versions}


def draw(name: str) -> Path:
    """Plot reward by step on the left and by second on the right."""
    results = json.loads((HERE / "results" / f"curves-{name}.json").read_text())
    file = HERE.parent / "docs" / "images" / f"curves-{name}.svg"
    with plot(file, 1, 2, figsize=(9, 3.6), sharey=True) as (figure, panels):
        for who, colour in COLOURS.items():
            marks = results[who]["marks"]
            rewards = [reward for _, reward in marks]
            panels[0].plot(range(1, len(marks) + 1), rewards, color=colour, label=who, linewidth=1.5)
            panels[1].plot([seconds for seconds, _ in marks], rewards, color=colour, label=who, linewidth=1.5)
        for panel, label in zip(panels, ("step", "seconds"), strict=True):
            panel.set_xlabel(label)
            panel.set_xlim(left=0)
        panels[0].set_ylabel("mean reward of a step")
        panels[0].legend(frameon=False, loc="lower right")
        figure.suptitle(f"{name}: {results['machine']['device']}, TRL {results['machine']['trl']}", fontsize=10)
    return file


def show(name: str, results: dict[str, Any]) -> None:
    for who in COLOURS:
        marks, (low, high) = results[who]["marks"], results[who]["interval"]
        last = sum(reward for _, reward in marks[-10:]) / len(marks[-10:])
        steps = f"{len(marks)} steps in {marks[-1][0]:.0f} s, {marks[-1][0] / len(marks):.2f} s a step"
        right = f"{100 * results[who]['accuracy']:.1f} % ({100 * low:.1f}–{100 * high:.1f}) of {results[who]['asked']}"
        print(f"{who:8} {steps}; mean reward of the last ten steps {last:.3f}; held-out {right}")
    print(f"wrote bench/results/curves-{name}.json and {draw(name)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="arithmetic", help="a recipe whose first grpo stage is compared")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a recipe key")
    parser.add_argument("--steps", type=int, help="steps for both; default: the recipe's")
    parser.add_argument("--seconds", type=float, default=240, help="time limit for each trainer")
    parser.add_argument("--micro", type=int, default=64, help="completions per TRL micro-batch")
    parser.add_argument("--draw", metavar="RECIPE", help="only redraw the plot of an earlier run")
    for hidden in ("--worker", "--job", "--told"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if args.draw:
        print(draw(args.draw))
        return
    if args.worker:
        Path(args.told).write_text(json.dumps(WORKERS[args.worker](json.loads(Path(args.job).read_text()))))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        job = job_of(args, work)
        (work / "job.json").write_text(json.dumps(job))
        recipe = (work / "job.toml").read_text().replace(f"{work}/", "")
        results: dict[str, Any] = {"machine": machine(), "seconds": args.seconds, "recipe": recipe}
        for who in COLOURS:
            print(f"training with {who}", flush=True)
            results[who] = alone(who, work)
    name = Path(args.recipe).stem
    file = HERE / "results" / f"curves-{name}.json"
    file.write_text(json.dumps(results, indent=1) + "\n")
    show(name, results)


if __name__ == "__main__":
    main()
