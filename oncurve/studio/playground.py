"""The Playground: what can be asked, and samples as they are drawn. The model is behind `oncurve serve` (servers.py)."""

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
from oncurve.recipe.schema.stages import Grpo, RolloutStage, Trpo
from oncurve.runs.checkpoints.listing import list_checkpoints
from oncurve.runs.folder import STATE, RunFolder, list_runs
from oncurve.studio import rewards
from oncurve.studio.groups import shown_text
from oncurve.studio.model_servers import ModelServer, ModelServers
from oncurve.studio.open_run import check_agreed, find_run, open_reader, recipe_of
from oncurve.trust import LOADED, Power, powers_of, powers_of_rewards

play = APIRouter(prefix="/api/playground")
PROMPTS = 30
"""Prompts of a run that are offered: the last it was asked, measurements first."""


class PlaygroundRequest(BaseModel):
    """What is asked of a model. ``messages`` where the prompt is a conversation; text goes as one message to a chat model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Annotated[str, Field(min_length=1, max_length=1000)]
    prompt: Annotated[str, Field(max_length=200_000)] = ""
    messages: list[dict[str, str]] | None = None
    samples: Annotated[int, Field(ge=1, le=64)]
    temperature: Annotated[float, Field(ge=0, le=2)]
    top_p: Annotated[float, Field(gt=0, le=1)]
    max_tokens: Annotated[int, Field(ge=1)]
    seed: Annotated[int, Field(ge=0, lt=2**53)]


def servers_of(request: Request) -> ModelServers:
    servers: ModelServers = request.app.state.servers
    return servers


@play.get("")
def available_models(request: Request) -> dict[str, Any]:
    """Every model that a run has: its last, and its checkpoints."""
    runs_dir: Path = request.app.state.runs_dir
    found = [_offer(runs_dir, entry.name) for entry in list_runs(runs_dir) if entry.state]
    return {"runs": [one for one in found if one["models"]], "there": servers_of(request).there()}


def _offer(runs_dir: Path, name: str) -> dict[str, Any]:
    """A run's models, and what loading them would run."""
    asks: list[str] = []
    with contextlib.suppress(OncurveError):
        asks = [str(power) for power in powers_of_model(runs_dir, name)]
    return {"run": name, "models": models_of(RunFolder(runs_dir / name)), "asks": asks}


def models_of(run: RunFolder) -> list[dict[str, str]]:
    """The final one, then checkpoints, the newest first."""
    labels: list[str] = []
    with contextlib.suppress(OncurveError):  # a recipe that can't be read says nothing of the models that are there
        recipe = recipe_of(run)
        if not recipe.uses_policy:
            return []
        labels = [stage.label for stage in recipe.stages]
    last = [{"target": run.name, "says": "the final model"}] if (run.model / "config.json").is_file() else []
    places = list_checkpoints(run.checkpoints)
    places.sort(key=lambda p: (labels.index(p.stage) if p.stage in labels else -1, p.step), reverse=True)
    kept = [{"target": f"{run.name}@{p.stage}-{p.step}", "says": f"{p.stage} {p.step}"} for p in places]
    return last + kept


@play.get("/runs/{name}")
def of_run(request: Request, name: str) -> dict[str, Any]:
    """What a run lends to the Playground: prompts it was asked, its rewards, how it grades, how it samples."""
    run = find_run(request.app.state.runs_dir, name)
    recipe = recipe_of(run)
    with open_reader(run) as store:
        prompts = [_prompt(row) for row in store.last_asked(PROMPTS)]
    configs = rewards.rewards_of(recipe)
    asks = [str(power) for power in powers_of_rewards(configs)]
    return {"prompts": prompts, "rewards": configs, "asks": asks, **_run_settings(recipe)}


def _prompt(row: Any) -> dict[str, Any]:
    messages = None if row["messages"] is None else json.loads(shown_text(row["messages"]))
    text = None if row["prompt"] is None else shown_text(row["prompt"])
    return {"id": shown_text(row["prompt_id"]), "text": text, "messages": messages, "columns": json.loads(row["columns"])}


def _run_settings(recipe: Recipe) -> dict[str, Any]:
    stage = next((s for s in reversed(recipe.stages) if isinstance(s, RolloutStage)), None)
    if stage is None:
        return {"grading": None, "sampling": None}
    graded = stage if isinstance(stage, Grpo | Trpo) else Grpo()  # a critic grades each token: a group is shown as GRPO would
    baseline, scale = advantage_settings(graded)
    how = stage.sampling
    sampling = {"temperature": how.temperature, "top_p": how.top_p, "max_tokens": how.max_new_tokens}
    return {
        "grading": {"baseline": baseline, "scale": scale, "eps": graded.advantage.eps, "mask_cut": stage.mask_cut},
        "sampling": sampling,
    }


class ModelTarget(BaseModel):
    target: str
    trusted: bool = False


