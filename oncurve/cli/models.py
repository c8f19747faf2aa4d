"""`oncurve models`: what is on this machine and how a recipe names it; GGUF files converted to folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oncurve.cli.options import RUNS, Json, Runs, say, say_json
from oncurve.models.loading.local_models import LocalModel, list_local_models
from oncurve.terminal.text import DASH, size

models = typer.Typer(help="List the models on this machine; convert GGUF files.", invoke_without_command=True)

KINDS = {
    "folder": "folder",
    "gguf": "GGUF file",
    "adapter": "LoRA adapter",
    "converted": "from a GGUF file",
    "run": "a run's model",
    "hub": "in the hub's cache",
}


@models.callback(epilog="Example: oncurve models")
def list_models(
    context: typer.Context,
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """List the models on this machine: below this folder, of runs, converted, and in the hub's cache."""
    if context.invoked_subcommand is not None:
        return
    found = list_local_models(Path(), runs)
    if as_json:
        say_json([dataclasses.asdict(place) for place in found])
        return
    if found:
        say(table(found))
        say(Text("\nA recipe names one in model.source: oncurve train RECIPE --set model.source=NAME", "dim"))
    else:
        say(Text("No model is here yet. `tiny` is built in; a hub id (OWNER/NAME) is fetched when it is asked for.", "dim"))


@models.command("convert", epilog="Example: oncurve models convert model-q4_k_m.gguf models/mine")
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A GGUF file.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write; one that exists is refused.")],
    dtype: Annotated[
        Literal["bfloat16", "float32"], typer.Option("--dtype", help="Precision of the de-quantised weights.")
    ] = "bfloat16",
) -> None:
    """Write a GGUF file as a folder in Hugging Face format: weights de-quantised, tokenizer and chat template with them."""
    with Console(stderr=True).status(f"de-quantising {file.name}"):
        from oncurve.models.loading import gguf
        from oncurve.terminal.errors import hush

        hush()
        gguf.convert(file, folder, dtype)
    say(Text(f'{folder}: loads with AutoModelForCausalLM.from_pretrained, and as model.source = "{folder}"'))


NAME_WIDTH = 40
"""Names up to this stay whole, beside longer ones too, and what is said of them is folded instead."""


def table(found: list[LocalModel]) -> Table:
    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    shown.add_column("name it as", no_wrap=True)
    for head in ("size", "on disk"):
        shown.add_column(head, justify="right", no_wrap=True)
    shown.add_column("what it is")
    for place in found:
        parameters = DASH if place.parameters is None else size(place.parameters)
        what = ", ".join(word for word in (KINDS[place.kind], place.architecture, place.dtype) if word)
        name = "\n".join(place.name[at : at + NAME_WIDTH] for at in range(0, len(place.name), NAME_WIDTH))
        shown.add_row(Text(name), parameters, f"{place.bytes / 1e6:,.0f} MB", what)
    return shown
