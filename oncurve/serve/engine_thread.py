"""The engine in its own thread: requests come in from the event loop, tokens go back to it.

Only this thread touches the session, so nothing needs a lock. Between decode steps it handles the commands that have arrived:
new requests get slots while others decode, and a request whose client has left frees its slots. All tokens of a step are sent
to the event loop at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from oncurve.engines.base import SampleRequest
from oncurve.engines.native.session import SampledToken, Session

Item = tuple[int, list[SampledToken] | Exception]
"""The index of a request in its call, and its new tokens or an error."""


class ClientGone(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True, slots=True)
class _Subscriber:
    """The queue that the tokens of a call go to, and its event loop."""

    loop: asyncio.AbstractEventLoop
    queue: asyncio.Queue[Item]


@dataclass(frozen=True, slots=True)
class _Submit:
    call: int
    requests: Sequence[SampleRequest]
    subscriber: _Subscriber


@dataclass(frozen=True, slots=True)
class _Cancel:
    call: int


class EngineThread:
    """Runs a session until it is closed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._commands: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._calls = count()
        self._requests_of: dict[int, list[int]] = {}  # call -> the session's numbers of its requests
        self._subscribers: dict[int, tuple[_Subscriber, int]] = {}  # the session's number -> (subscriber, index in the call)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the current decode step."""
        self._commands.put(None)
        self._thread.join()
        self.session.close()

    async def tokens(
        self, requests: Sequence[SampleRequest], gone: asyncio.Future[Any]
    ) -> AsyncGenerator[tuple[int, list[SampledToken]], None]:
        """(index of the request, its new tokens) as they come.

        Closing the generator early cancels the requests. If ``gone`` is done, it raises ClientGone.
        """
        items = asyncio.Queue[Item]()
        call, unfinished = next(self._calls), sum(request.samples for request in requests)
        gone.add_done_callback(lambda _: items.put_nowait((0, ClientGone())))
        self._commands.put(_Submit(call, requests, _Subscriber(asyncio.get_running_loop(), items)))
        try:
            while unfinished:
                index, item = await items.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= sum(token.stop is not None for token in item)
                yield index, item
        finally:
            if unfinished:
                self._commands.put(_Cancel(call))

    def _run(self) -> None:
        while self._handle_commands():
            try:
                sampled = self.session.step()
            except Exception as error:  # an error of one batch, such as out of memory, must not end the server
                self._fail(error)
                continue
            by_request: dict[int, list[SampledToken]] = {}
            for token in sampled:
                by_request.setdefault(token.request, []).append(token)
            self._publish(by_request)
            self._forget_ended()

    def _handle_commands(self) -> bool:
        """Handles all commands that have arrived, and waits for one if nothing decodes. False once the thread must end."""
        wait = not self.session.requests
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Submit):
                numbers = [self.session.submit(request) for request in command.requests]
                self._requests_of[command.call] = numbers
                self._subscribers |= {number: (command.subscriber, index) for index, number in enumerate(numbers)}
            else:
                for number in self._requests_of.get(command.call, ()):
                    self.session.cancel(number)
                self._forget_ended()
            wait = not self.session.requests

    def _forget_ended(self) -> None:
        """Forgets requests that have ended in the session."""
        for number in [number for number in self._subscribers if number not in self.session.requests]:
            del self._subscribers[number]
        for call in [c for c, numbers in self._requests_of.items() if not any(n in self._subscribers for n in numbers)]:
            del self._requests_of[call]

    def _fail(self, error: Exception) -> None:
        self._publish(dict.fromkeys(self._subscribers, error))
        for number in self._subscribers:
            self.session.cancel(number)
        self._forget_ended()

    def _publish(self, items: Mapping[int, list[SampledToken] | Exception]) -> None:
        """Sends each request's item to its subscriber, with one wake-up per event loop."""
        for loop in {self._subscribers[number][0].loop for number in items}:
            of_loop = [(*self._subscribers[n], item) for n, item in items.items() if self._subscribers[n][0].loop is loop]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_deliver, of_loop)


def _deliver(items: list[tuple[_Subscriber, int, list[SampledToken] | Exception]]) -> None:
    for subscriber, index, item in items:
        subscriber.queue.put_nowait((index, item))
