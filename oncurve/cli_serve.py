"""`oncurve serve`: a model or run behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from oncurve import trust
from oncurve.cli_options import RUNS, Runs, Trust, trust_if_asked
from oncurve.errors import MissingPackage, pip_install

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
        from oncurve.serve.server import key_for, serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve serve",
            f"{error.name} is not installed",
            because="the server is an optional part",
            fix=pip_install("serve"),
        ) from error
    from oncurve.terminal.hush import hush
    from oncurve.train.opened import open_target

    hush()
    trust_if_asked(trusted, trust.find(target, runs))
    key, made = key_for(host, key_env)
    with Console(stderr=True).status(f"loading {target}"):
        opened = open_target(target, runs)
    called = name or target

    def told(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "model": called} | ({"key": key} if made else {})), flush=True)
            return
        asked = "" if key is None else f"\n  key    {key}" if made else f"\n  key    as in ${key_env}"
        lines = f"Serving {called}\n  {address}/v1\n  model  {called}{asked}\nCtrl-C ends it."
        Console(highlight=False, soft_wrap=True).print(Text(lines))

    serve(
        opened.policy, called, host, port, key=key, slots=slots, max_tokens=max_tokens, say=told, until_closed=until_closed
    )  # fmt: skip
