"""A real browser (the system's Chromium), and a check of every page: no error, no request to another host."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE_MS = 120_000
"""For anything that appears at all; a page of a busy machine takes seconds."""
expect.set_options(timeout=PATIENCE_MS)
SHOTS = Path(os.environ.get("ONCURVE_SHOTS", Path(__file__).resolve().parents[2] / "build" / "screenshots"))
"""Where pictures of the pages are kept, for people to look at."""


def need_chromium() -> str:
    """If Chromium is missing, a developer's tests are skipped; in the checks before a merge they fail."""
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed: apt-get install chromium")
        pytest.skip("chromium is not installed: apt-get install chromium")
    return CHROMIUM


@contextmanager
def a_browser() -> Iterator[Browser]:
    path = need_chromium()
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page whose console messages and requests are recorded."""

    page: Page
    host: str
    errors: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._record_request(request.url))

    def _record_request(self, url: str) -> None:
        if urlsplit(url).scheme not in ("data", "blob") and urlsplit(url).netloc != self.host:
            self.strangers.append(url)

    def keep(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)

    def fits(self) -> bool:
        """Whether the page has no horizontal overflow."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"))


@contextmanager
def a_page(browser: Browser, address: str, width: int = 1280, dark: bool = False) -> Iterator[Watched]:
    """A page that must have had no error and no request to another host when the body ends."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", accept_downloads=True
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    watched = Watched(page, urlsplit(address).netloc)
    page.goto(address)
    yield watched
    assert watched.errors == [], watched.errors
    assert watched.strangers == [], watched.strangers
    context.close()
