"""`oncurve models`: lists the models on this machine, describes one, and converts GGUF files."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from oncurve.cli.options import RUNS, Command, CommandGroup, Json, Runs, output, output_json
from oncurve.errors import ModelError
from oncurve.model_families import PATHS, expected_path
from oncurve.models.loading.local_models import LocalModel, list_local_models, read_config
from oncurve.plan.model_shape import shape_of_config
from oncurve.terminal.console import SafeConsole
from oncurve.terminal.text import DASH, size


class ModelsGroup(CommandGroup):
    """`oncurve models NAME` is short for the hidden command `oncurve models path NAME`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = not args or args[0].startswith("-") or args[0] in self.commands
        return super().resolve_command(ctx, args if known else ["path", *args])


models = typer.Typer(
    cls=ModelsGroup,
    add_completion=False,
    help="List the models on this machine, describe one (`oncurve models NAME`), or convert a GGUF file.",
    invoke_without_command=True,
)

KINDS = {
    "folder": "folder",
    "gguf": "GGUF file",
    "adapter": "LoRA adapter",
    "converted": "converted from GGUF",
    "run": "a run's model",
    "hub": "in the hub cache",
}


@models.callback(epilog="Example: oncurve models")
def list_models(
    context: typer.Context,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """List the models on this machine: below this folder, of runs, converted, and in the hub cache."""
    if context.invoked_subcommand is not None:
        return
    local_models = list_local_models(Path(), runs)
    if as_json:
        output_json([dataclasses.asdict(model) for model in local_models])
        return
    if local_models:
        output(table(local_models))
        output(Text("\nTo train one: oncurve train RECIPE --set model.source=NAME", "dim"))
    else:
        output(Text("No models here yet. `tiny` is built in; a hub id (OWNER/NAME) is downloaded when it is used.", "dim"))


def _parameters(config: dict[str, Any]) -> str:
    """How many there are, by the settings; nothing if these don't say."""
    try:
        shape = shape_of_config(config, "")
    except ModelError:
        return ""
    active = f", {size(shape.active_parameters)} of them active" if shape.experts else ""
    return f", {size(shape.parameters)} parameters{active}"


@models.command("path", cls=Command, hidden=True, epilog="Example: oncurve models models/mine")
def path(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What model.source takes: a folder, hub id or GGUF file.")],
    as_json: Json = False,
) -> None:
    """Say which path a model takes, by its family. Reads its settings only; the weights are checked when it is opened."""
    config = read_config(name)
    family = str(config.get("model_type"))
    expected = expected_path(config)
    if as_json:
        output_json({"name": name, "family": family, **dataclasses.asdict(expected)})
        return
    output(Text(f"{name}: {family}{_parameters(config)}", "bold"))
    reason = f" ({expected.reason})" if expected.reason else ""
    output(Text(f"{PATHS[expected.path]}{reason}"))
    output(Text("When the model is opened, its log-probs are compared with its own forward: docs/models.md", "dim"))


@models.command("convert", cls=Command, epilog="Example: oncurve models convert model-q4_k_m.gguf models/mine")
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must not exist.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="Data type of the dequantised weights.")
    ] = "bfloat16",
) -> None:
    """Convert a GGUF file to a Hugging Face folder: dequantised weights, tokenizer and chat template."""
    with SafeConsole(stderr=True).status(Text(f"dequantising {file.name}")):
        from oncurve.models.loading import gguf
        from oncurve.terminal.errors import silence_libraries

        silence_libraries()
        gguf.convert(file, folder, dtype)
    output(Text(f'{folder}: loads with AutoModelForCausalLM.from_pretrained, and as model.source = "{folder}"'))


NAME_WIDTH = 40
"""Longer names are wrapped at this width; shorter ones never are."""


def table(local_models: list[LocalModel]) -> Table:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    rows.add_column("name", no_wrap=True)
    for head in ("size", "on disk"):
        rows.add_column(head, justify="right", no_wrap=True)
    rows.add_column("kind")
    for model in local_models:
        parameters = DASH if model.parameters is None else size(model.parameters)
        kind = ", ".join(word for word in (KINDS[model.kind], model.architecture, model.dtype) if word)
        name = "\n".join(model.name[at : at + NAME_WIDTH] for at in range(0, len(model.name), NAME_WIDTH))
        rows.add_row(Text(name), parameters, f"{model.bytes / 1e6:,.0f} MB", kind)
    return rows
