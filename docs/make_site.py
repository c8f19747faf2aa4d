"""Builds the documentation site in build/site.

python docs/make_site.py

Pages are written to be read in the repository too. They are copied to build/docs, where a link to another page becomes a link
of the site, and a link to a source file leads to a page that shows it. mkdocs.yml lists the pages; every warning is an error.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from code_blocks import count_blocks
from make_pages import main as write_generated_pages

ROOT = Path(__file__).resolve().parents[1]
STAGED = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
SHIM = "https://unpkg.com/iframe-worker/shim"
LEARN = ROOT / "docs" / "learn"
OTHER_PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "AGENTS.md": "coding-agents.md",
    "README.md": "index.md",
    "bench/README.md": "benchmarks.md",
}
"""Pages outside of docs/, with their names on the site."""
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
LANGUAGES = {".py": "python", ".toml": "toml", ".yaml": "yaml", ".sbatch": "bash", ".c": "c", ".ipynb": "json", ".txt": "text"}


def page_names() -> dict[Path, str]:
    """Every page of the site: its file in the repository, and its name on the site."""
    docs = ROOT / "docs"
    pages = {page: str(page.relative_to(docs)) for page in sorted(docs.rglob("*.md"))}
    return pages | {ROOT / page: name for page, name in OTHER_PAGES.items()}


class Stage:
    """Copies pages to build/docs and collects the source files that they link to."""

    def __init__(self) -> None:
        self.names = page_names()
        self.sources: dict[Path, str] = {}

    def copy_page(self, page: Path, name: str) -> None:
        text = LINK.sub(lambda match: self._rewrite(match, page, name), page.read_text(encoding="utf-8"))
        self._write(name, text)

    def _rewrite(self, match: re.Match[str], page: Path, name: str) -> str:
        mark, label, file, anchor = match[1], match[2], match[3], match[4] or ""
        if not file:
            return match[0]
        target = (page.parent / file).resolve()
        if not target.exists():
            raise SystemExit(f"{page.relative_to(ROOT)}: no such file: {file}")
        if target in self.names:
            place = self.names[target]
        elif target.is_relative_to(ROOT / "docs"):
            place = str(target.relative_to(ROOT / "docs"))
        elif target.is_dir():
            return label
        else:
            place = self.sources.setdefault(target, f"source/{target.relative_to(ROOT)}.md")
        return f"{mark}[{label}]({os.path.relpath(place, Path(name).parent)}{anchor})"

    def copy_sources(self) -> None:
        for path, name in self.sources.items():
            language = LANGUAGES.get(path.suffix, "text")
            body = path.read_text(encoding="utf-8")
            fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", body)), default=0))
            self._write(name, f"# {path.relative_to(ROOT)}\n\n{fence}{language}\n{body}\n{fence}\n")

    def copy_files(self) -> None:
        """Pictures, the style sheet, and the Learn page with its demos."""
        docs = ROOT / "docs"
        for file in docs.rglob("*"):
            if file.is_file() and (file.is_relative_to(LEARN) or file.suffix in (".svg", ".png", ".webp", ".css", ".js")):
                place = STAGED / file.relative_to(docs)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, place)

    def _write(self, name: str, text: str) -> None:
        place = STAGED / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")


def stage_pages() -> None:
    shutil.rmtree(STAGED, ignore_errors=True)
    stage = Stage()
    for page, name in stage.names.items():
        stage.copy_page(page, name)
    stage.copy_sources()
    stage.copy_files()


def use_local_shim() -> None:
    """The theme loads the shim of workers for pages in a folder from another host: the site has its own."""
    for page in [*SITE.rglob("*.html"), *SITE.rglob("*.js")]:
        text = page.read_text(encoding="utf-8")
        if SHIM in text:
            up = "../" * (len(page.relative_to(SITE).parts) - 1)
            page.write_text(text.replace(SHIM, f"{up}worker-shim.js"), encoding="utf-8")


def main() -> None:
    write_generated_pages()
    stage_pages()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--clean", "--quiet", "--strict"]
    built = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if built.returncode:
        raise SystemExit(built.returncode)
    use_local_shim()
    pages = page_names()
    counts = count_blocks(pages)
    print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}; {sum(counts.values())} code blocks:")
    for kind, count in counts.most_common():
        print(f"  {count:4d}  {kind}")


if __name__ == "__main__":
    main()
