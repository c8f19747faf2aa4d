"""Client of an OpenAI-compatible endpoint: concurrent requests with retries, and a cache on disk.

The API key is read from the environment. It is not part of the cache's keys, and is removed from every error message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from oncurve.errors import MissingPackage, RewardError, pip_install

T = TypeVar("T")
_KEY_LIKE = re.compile(r"\b(?:sk|key|Bearer)[-_ ][A-Za-z0-9*._-]{6,}")


class JudgeReplyError(ValueError):
    """A reply that does not have the required form."""


class JudgeClient:
    """One endpoint. `ask` is a coroutine for the event loop that all asynchronous rewards share."""

    def __init__(
        self, where: str, base_url: str | None, key_env: str, *, retries: int, seconds: float, at_once: int, cache: str | None
    ) -> None:
        if find_spec("openai") is None:
            raise MissingPackage(
                where, "openai is not installed", because="judges are called with it", fix=pip_install("judge")
            )
        self._key = os.environ.get(key_env)
        if self._key is None and base_url is None:
            raise RewardError(
                f"{where}.key_env",
                f"{key_env} is not set",
                because="the judge's endpoint needs a key, and keys are read from the environment only",
                fix=f"export {key_env}=…, or set base_url to an endpoint that needs none",
            )
        address = urlsplit(base_url or "https://api.openai.com")
        if address.scheme not in ("http", "https") or not address.hostname:
            raise RewardError(
                f"{where}.base_url",
                base_url,
                because="it is not the URL of an endpoint",
                fix="write it in full, as in http://127.0.0.1:8000/v1",
            )
        self.base_url, self._retries, self._seconds, self._at_once = base_url, retries, seconds, at_once
        self._cache_path = cache

    @cached_property
    def _cache(self) -> ReplyStore | None:
        """Opened for the first request, so that a recipe that is only inspected creates no file."""
        return None if self._cache_path is None else ReplyStore(Path(self._cache_path))

    async def ask(self, request: dict[str, Any], read: Callable[[str], T]) -> T:
        """The reply as ``read`` parses it, from the cache if it is there. A reply that ``read`` rejects is not cached."""
        key = hashlib.sha256(json.dumps([self.base_url, request], sort_keys=True).encode()).hexdigest()
        cached = self._cache.get(key) if self._cache is not None else None
        if cached is not None:
            return read(cached)
        reply = await self._reply(request)
        parsed = read(reply)
        if self._cache is not None:
            self._cache.put(key, reply)
        return parsed

    async def _reply(self, request: dict[str, Any]) -> str:
        async with self._semaphore:
            try:
                reply = await self._client.chat.completions.create(**request)
            except import_module("openai").OpenAIError as error:
                raise ConnectionError(self.redact(f"{type(error).__name__}: {error}")) from None
        text = reply.choices[0].message.content if reply.choices else None
        if not text:
            raise JudgeReplyError("the judge's reply is empty")
        return str(text)

    async def prompt_logprobs(self, request: dict[str, Any]) -> dict[str, Any]:
        """The `logprobs` of a text completion that echoes its prompt; empty if the endpoint returns none."""
        async with self._semaphore:
            try:
                reply = await self._client.completions.create(**request)
            except import_module("openai").OpenAIError as error:
                raise ConnectionError(self.redact(f"{type(error).__name__}: {error}")) from None
        logprobs = reply.choices[0].logprobs if reply.choices else None
        return {} if logprobs is None else dict(logprobs.model_dump())

    def redact(self, message: str) -> str:
        """The message, shortened, with `***` for the key and for everything that looks like a key."""
        message = message.replace(self._key, "***") if self._key else message
        return _KEY_LIKE.sub("***", message)[:300]

    @cached_property
    def _client(self) -> Any:
        options = {"max_retries": self._retries, "timeout": self._seconds}
        return import_module("openai").AsyncOpenAI(api_key=self._key or "none", base_url=self.base_url, **options)

    @cached_property
    def _semaphore(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._at_once)


class ReplyStore:
    """Replies on disk, by the hash of the complete request. SQLite survives a kill and can be shared by runs."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=30)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute(
            "CREATE TABLE IF NOT EXISTS replies (request TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID"
        )

    def get(self, key: str) -> str | None:
        with self._lock:
            row = self._database.execute("SELECT reply FROM replies WHERE request = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, reply: str) -> None:
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
