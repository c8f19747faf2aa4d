"""The built page exists, is small, and was built from the present sources."""

from __future__ import annotations

import gzip
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "oncurve" / "studio" / "static"
LIMIT = 350_000


def test_the_built_files_match_their_sources() -> None:
    """web/stamp.mjs computes the same when the page is built: `make web`."""
    web = [path for path in (ROOT / "web").rglob("*") if path.is_file() and "node_modules" not in path.parts]
    shown = [ROOT / "examples" / "grpo_in_50_lines.py", ROOT / "docs" / "troubleshooting.md"]
    names = sorted(str(path.relative_to(ROOT).as_posix()) for path in [*web, *shown])
    whole = hashlib.sha256()
    for name in names:
        whole.update(f"{name}\n{hashlib.sha256((ROOT / name).read_bytes()).hexdigest()}\n".encode())
    assert (STATIC / "source.sha256").read_text().strip() == whole.hexdigest(), "built from other sources: run `make web`"


def test_the_page_is_small() -> None:
    sent = [path for path in STATIC.rglob("*") if path.is_file() and path.name != "source.sha256"]
    total = sum(len(gzip.compress(path.read_bytes())) for path in sent)
    assert total < LIMIT, f"{total:,} bytes gzipped"


def test_every_link_to_troubleshooting_names_one_of_its_headings() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = {re.sub(r"[^a-z]+", "-", title.lower()) for title in re.findall(r"^## (.+)$", page, re.MULTILINE)}
    charts, signs, verdicts = (
        (ROOT / "web" / "src" / file).read_text(encoding="utf-8")
        for file in ("runs/charts.ts", "shared/trouble.ts", "runs/Verdicts.svelte")
    )
    by_kind = re.search(r"const KINDS.*?\{(.*?)\}", verdicts)
    assert by_kind
    named = re.findall(r'trouble: "(.+?)"', charts) + re.findall(r'/i, "(.+?)"', signs) + re.findall(r': "(.+?)"', by_kind[1])
    assert len(named) > 30
    assert set(named) <= headings


def test_no_registry_is_named_in_the_lock_file() -> None:
    assert '"resolved"' not in (ROOT / "web" / "package-lock.json").read_text()


def test_nothing_is_inline() -> None:
    page = (STATIC / "index.html").read_text()
    assert "<style" not in page
    assert "<script>" not in page
    assert " style=" not in page
