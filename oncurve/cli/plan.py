"""`oncurve plan`: memory and time of a run before anything starts. Also the line that `oncurve train` prints first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from oncurve import trust
from oncurve.cli.options import RUNS, Json, Runs, Sets, Trust, grant_trust, output, output_json
from oncurve.errors import ModelError, RecipeError, RunError
from oncurve.plan.cluster_simulation import Lengths, Size, async_break_even, compare_sizes, timing_of
from oncurve.plan.fixes import find_fixes
from oncurve.plan.hardware import CPU, GIB, Gpu, find_gpu, gpu_of_driver, this_cpu
from oncurve.plan.job import ALGORITHMS, Job
from oncurve.plan.model_table import find_shape
from oncurve.plan.plan import Plan, make_plan, report_data, side_by_side
from oncurve.plan.request import (
    PROMPT_TOKENS,
    algorithm_of,
    default_lora_rank,
    job_for,
    job_of_stage,
    plannable,
    with_settings,
)
from oncurve.plan.step_time import seconds_of
from oncurve.recipe.defaults import task_for_stage
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Dpo, RolloutStage, Stage
from oncurve.records import Prompt
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.tasks.base import Task
from oncurve.tasks.registry import TASKS, build_task
from oncurve.terminal.console import SafeConsole

DEFAULT_GPU = "H100-80GB"
"""Assumed if no --gpu is given and the model is not the built-in one."""
BYTES_PER_TOKEN = 3.5
"""Bytes of English text per token of common tokenizers; slightly low, so that plans are slightly high."""
LAST_STEPS = 5
"""The last steps of a measured run that are used."""
DEFAULT_MEAN_FRACTION = 1 / 3
"""Mean completion length as a fraction of the limit, for the simulation of many GPUs if no mean is given: unequal lengths are
what makes synchronous steps wait."""
SAMPLED_PROMPTS = 200
"""Prompts of a task whose lengths are measured."""


def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A recipe; or use --model.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A known model, a size (7B), a folder, or a config.json.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="H100-80GB, H200, A100-40GB, RTX4090 …, or cpu.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="Number of GPUs.")] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help=", ".join(ALGORITHMS) + ".")] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="The recipe's stage; default: the last one.")] = None,
    sets: Sets = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train an adapter instead of all weights.")] = False,
    lora_rank: Annotated[int | None, typer.Option("--lora-rank", min=1, help="Rank of the adapter.")] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", min=1, help="Completions per prompt.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts per step.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Length of the longest prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=1, help="Length limit of a completion.")] = None,
    mean_tokens: Annotated[
        float | None, typer.Option("--mean-tokens", min=1, help="Mean length of a completion; default: the limit.")
    ] = None,
    tokens_per_pack: Annotated[int | None, typer.Option("--tokens-per-pack", min=1, help="Tokens per forward pass.")] = None,
    updates: Annotated[int | None, typer.Option("--updates", min=1, help="Passes over a step's samples.")] = None,
    minibatches: Annotated[int | None, typer.Option("--minibatches", min=1, help="Optimiser updates per pass.")] = None,
    beta: Annotated[
        float | None, typer.Option("--beta", min=0.0, help="Weight of the KL term; above 0 it needs a reference model.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16, float16 or float32.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Completions decoded at once.")] = None,
    checkpointing: Annotated[
        str | None, typer.Option("--checkpointing", help="Activation checkpointing: auto (as needed), on, off.")
    ] = None,
    moments: Annotated[str | None, typer.Option("--moments", help="Adam's moments: float32 or int8.")] = None,
    optimiser_on_cpu: Annotated[
        bool, typer.Option("--optimiser-on-cpu", help="Master weights and moments in CPU memory.")
    ] = False,
    reference_on_cpu: Annotated[
        bool, typer.Option("--reference-on-cpu", help="The reference model in CPU memory; copied to the GPU for its pass.")
    ] = False,
    sharding: Annotated[str | None, typer.Option("--sharding", help="none, optimiser or full, with several GPUs.")] = None,
    quantise: Annotated[
        str | None, typer.Option("--quantise", help="Precision of the frozen base in QLoRA: nf4 or int8.")
    ] = None,
    reward_model: Annotated[
        str | None, typer.Option("--reward-model", help="A reward model on the GPU, named as for --model.")
    ] = None,
    staleness: Annotated[
        int, typer.Option("--staleness", min=0, help="With several GPUs: max staleness of asynchronous samples, in steps.")
    ] = 1,
    measured: Annotated[
        str | None, typer.Option("--measured", metavar="RUN", help="With several GPUs: use lengths and times of this run.")
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Estimate memory and step time before training.

    Says whether the run fits, what would make it fit, and how long a step takes.
    """
    settings = {
        "gpus": gpus, "algorithm": algorithm, "prompts": prompts, "group_size": group_size, "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens, "mean_tokens": mean_tokens, "tokens_per_pack": tokens_per_pack, "updates": updates,
        "minibatches": minibatches, "beta": beta, "dtype": dtype, "slots": slots,
        "lora_rank": (lora_rank or default_lora_rank()) if lora or lora_rank else None, "checkpointing": checkpointing,
        "moments": moments, "optimiser_on_cpu": optimiser_on_cpu or None, "reference_on_cpu": reference_on_cpu or None,
        "sharding": sharding, "quantise": quantise, "reward_model": None if reward_model is None else find_shape(reward_model),
    }  # fmt: skip
    for run in (None if measured is None else RunFolder.find(measured, runs), trust.run_of_recipe(recipe or "")):
        grant_trust(trusted, run)
    job, assumed = _build_job(recipe, model, gpu, stage, sets or [], settings)
    plans = side_by_side(job, default_lora_rank())
    sizes = simulate_sizes(job, staleness, measured_run(measured, runs, job.gpu)) if job.gpus > 1 and job.does.samples else None
    if as_json:
        data = report_data(job, plans) | ({} if sizes is None else {"cluster": cluster_data(sizes, staleness)})
        output_json(data)
        return
    from oncurve.terminal.plan import render_cluster, render_plan

    plan_of_job = next(p for p in plans if p.job == job)
    output(render_plan(job, plan_of_job, plans, assumed))
    if sizes is not None:
        output(render_cluster(sizes, staleness, measured))