@play.post("/open")
def open_model(request: Request, named: ModelTarget) -> dict[str, Any]:
    """Starts the model's server if it does not run yet, and says what it is."""
    target = known(request.app.state.runs_dir, named.target)
    check_agreed(request, powers_of_model(request.app.state.runs_dir, target), ticked=named.trusted)
    card = servers_of(request).open(target, trusted=named.trusted).card
    return {"target": named.target, "chat": card["chat"], "context": card["context"], "max_tokens": card["max_tokens"]}


def powers_of_model(runs_dir: Path, target: str) -> list[Power]:
    """What loading a run's model runs. A model folder runs nothing: its code is refused."""
    for name in (target, target.rpartition("@")[0]):
        with contextlib.suppress(RunError):
            return [power for power in powers_of(recipe_of(find_run(runs_dir, name))) if power.part in LOADED]
    return []


@play.post("/close")
def close_model(request: Request, named: ModelTarget) -> dict[str, Any]:
    servers_of(request).close(named.target)
    return {"there": servers_of(request).there()}


def known(runs_dir: Path, target: str) -> str:
    """A run's name, RUN@STAGE-STEP, or a model's folder; anything else is not looked for, least of all on the network."""
    for name in (target, target.rpartition("@")[0]):
        with contextlib.suppress(OncurveError):
            if target in [model["target"] for model in models_of(find_run(runs_dir, name))]:
                return target
    folder = Path(target).expanduser()
    if folder.is_absolute() and (folder / "config.json").is_file() and not (folder / STATE).exists():
        return str(folder)
    raise ModelError(
        target, "no such model", because="it is neither a run nor a folder with a config.json", fix="give a folder's full path"
    )


@play.post("/sample")
async def sample(request: Request, wanted: PlaygroundRequest) -> StreamingResponse:
    """Lines of JSON: what each sample has newly said. A page that goes away ends its samples."""
    target = known(request.app.state.runs_dir, wanted.target)
    if target not in servers_of(request).there():
        check_agreed(request, powers_of_model(request.app.state.runs_dir, target), ticked=False)
    server = await asyncio.to_thread(servers_of(request).open, target)
    return StreamingResponse(samples(server, wanted), media_type="application/x-ndjson")


async def samples(server: ModelServer, wanted: PlaygroundRequest) -> AsyncIterator[str]:
    """Reads the endpoint in a thread; leaving early closes the connection, which frees the model's slots."""
    place = urlsplit(server.address)
    connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=600)
    loop, told = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        try:
            for line in _lines(connection, server, wanted):
                loop.call_soon_threadsafe(told.put_nowait, line)
        except (OSError, http.client.HTTPException, ValueError) as error:
            fault = {"error": f"the model's server went away: {type(error).__name__}: {error}"}
            loop.call_soon_threadsafe(told.put_nowait, json.dumps(fault) + "\n")
        finally:
            loop.call_soon_threadsafe(told.put_nowait, None)

    reader = loop.run_in_executor(None, read)
    try:
        while (line := await told.get()) is not None:
            yield line
    finally:
        with contextlib.suppress(OSError, AttributeError):  # a connection that has ended has no socket any more
            connection.sock.shutdown(socket.SHUT_RDWR)
        await asyncio.shield(reader)
        connection.close()


def _lines(connection: http.client.HTTPConnection, server: ModelServer, wanted: PlaygroundRequest) -> Iterator[str]:
    chat = bool(server.card["chat"])
    connection.request(
        "POST", f"/v1/{'chat/' if chat else ''}completions", json.dumps(body(server, wanted, chat)), server.headers
    )
    answer = connection.getresponse()
    if answer.status != 200:
        yield json.dumps({"error": json.loads(answer.read())["error"]["message"]}) + "\n"
        return
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.dumps(short(json.loads(line[6:]), chat)) + "\n"


def body(server: ModelServer, wanted: PlaygroundRequest, chat: bool) -> dict[str, Any]:
    """The request in OpenAI's words. A conversation to a model without a template is its plain text."""
    if chat:
        asked: dict[str, Any] = {"messages": wanted.messages or [{"role": "user", "content": wanted.prompt}], "logprobs": True}
    else:
        asked = {"prompt": wanted.prompt, "logprobs": 0}
    how = {"n": wanted.samples, "temperature": wanted.temperature, "top_p": wanted.top_p, "seed": wanted.seed}
    return {"model": server.card["id"], **asked, **how, "max_tokens": wanted.max_tokens, "stream": True}


def short(chunk: dict[str, Any], chat: bool) -> dict[str, Any]:
    """A chunk as the page needs it: which sample, its new text, its new tokens (text, id, log-prob), why it finished."""
    if "error" in chunk:
        return {"error": chunk["error"]["message"]}
    (choice,) = chunk["choices"]
    if chat:
        text, told = choice["delta"]["content"], choice["logprobs"]["content"]
        tokens = [[one["token"], one["token_id"], one["logprob"]] for one in told]
    else:
        text, told = choice["text"], choice["logprobs"]
        tokens = [list(one) for one in zip(told["tokens"], told["token_ids"], told["token_logprobs"], strict=True)]
    return {"sample": choice["index"], "text": text, "tokens": tokens, "finish": choice["finish_reason"]}
