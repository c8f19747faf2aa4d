"""The Playground: which models a run offers, and completions as they are sampled. Models run behind `oncurve serve`."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from oncurve.errors import ModelError, OncurveError, RunError
from oncurve.recipe.defaults import advantage_settings
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import Grpo, Trpo
from oncurve.runs.checkpoints.listing import BEST, best_of_run, list_checkpoints
from oncurve.runs.folder import RunFolder, list_runs
from oncurve.studio import rewards
from oncurve.studio.groups import SHOWN_BASELINES, SHOWN_SCALES, cell_text
from oncurve.studio.model_servers import ModelServer, ModelServers
from oncurve.studio.open_run import check_agreed, find_run, open_reader
from oncurve.trust import LOADING_PARTS, Capability, capabilities_of, capabilities_of_rewards, load_recipe_of, run_of_target

play = APIRouter(prefix="/api/playground")
PROMPTS = 30
"""Prompts of a run that are offered: the last ones, held-out prompts first."""
ALTERNATIVES = 5
"""How many of the likeliest tokens are shown at each place of a sample."""


class PlaygroundRequest(BaseModel):
    """A request for samples. A conversation is in ``messages``; a chat model gets a ``prompt`` as one user message."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Annotated[str, Field(min_length=1, max_length=1000)]
    prompt: Annotated[str, Field(max_length=200_000)] = ""
    messages: list[dict[str, str]] | None = None
    samples: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**53)]
    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(max_length=16)] = []


def servers_of(request: Request) -> ModelServers:
    servers: ModelServers = request.app.state.servers
    return servers


@play.get("")
def available_models(request: Request) -> dict[str, Any]:
    """The models of every run (the final one and the checkpoints), and which models have a running server (`there`)."""
    runs_dir: Path = request.app.state.runs_dir
    offers = [_offer(runs_dir, entry.name) for entry in list_runs(runs_dir) if entry.state]
    return {"runs": [offer for offer in offers if offer["models"]], "there": servers_of(request).running()}


def _offer(runs_dir: Path, name: str) -> dict[str, Any]:
    """A run's models, and the code that loading them would run."""
    asks: list[str] = []
    with contextlib.suppress(OncurveError):
        asks = [str(capability) for capability in capabilities_of_model(runs_dir, name)]
    return {"run": name, "models": models_of(RunFolder(runs_dir / name)), "asks": asks}


def models_of(run: RunFolder) -> list[dict[str, str]]:
    """The final model, then the best checkpoint, then all checkpoints, newest first."""
    labels: list[str] = []
    with contextlib.suppress(OncurveError):  # the checkpoints are listed even if the recipe can't be read
        recipe = load_recipe_of(run)
        if not recipe.uses_policy:
            return []
        labels = [stage.label for stage in recipe.stages]
    last = [{"target": run.name, "says": "final model"}] if (run.model / "config.json").is_file() else []
    entries = list_checkpoints(run.checkpoints)
    entries.sort(key=lambda e: (labels.index(e.stage) if e.stage in labels else -1, e.step), reverse=True)
    with contextlib.suppress(OncurveError):
        best = best_of_run(run, with_checkpoint=True)
        last += [] if best is None else [{"target": f"{run.name}@{BEST}", "says": f"best: {best.stage} {best.step}"}]
    return last + [{"target": f"{run.name}@{e.stage}-{e.step}", "says": f"{e.stage} {e.step}"} for e in entries]


@play.get("/runs/{name}")
def run_defaults(request: Request, name: str) -> dict[str, Any]:
    """What the Playground takes from a run: recent prompts, rewards, advantage settings, sampling settings."""
    run = find_run(request.app.state.runs_dir, name)
    recipe = load_recipe_of(run)
    with open_reader(run) as store:
        prompts = [_prompt(row) for row in store.recent_prompts(PROMPTS)]
    configs = rewards.rewards_of(recipe)
    asks = [str(capability) for capability in capabilities_of_rewards(configs)]
    return {"prompts": prompts, "rewards": configs, "asks": asks, **_run_settings(recipe)}


def _prompt(row: Any) -> dict[str, Any]:
    messages = None if row["messages"] is None else json.loads(cell_text(row["messages"]))
    text = None if row["prompt"] is None else cell_text(row["prompt"])
    return {"id": cell_text(row["prompt_id"]), "text": text, "messages": messages, "columns": json.loads(row["columns"])}


def _run_settings(recipe: Recipe) -> dict[str, Any]:
    if not recipe.rollout_stages:
        return {"grading": None, "sampling": None}
    stage = recipe.rollout_stages[-1]
    graded = stage if isinstance(stage, Grpo | Trpo) else Grpo()  # ppo's advantages come from its critic
    baseline, scale = advantage_settings(graded)
    if baseline not in SHOWN_BASELINES or scale not in SHOWN_SCALES:  # the Playground then grades as GRPO would
        baseline, scale = advantage_settings(Grpo())
    sampling = stage.sampling
    return {
        "grading": {"baseline": baseline, "scale": scale, "eps": graded.advantage.eps, "mask_cut": stage.mask_cut},
        "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p, "max_tokens": sampling.max_new_tokens},
    }


class ModelTarget(BaseModel):
    target: str
    trusted: bool = False


@play.post("/open")
def open_model(request: Request, model: ModelTarget) -> dict[str, Any]:
    """Starts the model's server if it is not running yet, and describes the model."""
    target = check_target(request.app.state.runs_dir, model.target)
    capabilities = capabilities_of_model(request.app.state.runs_dir, target)
    check_agreed(request, capabilities, ticked=model.trusted)
    card = servers_of(request).open(target, trusted=bool(capabilities)).card  # if it runs no code, a tick means nothing
    return {"target": model.target, "chat": card["chat"], "context": card["context"], "max_tokens": card["max_tokens"]}


