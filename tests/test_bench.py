"""The benchmarks measure real steps, and the docs quote the results that are stored."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[1] / "bench"


@pytest.fixture(scope="module")
def random_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("random_models", BENCH / "random_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_prompts_have_the_requested_length_and_no_special_token(random_models: ModuleType) -> None:
    """A prompt that starts with the padding token, whose embedding is 0, has no finite gradient in any precision."""
    words = random_models.VOCABULARY
    tokenizer = random_models.make_tokenizer(words)
    for text in random_models.texts(20, 128, words):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == 128
        assert not set(ids) & set(tokenizer.all_special_ids)


def test_the_comparison_page_has_the_tables_and_verdicts_of_the_stored_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    writers = importlib.import_module("sweeps_page").WRITERS
    page = (BENCH.parent / "docs" / "compare.md").read_text(encoding="utf-8")
    for part, write in writers.items():
        block = re.search(rf"<!-- {part} -->\n(.*?)<!-- /{part} -->", page, re.DOTALL)
        assert block is not None
        assert block[1].strip() == write(BENCH / "results" / f"sums_{part}.json").strip()


@pytest.mark.parametrize("name", ["curriculum", "distil"])
def test_a_page_has_the_table_of_the_stored_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    benchmark = importlib.import_module(name)
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", benchmark.PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert block[1].strip() == benchmark.table(json.loads(benchmark.RESULTS.read_text())).strip()
