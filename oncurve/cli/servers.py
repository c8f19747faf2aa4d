"""`oncurve serve`: a model or run behind an OpenAI-compatible endpoint.

The commands that show runs outside the terminal: `oncurve studio` and `oncurve report`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import RUNS, RunName, Runs, Trust, trust_if_asked
from oncurve.errors import MissingPackage, RunError, pip_install
from oncurve.runs.folder import RunFolder

KEY = "ONCURVE_SERVE_KEY"


def serve(
    target: Annotated[
        str,
        typer.Argument(metavar="RUN|MODEL", help="A run or RUN@STAGE-STEP, a model as `oncurve models` names it, or a hub id."),
    ],
    host: Annotated[
        str, typer.Option("--host", help="Another address than this machine's own is served only with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any that is free.")] = 8000,
    key_env: Annotated[str, typer.Option("--key-env", help="Environment variable of the key; where unset, one is made.")] = KEY,
    name: Annotated[str | None, typer.Option("--name", help="What clients call it; unset: as you call it here.")] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Completions decoded at once; unset: 8 on a CPU, 64 on a GPU.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest completion a request may ask for.")] = 1024,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one line of JSON once it listens.")] = False,
    until_closed: Annotated[bool, typer.Option("--until-closed", help="For programs: end when standard input closes.")] = False,
) -> None:
    """Serve a model or run as an OpenAI-compatible endpoint."""
    try:
        from oncurve.serve.server import api_key_for, serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve serve",
            f"{error.name} is not installed",
            because="the server is an optional part",
            fix=pip_install("serve"),
        ) from error
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import hush

    hush()
    trust_if_asked(trusted, trust.find(target, runs))
    key, made = api_key_for(host, key_env)
    with Console(stderr=True).status(f"loading {target}"):
        opened = load_model(target, runs)
    called = name or target

    def announce(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "model": called} | ({"key": key} if made else {})), flush=True)
            return
        asked = "" if key is None else f"\n  key    {key}" if made else f"\n  key    as in ${key_env}"
        lines = f"Serving {called}\n  {address}/v1\n  model  {called}{asked}\nCtrl-C ends it."
        Console(highlight=False, soft_wrap=True).print(Text(lines))

    serve(
        opened.policy, called, host, port,
        key=key, slots=slots, max_tokens=max_tokens, on_ready=announce, until_closed=until_closed,
    )  # fmt: skip


def say(line: str) -> None:
    Console(highlight=False, soft_wrap=True).print(Text(line))


def studio(
    runs: Runs = RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any that is free.")] = 8765,
    host: Annotated[str, typer.Option("--host", help="Another than this machine's own asks for a token.")] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    allow_code: Annotated[
        bool,
        typer.Option(
            "--allow-code", help="Let the page run Python of runs you tick, and send their judges' keys. Asks for a token."
        ),
    ] = False,
) -> None:
    """Look at runs in a browser, live: curves, every group, and GRPO explained."""
    try:
        from oncurve.studio.server import serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve studio",
            f"{error.name} is not installed",
            because="the studio's server is an optional part",
            fix=pip_install("studio"),
        ) from error
    if not runs.is_dir():
        raise RunError(f"--runs {runs}", "not a folder", because="runs are read from there", fix="name the folder of the runs")

    def announce(address: str) -> None:
        say(f"Studio of {runs.resolve()}\n  {address}\nCtrl-C ends it; runs go on.")

    serve(runs.resolve(), host, port, announce=announce, open_browser=open_browser, allow_code=allow_code)


def report(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="Where to write it.")] = Path("report.html"),
    runs: Runs = RUNS,
) -> None:
    """Write a run as one HTML file to send to someone: curves, best and worst groups, the recipe."""
    from oncurve.runs.atomic_files import replace_file
    from oncurve.studio.report import report_html

    text = report_html(RunFolder.open(run, runs))
    replace_file(out, text.encode())
    say(f"{out}: {len(text.encode()) / 1024:,.0f} kB, complete in itself")
