"""The benchmarks measure real steps: their prompts have a finite gradient."""

from __future__ import annotations

import importlib.util
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
