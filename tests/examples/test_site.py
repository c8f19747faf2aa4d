"""The documentation site, built and opened in a real browser from the file system, without a server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.studio.browsing import FLAGS, need_chromium

ROOT = Path(__file__).parents[2]
SITE = ROOT / "build" / "site"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def build_output() -> str:
    """Builds the site without a network: a proxy that refuses every connection stands in for the rest of the world."""
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, str(ROOT / "docs" / "make_site.py")]
    environment = {**os.environ, **nowhere, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def browser(build_output: str) -> Iterator[Browser]:
    executable = need_chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails the test on an error, and on any request that leaves this machine."""
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: problems.append(request.url) if request.url.startswith("http") else None)
    yield page
    page.close()
    assert problems == []


def test_the_build_prints_how_many_blocks_are_run(build_output: str) -> None:
    counts = {kind: int(count) for count, kind in re.findall(r"^ +(\d+)  (.+)$", build_output, re.MULTILINE)}
    assert counts["run by tests"] > 50
    assert counts["needs a GPU"] >= 2


class Links(HTMLParser):
    """The targets of a page's links, pictures and scripts, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: set[str] = set()
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("href", "src") and value is not None:
                self.targets.add(value)
            if name == "id" and value is not None:
                self.anchors.add(value)


def test_every_link_of_every_page_leads_somewhere(build_output: str) -> None:
    pages: dict[Path, Links] = {}
    for file in SITE.rglob("*.html"):
        pages[file] = Links()
        pages[file].feed(file.read_text(encoding="utf-8"))
    assert len(pages) > 40
    broken = []
    for file, links in pages.items():
        for target in links.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or file.name == "404.html" or file.parent.name == "learn":
                continue
            place = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            anchor = unquote(parts.fragment)
            if not place.exists() or (anchor and place in pages and anchor not in pages[place].anchors and anchor != "__"):
                broken.append(f"{file.relative_to(SITE)}: {target}")
    assert broken == []


def test_search_works_from_the_file_system(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    page.locator("input.md-search__input").click()
    page.keyboard.type("no_signal_share")
    results = page.locator(".md-search-result__link")
    results.first.wait_for()
    assert any("troubleshooting" in (link.get_attribute("href") or "") for link in results.all())


def test_dark_mode_can_be_switched_on(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    scheme = "document.body.getAttribute('data-md-color-scheme')"
    assert page.evaluate(scheme) == "default"
    page.locator("label[title=Dark]").first.click()
    page.wait_for_function(f"{scheme} === 'slate'")


@pytest.mark.parametrize("name", ["index.html", "recipes.html", "troubleshooting.html", "start/first-run.html", "gallery.html"])
def test_a_page_fits_a_phone(browser: Browser, name: str) -> None:
    phone = browser.new_page(viewport={"width": 390, "height": 844})
    phone.goto((SITE / name).as_uri())
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    phone.close()


def test_the_learn_pages_are_part_of_the_site(page: Page) -> None:
    page.goto((SITE / "learn.html").as_uri())
    page.get_by_role("link", name="Open the Learn pages").click()
    page.wait_for_url("**/learn/index.html*")
    page.get_by_role("heading", level=1, name="GRPO at a glance").wait_for()


def test_the_python_api_has_the_signature_and_the_examples_of_train(page: Page) -> None:
    page.goto((SITE / "api.html").as_uri())
    text = page.inner_text("article")
    assert "train" in text
    assert "system_prompt" in text
    assert "run.metrics" in text or 'metrics("reward")' in text