def capabilities_of_model(runs_dir: Path, target: str) -> list[Capability]:
    """The code that loading a run's model runs. A model folder runs none: its code is refused."""
    for name in (target, target.rpartition("@")[0]):
        with contextlib.suppress(RunError):
            return [c for c in capabilities_of(load_recipe_of(find_run(runs_dir, name))) if c.part in LOADING_PARTS]
    return []


@play.post("/close")
def close_model(request: Request, model: ModelTarget) -> dict[str, Any]:
    servers_of(request).close(model.target)
    return {"there": servers_of(request).running()}


def check_target(runs_dir: Path, target: str) -> str:
    """Accepts a run's name, RUN@STAGE-STEP, or the full path of a model folder. Nothing is looked up on the network."""
    for name in (target, target.rpartition("@")[0]):
        with contextlib.suppress(OncurveError):
            if target in [model["target"] for model in models_of(find_run(runs_dir, name))]:
                return target
    folder = Path(target).expanduser()
    if folder.is_absolute() and (folder / "config.json").is_file() and not _names_a_run(str(folder), runs_dir):
        return str(folder)
    raise ModelError(
        target,
        "no such model",
        because="it is neither a run's model nor a folder with a config.json",
        fix="give a folder's full path",
    )


def _names_a_run(path: str, runs_dir: Path) -> bool:
    """Whether `oncurve serve` would open a run or its checkpoint (RUN@STAGE-STEP), not the model in this folder."""
    try:
        return run_of_target(path, runs_dir) is not None
    except RunError:
        return True


@play.post("/sample")
async def sample(request: Request, body: PlaygroundRequest) -> StreamingResponse:
    """Streams JSON lines, each with new tokens of one sample. Sampling ends if the page closes the connection."""
    target = check_target(request.app.state.runs_dir, body.target)
    if target not in servers_of(request).running():
        check_agreed(request, capabilities_of_model(request.app.state.runs_dir, target), ticked=False)
    server = await asyncio.to_thread(servers_of(request).open, target)
    return StreamingResponse(samples(server, body), media_type="application/x-ndjson")


async def samples(server: ModelServer, body: PlaygroundRequest) -> AsyncIterator[str]:
    """Reads the endpoint in a thread. Closing this generator early closes the connection, which frees the model's slots."""
    address = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=600)
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        try:
            for line in _lines(connection, server, body):
                loop.call_soon_threadsafe(lines.put_nowait, line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            message = {"error": f"lost the connection to the model's server: {type(error).__name__}: {error}"}
            loop.call_soon_threadsafe(lines.put_nowait, json.dumps(message) + "\n")
        finally:
            loop.call_soon_threadsafe(lines.put_nowait, None)

    reader = loop.run_in_executor(None, read)
    try:
        while (line := await lines.get()) is not None:
            yield line
    finally:
        with contextlib.suppress(OSError, AttributeError):  # a closed connection has no socket
            connection.sock.shutdown(socket.SHUT_RDWR)
        await asyncio.shield(reader)
        connection.close()


def _lines(connection: http.client.HTTPConnection, server: ModelServer, body: PlaygroundRequest) -> Iterator[str]:
    chat = bool(server.card["chat"])
    request = json.dumps(openai_request(server, body, chat))
    connection.request("POST", f"/v1/{'chat/' if chat else ''}completions", request, server.headers)
    response = connection.getresponse()
    if response.status != 200:
        yield json.dumps({"error": json.loads(response.read())["error"]["message"]}) + "\n"
        return
    for line in response:
        if line.startswith(b"data: {"):
            yield json.dumps(page_chunk(json.loads(line[6:]), chat)) + "\n"


def openai_request(server: ModelServer, body: PlaygroundRequest, chat: bool) -> dict[str, Any]:
    """The request for the endpoint. A model without a chat template gets the prompt as plain text."""
    prompt: dict[str, Any] = {"prompt": body.prompt, "logprobs": ALTERNATIVES}
    if chat:
        messages = body.messages or [{"role": "user", "content": body.prompt}]
        prompt = {"messages": messages, "logprobs": True, "top_logprobs": ALTERNATIVES}
    sampling = {"n": body.samples, "temperature": body.temperature, "top_p": body.top_p, "seed": body.seed}
    stop = {"stop": body.stop} if body.stop else {}
    return {"model": server.card["id"], **prompt, **sampling, **stop, "max_tokens": body.max_tokens, "stream": True}


def page_chunk(chunk: dict[str, Any], chat: bool) -> dict[str, Any]:
    """A chunk as the page needs it: the sample's index, new text, finish reason, and new tokens.

    A token is its text, id and log-prob, and the likeliest tokens at its place as pairs of text and log-prob."""
    if "error" in chunk:
        return {"error": chunk["error"]["message"]}
    (choice,) = chunk["choices"]
    if chat:
        text = choice["delta"]["content"]
        tokens = [
            [
                token["token"],
                token["token_id"],
                token["logprob"],
                [[one["token"], one["logprob"]] for one in token["top_logprobs"]],
            ]
            for token in choice["logprobs"]["content"]
        ]
    else:
        text, logprobs = choice["text"], choice["logprobs"]
        top = [[[text, logp] for text, logp in likely.items()] for likely in logprobs["top_logprobs"]]
        columns = zip(logprobs["tokens"], logprobs["token_ids"], logprobs["token_logprobs"], top, strict=True)
        tokens = [list(token) for token in columns]
    return {"sample": choice["index"], "text": text, "tokens": tokens, "finish": choice["finish_reason"]}
