"""The engine in a thread of its own: requests go in from the event loop, tokens come out to it.

Everything that touches the session happens on that thread, so nothing needs a lock. Between two decode steps it takes whatever
orders have come: new requests are seated while others decode, and one whose client has left gives its slots back. What a step
has drawn for all of them goes over to the event loop at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from oncurve.engines.native.session import SampledToken, SampleRequest, Session

Item = tuple[int, list[SampledToken] | Exception]
"""Which ask of a request, and what is new of it."""


class ClientGone(Exception):
    """The client has closed the connection: there is nobody left to answer."""


@dataclass(frozen=True, slots=True)
class _Listener:
    """Where a request's tokens go."""

    loop: asyncio.AbstractEventLoop
    told: asyncio.Queue[Item]


@dataclass(frozen=True, slots=True)
class _Submit:
    key: int
    asks: Sequence[SampleRequest]
    listener: _Listener


@dataclass(frozen=True, slots=True)
class _Cancel:
    key: int


class EngineThread:
    """Runs a session until it is closed."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._orders: queue.SimpleQueue[_Submit | _Cancel | None] = queue.SimpleQueue()
        self._keys = count()
        self._numbers: dict[int, list[int]] = {}  # key -> the session's numbers of its asks
        self._places: dict[int, tuple[_Listener, int]] = {}  # the session's number -> whom to tell, and which ask it is
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends after the step under way."""
        self._orders.put(None)
        self._thread.join()
        self.session.close()

    async def tokens(
        self, asks: Sequence[SampleRequest], gone: asyncio.Future[Any]
    ) -> AsyncGenerator[tuple[int, list[SampledToken]], None]:
        """(place of the ask, its new tokens) as they come. Leaving early, or ``gone`` being done, takes the request back."""
        told = asyncio.Queue[Item]()
        key, left = next(self._keys), sum(ask.samples for ask in asks)
        gone.add_done_callback(lambda _: told.put_nowait((0, ClientGone())))
        self._orders.put(_Submit(key, asks, _Listener(asyncio.get_running_loop(), told)))
        try:
            while left:
                place, item = await told.get()
                if isinstance(item, Exception):
                    raise item
                left -= sum(token.stop is not None for token in item)
                yield place, item
        finally:
            if left:
                self._orders.put(_Cancel(key))

    def _run(self) -> None:
        while self._obey():
            try:
                told = self.session.step()
            except Exception as error:  # whatever one batch met (no memory, a fault of ours) must not end the server
                self._fail(error)
                continue
            found: dict[int, list[SampledToken]] = {}
            for token in told:
                found.setdefault(token.request, []).append(token)
            self._post(found)
            self._sweep()

    def _obey(self) -> bool:
        """Takes the orders that have come, waiting for one where there is nothing to decode. False: it is time to end."""
        wait = not self.session.asks
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            if isinstance(order, _Submit):
                self._numbers[order.key] = [self.session.submit(ask) for ask in order.asks]
                self._places |= {number: (order.listener, place) for place, number in enumerate(self._numbers[order.key])}
            else:
                for number in self._numbers.get(order.key, ()):
                    self.session.cancel(number)
                self._sweep()
            wait = not self.session.asks

    def _sweep(self) -> None:
        """Forgets requests that the session has ended."""
        for number in [number for number in self._places if number not in self.session.asks]:
            del self._places[number]
        for key in [key for key, numbers in self._numbers.items() if not any(n in self._places for n in numbers)]:
            del self._numbers[key]

    def _fail(self, error: Exception) -> None:
        self._post(dict.fromkeys(self._places, error))
        for number in self._places:
            self.session.cancel(number)
        self._sweep()

    def _post(self, found: Mapping[int, list[SampledToken] | Exception]) -> None:
        """What is new of each request, to whom it concerns: each loop is woken once."""
        for loop in {self._places[number][0].loop for number in found}:
            here = [(*self._places[number], item) for number, item in found.items() if self._places[number][0].loop is loop]
            if not loop.is_closed():
                loop.call_soon_threadsafe(_hand_out, here)


def _hand_out(found: list[tuple[_Listener, int, list[SampledToken] | Exception]]) -> None:
    for listener, place, item in found:
        listener.told.put_nowait((place, item))
