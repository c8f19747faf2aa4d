"""`oncurve plan`: memory and time of a run before anything is started; and the plan's word before a training run begins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from rich.console import Console

from oncurve import trust
from oncurve.cli.options import RUNS, Json, Runs, Sets, Trust, say, say_json, trust_if_asked
from oncurve.errors import ModelError, RecipeError, RunError
from oncurve.plan.cluster_simulation import Lengths, Size, async_break_even, compare_sizes, timing_of
from oncurve.plan.fixes import find_fixes
from oncurve.plan.hardware import CPU, GIB, Gpu, find_gpu, gpu_of_driver, this_cpu
from oncurve.plan.job import ALGORITHMS, Job
from oncurve.plan.model_table import find_shape
from oncurve.plan.plan import Plan, make_plan, report_data, side_by_side
from oncurve.plan.request import (
    PROMPT_TOKENS,
    PlanOverrides,
    algorithm_of,
    job_for,
    job_of_stage,
    plannable,
    usual_rank,
    with_overrides,
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

USUAL_GPU = "H100-80GB"
"""Planned for where nobody names a GPU and the model is not the built-in one."""
BYTES_PER_TOKEN = 3.5
"""Of English text, by the tokenizers of today's models; a little low, so that plans are a little high."""
LAST_STEPS = 5
"""Steps of a run that stand for it."""
USUAL_SHARE = 1 / 3
"""Mean length of completions as a share of their limit, for many GPUs, where nobody says: that they differ is what costs."""
LOOKED_AT = 200
"""Prompts of a task that are looked at for their length."""


