"""`oncurve serve`, an OpenAI-compatible endpoint; `oncurve tinker`, one for the Tinker SDK; `oncurve studio` and `oncurve
report`, runs in a browser; `oncurve publish`, a model on the hub."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from oncurve import trust
from oncurve.cli.options import (
    RUNS,
    Json,
    RunName,
    RunOrCheckpoint,
    RunOrModel,
    Runs,
    RunsOrModels,
    Trust,
    WithTools,
    check_target,
    grant_trust,
    output_json,
)
from oncurve.errors import MissingPackage, RunError, pip_install
from oncurve.runs.checkpoints.listing import open_target
from oncurve.runs.folder import RunFolder
from oncurve.terminal.console import SafeConsole

KEY = "ONCURVE_SERVE_KEY"


def serve(
    targets: RunsOrModels,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but a loopback address requires a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free port.")] = 8000,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the key; if it is unset, a key is generated.")
    ] = KEY,
    name: Annotated[
        str | None, typer.Option("--name", help="Model name for clients, if there is only one model; default: RUN|MODEL.")
    ] = None,
    slots: Annotated[
        int | None, typer.Option("--slots", min=1, help="Completions decoded at once; default: 8 on a CPU, 64 on a GPU.")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest completion that a request may ask for.")
    ] = 1024,
    with_tools: WithTools = False,
    draft: Annotated[
        bool,
        typer.Option(
            "--draft", help="Speculative sampling: draft the tokens that followed the same words earlier in the request."
        ),
    ] = False,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it listens, for programs.")] = False,
    until_closed: Annotated[bool, typer.Option("--until-closed", help="End when standard input closes, for programs.")] = False,
) -> None:
    """Serve models or runs as an OpenAI-compatible endpoint."""
    for target in targets:
        check_target(target, runs)
    names = [name] if name is not None else targets
    if len(set(names)) < len(targets):
        raise RunError(
            ", ".join(targets),
            "models without a name of their own",
            because="clients choose a model by its name: RUN|MODEL, or --name if there is only one model",
            fix="name each model once, and leave out --name",
        )
    try:
        from oncurve.serve.server import ModelToServe, api_key_for, serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve serve",
            f"{error.name} is not installed",
            because="the server is an optional extra",
            fix=pip_install("serve"),
        ) from error
    from oncurve.operations.run_model import load_models, load_trained_environment, missing_environment
    from oncurve.terminal.errors import print_advice, silence_libraries

    silence_libraries()
    key, is_generated = api_key_for(host, key_env)
    for target in targets:
        grant_trust(trusted, trust.run_of_target(target, runs))
    models: list[ModelToServe] = []
    with SafeConsole(stderr=True).status(Text(f"loading {', '.join(targets)}")):
        loaded = load_models(targets, runs)
        for model_name, model in zip(names, loaded, strict=True):
            models.append(ModelToServe(model_name, model.policy, load_trained_environment(model) if with_tools else None))
    for note in [] if with_tools else map(missing_environment, loaded):
        if note is not None:
            print_advice(note)

    def announce(address: str) -> None:
        if as_json:
            several = {"models": names} if len(names) > 1 else {}
            ready = {"address": address, "model": names[0], **several, **({"key": key} if is_generated else {})}
            print(json.dumps(ready), flush=True)
            return
        size = sum({weight: weight.nbytes for model in models for weight in model.policy.model.parameters()}.values())
        shown = f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
        memory = f"\n  memory {shown} of weights" if len(models) > 1 else ""
        key_line = "" if key is None else f"\n  key    {key if is_generated else f'from ${key_env}'}"
        lines = "".join(f"\n  model  {name}" for name in names)
        _print_line(f"Serving {', '.join(names)}\n  {address}/v1{lines}{memory}{key_line}\nCtrl-C stops it.")

    serve(
        models, host, port,
        key=key, slots=slots, max_tokens=max_tokens, draft="own" if draft else "off", on_ready=announce,
        until_closed=until_closed,
    )  # fmt: skip


def tinker(
    target: RunOrModel,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any but a loopback address requires a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free port.")] = 8010,
    key_env: Annotated[
        str, typer.Option("--key-env", help="Environment variable with the key; if it is unset, a key is generated.")
    ] = "ONCURVE_TINKER_KEY",
    name: Annotated[
        str | None, typer.Option("--name", help="Another name for the base model that clients can use, such as a hub id.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="FOLDER", help="Folder for saved weights.")] = Path("tinker"),
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Longest completion that a request may ask for.")
    ] = 4096,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON once it listens, for programs.")] = False,
    until_closed: Annotated[bool, typer.Option("--until-closed", help="End when standard input closes, for programs.")] = False,
) -> None:
    """Serve a model to programs that train it with the Tinker SDK.

    The programs create LoRA adapters over the model, train them, sample from them and save them, all on this machine.
    """
    check_target(target, runs)
    try:
        from oncurve.tinker.http_interface import TinkerService, key_for, serve
    except ModuleNotFoundError as error:
        raise MissingPackage(
            "oncurve tinker",
            f"{error.name} is not installed",
            because="the server is an optional extra",
            fix=pip_install("serve"),
        ) from error
    from oncurve.operations.run_model import load_model
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    grant_trust(trusted, trust.run_of_target(target, runs))
    key, is_generated = key_for(host, key_env)
    with SafeConsole(stderr=True).status(Text(f"loading {target}")):
        service = TinkerService(load_model(target, runs).policy, [name or target, target], out, max_tokens)

    def announce(address: str) -> None:
        if as_json:
            print(json.dumps({"address": address, "model": service.name} | ({"key": key} if is_generated else {})), flush=True)
            return
        key_line = f"from ${key_env}" if key is not None and not is_generated else key or "tml-local"
        _print_line(
            f"Serving {service.name} to the Tinker SDK\n  TINKER_BASE_URL={address}\n  TINKER_API_KEY={key_line}\n"
            f"  saved weights in {out.resolve()}\nCtrl-C stops it."
        )

    serve(service, host, port, key=key, on_ready=announce, until_closed=until_closed)


def _print_line(line: str) -> None:
    """Prints without wrapping, so that addresses and paths can be copied."""
    SafeConsole(soft_wrap=True).print(Text(line))


def studio(
    runs: Runs = RUNS,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 chooses a free port.")] = 8765,
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


def publish(
    run: RunOrCheckpoint,
    repository: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository on the hub; created if it is missing.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the model card and the files; send nothing.")] = False,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    licence: Annotated[
        str | None, typer.Option("--license", help="Licence, such as apache-2.0; default: that of the base model's card.")
    ] = None,
    runs: Runs = RUNS,
    trusted: Trust = False,
    as_json: Json = False,
) -> None:
    """Upload a run's model to the Hugging Face hub, with a model card.

    The card has the recipe, the curve, held-out results with intervals, versions, and the base model with its licence.
    """
    source = open_target(run, runs)
    grant_trust(trusted, source.run)
    from oncurve.publish import publish
    from oncurve.terminal.errors import silence_libraries

    silence_libraries()
    endpoint = os.environ.get("HF_ENDPOINT")
    done = publish(source, repository, licence=licence, private=private, dry_run=dry_run, endpoint=endpoint)
    if as_json:
        files = [{"name": name, "bytes": size} for name, size in done.files]
        output_json({"repository": done.repository, "address": done.address, "files": files, "card": done.card})
        return
    if dry_run:
        _print_line(done.card)
    for name, size in done.files:
        _print_line(f"{size / 1e6:10.3f} MB  {name}")
    _print_line(f"\n{done.address}" if done.address else "\nNothing was sent.")


def report(
    run: RunName,
    out: Annotated[Path, typer.Option("-o", "--out", metavar="FILE", help="File to write; must not exist.")] = Path(
        "report.html"
    ),
    runs: Runs = RUNS,
) -> None:
    """Write a report of a run as one HTML file.

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
