"""Requests whose tools the server runs itself (`oncurve serve --tools`): each completion is an episode of several turns.

Every turn is a request to the engine with all tokens so far. The response has the model's last turn as its message, and all
messages of the episode beside it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from oncurve.agents.tool_environment import missing_columns
from oncurve.engines.interactive import InteractiveEpisode
from oncurve.engines.native.session import SampledToken, served_request
from oncurve.errors import OncurveError
from oncurve.records import Observation, Prompt
from oncurve.rng import derive_seed
from oncurve.serve.chat_message import MessageReader
from oncurve.serve.detokenizer import StreamedText, TextDelta
from oncurve.serve.openai_format import (
    ApiError,
    ChatBody,
    ChatFormatter,
    CompletionChoice,
    TextBody,
    TextFormatter,
    error_text,
    usage,
)

if TYPE_CHECKING:
    from oncurve.serve.server import ServedModel

T = TypeVar("T")


@dataclass
class PlayedEpisode:
    """A completion: its last turn as the response's choice, all of its messages, and how many tokens the model wrote."""

    choice: CompletionChoice = field(default_factory=CompletionChoice)
    message: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    count: int = 0


class EpisodeCall:
    """One HTTP request in progress: a prompt, and an episode for each of its completions."""

    def __init__(self, served: ServedModel, body: ChatBody | TextBody, seed: int) -> None:
        self.served, self.body, self.seed = served, body, seed
        columns, environment = body.columns or {}, served.environment
        missing = missing_columns(environment, columns)
        if missing:
            message = (
                f"columns: {', '.join(missing)} missing: the environment's reset needs them, in the request's key `columns`"
            )
            raise ApiError(400, message, "columns")
        if isinstance(body, ChatBody):
            served.check_chat()
            messages = tuple(body.template_messages)
            self.prompt = Prompt("messages", messages=messages, columns=columns, environment=environment)
            if body.tools:
                raise ApiError(400, "tools: this server runs the model's own tools (--tools): leave them out", "tools")
            if body.response_format is not None and body.response_format.schema_to_follow is not None:
                message = f"{body.response_format.type}: with it the model could not call its tools (--tools); leave it out"
                raise ApiError(400, message, "response_format")
            if not body.allows_several_calls:
                message = "parallel_tool_calls: this server runs all calls of a turn, as in training (--tools); leave it out"
                raise ApiError(400, message, "parallel_tool_calls")
            if body.tool_choice == "none":
                raise ApiError(
                    400, "tool_choice: this server runs the model's own tools (--tools); leave it out", "tool_choice"
                )
        else:
            if len(body.prompts) > 1 or not isinstance(body.prompts[0], str):
                raise ApiError(400, "prompt: with an environment (--tools) a request has one prompt, as text", "prompt")
            self.prompt = Prompt("prompt", text=body.prompts[0], columns=columns, environment=environment)
            if self.prompt.tools:
                raise ApiError(400, "the chat template tells the model of its tools: use /v1/chat/completions", "prompt")
        if body.wants_logprobs and not self.prompt.tools:
            raise ApiError(400, "logprobs: part of the text is the environment's (--tools): leave them out", "logprobs")

    async def complete(self, gone: asyncio.Future[Any]) -> dict[str, Any]:
        """The response once all episodes have ended."""
        episodes = await self._play_all(gone)
        response = self._formatter(episodes).complete([episode.choice for episode in episodes], self._usage(episodes))
        for choice, episode in zip(response["choices"], episodes, strict=True):
            choice |= {"messages": episode.messages} if episode.messages else {}
        return response

    async def stream(self, gone: asyncio.Future[Any]) -> AsyncIterator[str]:
        """The same as server-sent events, which are sent when the episodes have ended: only then the last turn is known."""
        try:
            episodes = await self._play_all(gone)
            formatter = self._formatter(episodes)
            for index, episode in enumerate(episodes):
                for chunk in self._chunks(formatter, index, episode):
                    yield _event(chunk)
            if self.body.with_usage:
                yield _event(formatter.usage_chunk(self._usage(episodes)))
            yield "data: [DONE]\n\n"
        except (ApiError, RuntimeError) as error:
            message = {"message": str(error), "type": "server_error", "param": None, "code": None}
            yield _event({"error": message})
        except Exception:
            if not gone.done():  # otherwise the client has left, and nobody reads the response
                raise
        finally:
            gone.cancel()

    def _chunks(self, formatter: ChatFormatter | TextFormatter, index: int, episode: PlayedEpisode) -> list[dict[str, Any]]:
        if isinstance(formatter, TextFormatter):
            choice = episode.choice
            return [formatter.chunk(index, TextDelta(choice.text, (), choice.finish), is_first=True)]
        chunks = formatter.finished_chunks(index, episode.choice)
        chunks[-1]["choices"][0] |= {"messages": episode.messages} if episode.messages else {}
        return chunks

    def _formatter(self, episodes: list[PlayedEpisode]) -> ChatFormatter | TextFormatter:
        if isinstance(self.body, TextBody):
            return TextFormatter(self.served.name, self.served.token_text, False)
        messages = iter([dict(episode.message) for episode in episodes])
        return ChatFormatter(
            self.served.name, self.served.token_text, self.body.wants_logprobs, lambda text, ids: next(messages)
        )

    def _usage(self, episodes: list[PlayedEpisode]) -> dict[str, int]:
        return usage(episodes[0].prompt_tokens, sum(episode.count for episode in episodes))

    async def _play_all(self, gone: asyncio.Future[Any]) -> list[PlayedEpisode]:
        tasks = [asyncio.ensure_future(self._play(sample, gone)) for sample in range(self.body.samples)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _play(self, sample: int, gone: asyncio.Future[Any]) -> PlayedEpisode:
        """Plays one episode. ``max_tokens`` limits all of it, as a stage's `max_new_tokens` does in training."""
        served, played = self.served, PlayedEpisode()
        episode = InteractiveEpisode(served.policy, self.prompt, self.seed, sample)
        try:
            start = episode.start()
            text = None if start is None else await _settled(start)
            await asyncio.to_thread(episode.open, text)
            played.prompt_tokens = len(episode.token_ids)
            sampling = served.sample_request(np.asarray(episode.token_ids), self.body, self.seed).sampling
            end = played.prompt_tokens + sampling.max_new_tokens
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *self.prompt.calls)})
            for turn in range(end):
                context = list(episode.token_ids)
                left = sampling.model_copy(update={"max_new_tokens": end - len(context)})
                seed = derive_seed(self.seed, f"serve/{sample}/{turn}")
                tokens = await self._sample(served_request(np.asarray(context), 1, left, seed, self.body.top), gone)
                played.count += len(tokens)
                observation = await _settled(episode.answer([t.token_id for t in tokens], tokens[-1].stop or "end"))
                self._add_turn(played, context, tokens, observation)
                if observation.failure is not None:
                    raise ApiError(500, f"the environment failed: {observation.failure}", code="environment_failed")
                if episode.add(observation) is None:
                    break
                if len(episode.token_ids) >= end:
                    played.choice.finish = "length"
                    break
        except OncurveError as error:
            raise ApiError(400, error_text(error), "messages" if isinstance(self.body, ChatBody) else "prompt") from None
        finally:
            episode.close()
        return played

    async def _sample(self, request: Any, gone: asyncio.Future[Any]) -> list[SampledToken]:
        tokens: list[SampledToken] = []
        async with aclosing(self.served.engine.tokens([request], gone)) as rounds:
            async for _, new in rounds:
                tokens += new
        return tokens

    def _add_turn(
        self, played: PlayedEpisode, context: list[int], tokens: list[SampledToken], observation: Observation
    ) -> None:
        """The turn becomes the response's choice, until the next one does."""
        text, choice = StreamedText(self.served.decode, self.body.sampling(1).stop), CompletionChoice()
        for token in tokens:
            choice.add(text.push(token))
        if not self.prompt.tools:  # replies of the pure form continue the model's text
            before = played.choice.text
            played.choice = CompletionChoice(f"{before}{choice.text}", choice.tokens, choice.finish)
            played.message = {"role": "assistant", "content": played.choice.text}
            played.choice.text += observation.reply if isinstance(observation.reply, str) else ""
            return
        position = len(self.prompt.messages or ()) + len(played.messages)
        reader = MessageReader(self.served.policy, np.asarray(context), self.prompt.tools, position)
        played.choice, played.message = choice, reader(choice.text, [token.token_id for token, _ in choice.tokens])
        played.messages.append(played.message)
        for call, result in zip(_call_ids(played.message, observation), observation.calls, strict=True):
            played.messages.append({"role": "tool", "tool_call_id": call, "name": result.name, "content": result.result})


async def _settled(future: Future[T]) -> T:
    """The result of an episode's future. `done` may have to run a part of it in the main thread (`EpisodeFuture`)."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    future.add_done_callback(lambda _: loop.call_soon_threadsafe(changed.set))
    while not future.done():
        await changed.wait()
        changed.clear()
    return future.result()


def _call_ids(message: Mapping[str, Any], observation: Observation) -> list[str]:
    """The ids of the message's calls that the results belong to. A call that could not be read has none in the message."""
    ids = iter([str(call["id"]) for call in message.get("tool_calls", ())])
    return ["" if call.failure == "syntax" else next(ids, "") for call in observation.calls]


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
