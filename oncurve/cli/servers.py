"""`oncurve serve`, an OpenAI-compatible endpoint; `oncurve studio` and `oncurve report`, runs in a browser."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import RUNS, RunName, RunOrModel, Runs, Trust, check_target, grant_trust
from oncurve.errors import MissingPackage, RunError, pip_install
from oncurve.runs.folder import RunFolder
from oncurve.terminal.console import SafeConsole

KEY = "ONCURVE_SERVE_KEY"


def serve(
    target: RunOrModel,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but a loopback address requires a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8000,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the key; if it is unset, a key is generated.")
    ] = KEY,
    name: Annotated[str | None, typer.Option("--name", help="Name of the model for clients; default: RUN|MODEL.")] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Completions decoded at once; default: 8 on a CPU, 64 on a GPU.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest completion that a request may ask for.")
    ] = 1024,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it listens, for programs.")] = False,
    until_closed: Annotated[bool, typer.Option("--until-closed", help="End when standard input closes, for programs.")] = False,
) -> None:
    """Serve a model or run as an OpenAI-compatible endpoint."""
    check_target(target, runs)
    try:
        from oncurve.serve.server import api_key_for, serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve serve",
            f"{error.name} is not installed",
            because="the server is an optional extra",
            fix=pip_install("serve"),
        ) from error
    from oncurve.operations.run_model import load_model, missing_environment
    from oncurve.terminal.errors import print_advice, silence_libraries

    silence_libraries()
    grant_trust(trusted, trust.run_of_target(target, runs))
    key, is_generated = api_key_for(host, key_env)
    with SafeConsole(stderr=True).status(Text(f"loading {target}")):
        model = load_model(target, runs)
        note = missing_environment(model)
    if note is not None:
        print_advice(note)
    model_name = name or target

    def announce(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "model": model_name} | ({"key": key} if is_generated else {})), flush=True)
            return
        key_line = "" if key is None else f"\n  key    {key if is_generated else f'from ${key_env}'}"
        _print_line(f"Serving {model_name}\n  {address}/v1\n  model  {model_name}{key_line}\nCtrl-C stops it.")

    serve(
        model.policy, model_name, host, port,
        key=key, slots=slots, max_tokens=max_tokens, on_ready=announce, until_closed=until_closed,
    )  # fmt: skip


def _print_line(line: str) -> None:
    """Prints without wrapping, so that addresses and paths can be copied."""
    SafeConsole(soft_wrap=True).print(Text(line))


def studio(
    runs: Runs = RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any free one.")] = 8765,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but a loopback address requires a token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code",
            help="Let the page run Python of runs you trust, and send API keys to their judges. Requires a token.",
        ),
    ] = False,
) -> None:
    """Show runs in a browser: live curves, every group, GRPO explained."""
    try:
        from oncurve.studio.server import serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve studio",
            f"{error.name} is not installed",
            because="the studio is an optional extra",
            fix=pip_install("studio"),
        ) from error
    if not runs.is_dir():
        raise RunError(
            f"--runs {runs}", "not a folder", because="the studio reads runs from it", fix="name the folder of the runs"
        )

    def announce(address: str) -> None:
        _print_line(f"Studio for {runs.resolve()}\n  {address}\nCtrl-C stops it; runs keep training.")

    serve(runs.resolve(), host, port, announce=announce, open_browser=open_browser, allow_code=allow_code)


def report(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write; must not exist.")] = Path(
        "report.html"
    ),
    runs: Runs = RUNS,
) -> None:
    """Write a run as one HTML file.

    The file has the curves, the best and worst groups and the recipe, and needs nothing else.
    """
    from oncurve.runs.atomic_files import replace_file
    from oncurve.studio.report import report_html

    folder = RunFolder.open(run, runs)
    if out.exists():
        raise RunError(str(out), "already exists", because="nothing is overwritten", fix="choose another name with -o")
    text = report_html(folder)
    replace_file(out, text.encode())
    _print_line(f"{out}: {len(text.encode()) / 1024:,.0f} kB, self-contained")