def _build_job(
    recipe: str | None, model: str | None, gpu: str | None, stage: str | None, sets: list[str], settings: dict[str, Any]
) -> tuple[Job, str]:
    """The job to plan, and a line about what was assumed."""
    if (recipe is None) == (model is None):
        problem = "neither" if recipe is None else "both"
        raise RecipeError(
            "RECIPE or --model", problem, because="exactly one of them names the model to train",
            fix="oncurve plan recipes/arithmetic.toml, or oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB",
        )  # fmt: skip
    if model is not None:
        job = job_for(find_shape(model), find_gpu(gpu or DEFAULT_GPU), **settings)
        return job, _assumptions(gpu is None, DEFAULT_GPU, settings["prompt_tokens"] is None)
    assert recipe is not None
    trust.check_recipe(recipe)
    loaded = load_recipe(recipe, sets)
    device, guessed = _device(loaded, gpu)
    job = with_settings(stage_job(loaded, _stage(loaded, stage), device), **settings)
    return job, _assumptions(guessed, device.name, False)


def _assumptions(guessed_gpu: bool, gpu: str, guessed_length: bool) -> str:
    parts = [f"{gpu} (no --gpu given)"] if guessed_gpu and gpu != CPU else []
    parts += [f"prompts of {PROMPT_TOKENS} tokens (no --prompt-tokens given)"] if guessed_length else []
    return f"assuming {', '.join(parts)}" if parts else ""