def plan(
    recipe: Annotated[str | None, typer.Argument(metavar="[RECIPE]", help="A recipe; or name a model with --model.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A known model, a size (7B), a folder, or a config.json.")
    ] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="H100-80GB, H200, A100-40GB, RTX4090 …, or cpu.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="How many of them.")] = None,
    algorithm: Annotated[str | None, typer.Option("--algorithm", help=", ".join(ALGORITHMS) + ".")] = None,
    stage: Annotated[str | None, typer.Option("--stage", help="The recipe's stage; unset: its last.")] = None,
    sets: Sets = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train an adapter, not all weights.")] = False,
    lora_rank: Annotated[int | None, typer.Option("--lora-rank", min=1, help="Its rank.")] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", min=1, help="Completions of a prompt.")] = None,
    prompts: Annotated[int | None, typer.Option("--prompts", min=1, help="Prompts of a step.")] = None,
    prompt_tokens: Annotated[int | None, typer.Option("--prompt-tokens", min=1, help="Longest prompt.")] = None,
    new_tokens: Annotated[int | None, typer.Option("--new-tokens", min=1, help="Length limit of a completion.")] = None,
    mean_tokens: Annotated[
        float | None, typer.Option("--mean-tokens", min=1, help="Its usual length; unset: the limit.")
    ] = None,
    tokens_per_pack: Annotated[int | None, typer.Option("--tokens-per-pack", min=1, help="Tokens forwarded at once.")] = None,
    updates: Annotated[int | None, typer.Option("--updates", min=1, help="Passes over a step's samples.")] = None,
    minibatches: Annotated[int | None, typer.Option("--minibatches", min=1, help="Optimiser updates per pass.")] = None,
    beta: Annotated[
        float | None, typer.Option("--beta", min=0.0, help="Weight of the KL term; above 0 a reference is held.")
    ] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32.")] = None,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Completions decoded at once.")] = None,
    checkpointing: Annotated[
        str | None, typer.Option("--checkpointing", help="Compute activations again: auto (where needed), on, off.")
    ] = None,
    moments: Annotated[str | None, typer.Option("--moments", help="Adam's moments: float32 or int8.")] = None,
    optimiser_on_cpu: Annotated[
        bool, typer.Option("--optimiser-on-cpu", help="Masters and moments in the CPU's memory.")
    ] = False,
    reference_on_cpu: Annotated[bool, typer.Option("--reference-on-cpu", help="Brought over for its pass only.")] = False,
    sharding: Annotated[str | None, typer.Option("--sharding", help="none, optimiser or full, with several GPUs.")] = None,
    quantise: Annotated[str | None, typer.Option("--quantise", help="QLoRA's frozen base: nf4 or int8.")] = None,
    reward_model: Annotated[str | None, typer.Option("--reward-model", help="A learned reward on the GPU.")] = None,
    staleness: Annotated[
        int, typer.Option("--staleness", min=0, help="With several GPUs: steps that samples may lag behind, asynchronously.")
    ] = 1,
    measured: Annotated[
        str | None, typer.Option("--measured", metavar="RUN", help="With several GPUs: lengths and times as this run had them.")
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Memory and time of a run, before anything is started: does it fit, what would make it fit, how long is a step."""
    wishes = PlanOverrides(
        gpus=gpus, algorithm=algorithm, prompts=prompts, group_size=group_size, prompt_tokens=prompt_tokens,
        new_tokens=new_tokens, mean_tokens=mean_tokens, tokens_per_pack=tokens_per_pack, updates=updates,
        minibatches=minibatches, beta=beta, dtype=dtype, slots=slots,
        lora_rank=(lora_rank or usual_rank()) if lora or lora_rank else None, checkpointing=checkpointing,
        moments=moments, optimiser_on_cpu=optimiser_on_cpu or None, reference_on_cpu=reference_on_cpu or None,
        sharding=sharding, quantise=quantise, reward_model=None if reward_model is None else find_shape(reward_model),
    )  # fmt: skip
    for named in (None if measured is None else RunFolder.find(measured, runs), trust.of_recipe(recipe or "")):
        trust_if_asked(trusted, named)
    job, assumed = _question(recipe, model, gpu, stage, sets or [], wishes)
    plans = side_by_side(job, usual_rank())
    sizes = simulate_sizes(job, staleness, measured_run(measured, runs, job.gpu)) if job.gpus > 1 and job.does.samples else None
    if as_json:
        data = report_data(job, plans) | ({} if sizes is None else {"cluster": cluster_data(sizes, staleness)})
        say_json(data)
        return
    from oncurve.terminal.plan import render_cluster, render_plan

    own = next(p for p in plans if p.job == job)
    say(render_plan(job, own, plans, assumed))
    if sizes is not None:
        say(render_cluster(sizes, staleness, measured))


def _question(
    recipe: str | None, model: str | None, gpu: str | None, stage: str | None, sets: list[str], wishes: PlanOverrides
) -> tuple[Job, str]:
    """The job that was asked for, and what had to be assumed."""
    if (recipe is None) == (model is None):
        found = "neither" if recipe is None else "both"
        raise RecipeError(
            "RECIPE or --model", found, because="one of them says which model is trained",
            fix="oncurve plan recipes/arithmetic.toml, or oncurve plan --model Qwen/Qwen3-8B --gpu H100-80GB",
        )  # fmt: skip
    if model is not None:
        shape = find_shape(model)
        return job_for(shape, find_gpu(gpu or USUAL_GPU), wishes), _assumed(
            gpu is None, USUAL_GPU, wishes.prompt_tokens is None
        )
    assert recipe is not None
    trust.check_recipe(recipe)
    loaded = load_recipe(recipe, sets)
    device, guessed = _device(loaded, gpu)
    return with_overrides(stage_job(loaded, _stage(loaded, stage), device), wishes), _assumed(guessed, device.name, False)


def _assumed(gpu: bool, name: str, length: bool) -> str:
    told = [f"{name} for want of --gpu"] if gpu and name != CPU else []
    told += [f"prompts of {PROMPT_TOKENS} tokens for want of --prompt-tokens"] if length else []
    return f"taken to be: {', '.join(told)}" if told else ""


def _device(recipe: Recipe, gpu: str | None) -> tuple[Gpu, bool]:
    """The GPU that was named; else the CPU for what is meant for it, and a usual GPU for the rest."""
    small = recipe.model.device == "cpu" or (recipe.model.source == "tiny" and recipe.model.device == "auto")
    if (gpu is None and small) or (gpu or "").lower() == CPU:
        return this_cpu(recipe.threads), gpu is None
    return find_gpu(gpu or USUAL_GPU), gpu is None


def _stage(recipe: Recipe, name: str | None) -> Stage:
    known = plannable(recipe)
    found = [stage for stage in known if name in (None, stage.label)]
    if not found:
        labels = ", ".join(f"{stage.label} ({algorithm_of(stage)})" for stage in known) or "none"
        raise RecipeError(
            "--stage", name or "none that can be planned", because=f"the recipe's stages with a plan are: {labels}",
            fix="name one of them" if known else f"plans are for {', '.join(ALGORITHMS)}",
        )  # fmt: skip
    return found[-1]


def stage_job(recipe: Recipe, stage: Stage, gpu: Gpu) -> Job:
    """A stage's job, with lengths as its task's first prompts and worked examples have them."""
    config = task_for_stage(recipe, stage)
    if config.type not in TASKS or isinstance(stage, Dpo):  # rows from Python, or pairs of its own: lengths are not known here
        return job_of_stage(recipe, stage, gpu, PROMPT_TOKENS)
    task = build_task(config, "task" if stage.task is None else f"{stage.label}.task")

    def tokens(texts: Iterable[str]) -> int:
        longest = max((len(text.encode()) for text in texts), default=0)
        return longest if recipe.model.source == "tiny" else math.ceil(longest / BYTES_PER_TOKEN)

    job = job_of_stage(recipe, stage, gpu, tokens(p.shown for p in _some_prompts(task)) or PROMPT_TOKENS, task.alphabet)
    if job.does.samples:
        return job
    written = tokens(example.completion for example in task.examples[:LOOKED_AT])
    return replace(job, new_tokens=written, mean_tokens=float(written)) if written else job


def _some_prompts(task: Task) -> Iterator[Prompt]:
    yield from task.heldout[:LOOKED_AT]
    yield from (task.train_prompt(i) for i in range(min(LOOKED_AT, task.train_size or LOOKED_AT)))


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run has shown: lengths of its completions, and how its seconds lie to the planned ones."""

    lengths: tuple[int, ...] = ()
    sample_ratio: float = 1.0
    update_ratio: float = 1.0


def measured_run(name: str | None, runs: Path, gpu: Gpu) -> MeasuredRun:
    """The last steps of a run's last sampling stage, beside the plan of that same stage on this GPU."""
    if name is None:
        return MeasuredRun()
    folder = RunFolder.open(name, runs)
    trust.check(folder, "task")
    recipe = load_recipe(folder.recipe)
    stages = [stage for stage in plannable(recipe) if isinstance(stage, RolloutStage)]
    with RunReader.open(folder.path) as store:
        steps = [row for stage in stages[-1:] for row in store.steps(stage.label)][-LAST_STEPS:]
        if not steps:
            raise RunError(
                name, "no steps that sample", because="lengths and times are taken from them", fix="name another run"
            )
        reports = [store.step(row.stage, row.step) for row in steps]
    lengths = tuple(s.completion.length for r in reports for g in r.groups for s in g.scored.scored)
    job = stage_job(recipe, stages[-1], gpu)
    planned = seconds_of(replace(job, mean_tokens=min(float(job.new_tokens), max(1.0, sum(lengths) / len(lengths))))).phases
    learning = sum(planned.get(phase, 0.0) for phase in ("reference", "update", "critic", "optimiser"))
    took = {phase: median(report.seconds.get(phase, 0.0) for report in reports) for phase in ("sample", "update")}
    return MeasuredRun(lengths, took["sample"] / planned["sample"], took["update"] / learning)


def simulate_sizes(job: Job, staleness: int, seen: MeasuredRun) -> list[Size]:
    """1, 8, 64 and 512 GPUs and the number asked for, each with the prompts that one of them has now."""
    usual = sum(seen.lengths) / len(seen.lengths) if seen.lengths else job.mean_tokens
    lengths = Lengths(job.new_tokens, usual if usual < job.new_tokens else job.new_tokens * USUAL_SHARE, seen.lengths)
    timing = timing_of(replace(job, mean_tokens=lengths.mean), sample_ratio=seen.sample_ratio, update_ratio=seen.update_ratio)
    return compare_sizes(job, timing, lengths, sorted({1, 8, 64, 512, job.gpus}), staleness)


def cluster_data(sizes: Sequence[Size], staleness: int) -> dict[str, Any]:
    rows = [{**asdict(size), "gain": size.gain} for size in sizes]
    return {"staleness": staleness, "sizes": rows, "asynchronous_pays_from": async_break_even(sizes)}


def print_plan(recipe: Recipe) -> None:
    """Before a run begins on a GPU: the plan of its largest stage in one line. One that can't fit stops here, with what would.

    On a CPU nothing is planned and nothing is said.
    """
    gpu = gpu_here(recipe)
    if gpu is None:
        return
    errors = Console(stderr=True, highlight=False)
    try:
        plans = [(stage, make_plan(stage_job(recipe, stage, gpu), usual_rank())) for stage in plannable(recipe)]
    except ModelError as error:  # the model itself may load all the same
        errors.print(f"no plan: {error.where}: {error.what}", style="dim")
        return
    too_large = [(stage, made) for stage, made in plans if made.impossible]
    if too_large:
        raise _impossible(too_large)
    for stage, made in sorted(plans, key=lambda pair: -pair[1].memory.peak.total)[:1]:
        word = made.verdict if math.isfinite(gpu.flops) else made.room
        errors.print(f"plan: {stage.label} {word}", style="dim" if made.fits else "yellow")


def gpu_here(recipe: Recipe) -> Gpu | None:
    """The GPU that a recipe would train on, with the memory that its driver reports; None where it trains on the CPU.

    One that the table does not know has no rates: its plan is of memory alone.
    """
    from oncurve.models.loading.load import choose_device

    if choose_device(recipe.model.device).type != "cuda":
        return None
    import torch

    found = torch.cuda.get_device_properties(0)
    known = gpu_of_driver(found.name, found.total_memory)
    return (
        replace(known, memory=found.total_memory)
        if known
        else Gpu(found.name, found.total_memory, math.inf, math.inf, math.inf, math.inf)
    )


def _impossible(too_large: Sequence[tuple[Stage, Plan]]) -> ModelError:
    """The largest of the stages that can't fit, and what all of them need to."""
    stage, made = max(too_large, key=lambda pair: pair[1].memory.peak.total)
    parts = sorted(made.memory.peak.parts.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{name} {amount / GIB:.1f}" for name, amount in parts)
    fixes = dict.fromkeys(word for pair in too_large for word in _settable(*pair))
    return ModelError(stage.label, made.room, because=f"its largest parts, in GiB, are {told}", fix=" ".join(fixes))


def _settable(stage: Stage, made: Plan) -> list[str]:
    """The cheapest change that a recipe can say; where there is none, the cheapest of all."""
    for fix in find_fixes(made.job, usual_rank(), count=100):
        if all(change.key for change in fix.changes):
            return [f"--set {str(change.key).replace('STAGE', stage.label)}" for change in fix.changes]
    return [made.fixes[0].words if made.fixes else "a smaller model, or shorter completions"]