def _device(recipe: Recipe, gpu: str | None) -> tuple[Gpu, bool]:
    """(the named GPU, or the CPU for a recipe that runs there, or the default GPU; whether it was assumed)."""
    on_cpu = recipe.model.device == "cpu" or (recipe.model.source == "tiny" and recipe.model.device == "auto")
    if (gpu is None and on_cpu) or (gpu or "").lower() == CPU:
        return this_cpu(recipe.threads), gpu is None
    return find_gpu(gpu or DEFAULT_GPU), gpu is None


def _stage(recipe: Recipe, name: str | None) -> Stage:
    stages = plannable(recipe)
    matches = [stage for stage in stages if name in (None, stage.label)]
    if not matches:
        labels = ", ".join(f"{stage.label} ({algorithm_of(stage)})" for stage in stages) or "none"
        raise RecipeError(
            "--stage", name or "none that can be planned", because=f"the recipe's plannable stages are: {labels}",
            fix="choose one of them" if stages else f"the planner supports {', '.join(ALGORITHMS)}",
        )  # fmt: skip
    return matches[-1]


def stage_job(recipe: Recipe, stage: Stage, gpu: Gpu) -> Job:
    """A stage's job, with the lengths of its task's first prompts and demonstrations."""
    config = task_for_stage(recipe, stage)
    if config.type not in TASKS or isinstance(stage, Dpo):  # rows from Python, or pairs: lengths are not known here
        return job_of_stage(recipe, stage, gpu, PROMPT_TOKENS)
    task = build_task(config, "task" if stage.task is None else f"{stage.label}.task")

    def tokens(texts: Iterable[str]) -> int:
        longest = max((len(text.encode()) for text in texts), default=0)
        return longest if recipe.model.source == "tiny" else math.ceil(longest / BYTES_PER_TOKEN)

    job = job_of_stage(recipe, stage, gpu, tokens(p.shown for p in _first_prompts(task)) or PROMPT_TOKENS, task.alphabet)
    if job.does.samples:
        return job
    new_tokens = tokens(example.completion for example in task.examples[:SAMPLED_PROMPTS])
    return replace(job, new_tokens=new_tokens, mean_tokens=float(new_tokens)) if new_tokens else job


def _first_prompts(task: Task) -> Iterator[Prompt]:
    yield from task.heldout[:SAMPLED_PROMPTS]
    yield from (task.train_prompt(i) for i in range(min(SAMPLED_PROMPTS, task.train_size or SAMPLED_PROMPTS)))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run measured: completion lengths, and the ratio of its times to the planned ones."""

    lengths: tuple[int, ...] = ()
    sample_ratio: float = 1.0
    update_ratio: float = 1.0


def measured_run(name: str | None, runs: Path, gpu: Gpu) -> MeasuredRun:
    """Compares the last steps of a run's last sampling stage with the plan of that stage on this GPU."""
    if name is None:
        return MeasuredRun()
    folder = RunFolder.open(name, runs)
    trust.check(folder, "task")
    recipe = trust.load_recipe_of(folder)
    stages = [stage for stage in plannable(recipe) if isinstance(stage, RolloutStage)]
    with RunReader.open(folder.path) as store:
        steps = [row for stage in stages[-1:] for row in store.steps(stage.label)][-LAST_STEPS:]
        if not steps:
            because = "--measured takes lengths and times from sampling steps"
            raise RunError(name, "a run without sampling steps", because=because, fix="choose another run")
        reports = [store.step(row.stage, row.step) for row in steps]
    lengths = tuple(s.completion.length for r in reports for g in r.groups for s in g.scored.scored)
    job = stage_job(recipe, stages[-1], gpu)
    planned = seconds_of(replace(job, mean_tokens=min(float(job.new_tokens), max(1.0, sum(lengths) / len(lengths))))).phases
    learning = sum(planned.get(phase, 0.0) for phase in ("reference", "update", "critic", "optimiser"))
    took = {phase: median(report.seconds.get(phase, 0.0) for report in reports) for phase in ("sample", "update")}
    return MeasuredRun(lengths, took["sample"] / planned["sample"], took["update"] / learning)


def simulate_sizes(job: Job, staleness: int, measured: MeasuredRun) -> list[Size]:
    """Simulates 1, 8, 64, 512 and the job's number of GPUs, each with the job's prompts per GPU."""
    mean = sum(measured.lengths) / len(measured.lengths) if measured.lengths else job.mean_tokens
    lengths = Lengths(
        job.new_tokens, mean if mean < job.new_tokens else job.new_tokens * DEFAULT_MEAN_FRACTION, measured.lengths
    )
    ratios = {"sample_ratio": measured.sample_ratio, "update_ratio": measured.update_ratio}
    timing = timing_of(replace(job, mean_tokens=lengths.mean), **ratios)
    return compare_sizes(job, timing, lengths, sorted({1, 8, 64, 512, job.gpus}), staleness)


def cluster_data(sizes: Sequence[Size], staleness: int) -> dict[str, Any]:
    rows = [{**asdict(size), "gain": size.gain} for size in sizes]
    return {"staleness": staleness, "sizes": rows, "asynchronous_pays_from": async_break_even(sizes)}


def print_plan(recipe: Recipe) -> None:
    """Prints the plan of a run's largest stage in one line before it starts on a GPU. Raises ModelError if it can't fit.

    On a CPU it does nothing.
    """
    gpu = gpu_here(recipe)
    if gpu is None:
        return
    errors = SafeConsole(stderr=True)
    try:
        plans = [(stage, make_plan(stage_job(recipe, stage, gpu), default_lora_rank())) for stage in plannable(recipe)]
    except ModelError as error:  # the model may load nevertheless
        errors.print(f"no plan: {error.where}: {error.what}", style="dim")
        return
    too_large = [(stage, plan) for stage, plan in plans if plan.is_impossible]
    if too_large:
        raise _does_not_fit_error(too_large)
    for stage, plan in sorted(plans, key=lambda pair: -pair[1].memory.peak.total)[:1]:
        verdict = plan.verdict if math.isfinite(gpu.flops) else plan.memory_verdict
        errors.print(f"plan: {stage.label} {verdict}", style="dim" if plan.fits else "yellow")


def gpu_here(recipe: Recipe) -> Gpu | None:
    """The GPU that a recipe would train on, with the memory that its driver reports; None if it trains on the CPU.

    A GPU that is not in the table has no rates: its plan covers memory only.
    """
    from oncurve.models.loading.load import choose_device

    if choose_device(recipe.model.device).type != "cuda":
        return None
    import torch

    device = torch.cuda.get_device_properties(0)
    known = gpu_of_driver(device.name, device.total_memory)
    if known:
        return replace(known, memory=device.total_memory)
    return Gpu(device.name, device.total_memory, math.inf, math.inf, math.inf, math.inf)


def _does_not_fit_error(too_large: Sequence[tuple[Stage, Plan]]) -> ModelError:
    """Names the largest stage that can't fit, and the changes that all of them need."""
    stage, plan = max(too_large, key=lambda pair: pair[1].memory.peak.total)
    parts = sorted(plan.memory.peak.parts.items(), key=lambda part: -part[1])[:3]
    sizes = ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in parts)
    fixes = dict.fromkeys(option for pair in too_large for option in _fix_options(*pair))
    return ModelError(stage.label, plan.memory_verdict, because=f"its largest parts, in GiB, are {sizes}", fix=" ".join(fixes))


def _fix_options(stage: Stage, plan: Plan) -> list[str]:
    """The cheapest fix on the current GPUs as --set options; if there is none, the cheapest fix in words."""
    for fix in find_fixes(plan.job, default_lora_rank(), count=100):
        if not any(change.needs_more_gpus for change in fix.changes):
            settings = [setting for change in fix.changes for setting in change.recipe_settings]
            return [f"--set {setting.replace('STAGE', stage.label)}" for setting in settings]
    return [plan.fixes[0].words if plan.fixes else "use a smaller model, or shorter completions"]
