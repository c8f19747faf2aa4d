from __future__ import annotations

import io
from typing import Literal

import pytest
from pydantic import PositiveInt
from rich.console import Console

from oncurve.errors import RecipeError
from oncurve.recipe.explain import explain, find_key, set_example
from oncurve.recipe.keys import recipe_keys
from oncurve.recipe.schema.base import Section

from .recipes import recipe


class ArithmeticOptions(Section):
    """Sums of made-up numbers."""

    digits: PositiveInt = 3
    """Digits of each number. More are harder."""


class AnswerOptions(Section):
    """Right or wrong."""

    take: Literal["tag", "boxed"] = "tag"
    """Where the answer is written."""


EXTENSIONS: dict[str, type[Section]] = {"task.arithmetic": ArithmeticOptions, "rewards.answer": AnswerOptions}


def shown(key: str | None, width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(explain(key, EXTENSIONS))
    return out.getvalue()


def test_keys_and_sentences_are_not_truncated_in_a_narrow_window() -> None:
    lines = shown(None, width=60).splitlines()
    heads = {line.split(" ")[0] for line in lines}
    assert [entry.key for entry in recipe_keys(EXTENSIONS) if entry.key not in heads] == []
    assert "(DoRA, Liu et al. 2024)" in " ".join(" ".join(lines).split())


def test_every_key_is_documented() -> None:
    assert [entry.key for entry in recipe_keys() if not entry.doc] == []


def test_without_a_key_the_complete_tree_is_shown() -> None:
    text = shown(None)
    for words in ("grpo.sampling.max_new_tokens", "256", "model.tiny.kv_heads", "task.arithmetic.digits", "sft.batch_size"):
        assert words in text
    assert "More are harder" not in text


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "grpo.group_size",
            ["G: completions of each prompt. Larger groups", "integer, 1 or more", "8", "--set grpo.group_size=8"],
        ),
        ("grpo.kl", ["The KL penalty toward the reference.", "grpo.kl.beta", "k1, k2, k3"]),
        (
            "grpo.advantage.scale",
            [
                "one of group, batch, whiten, mean, signal_share, per_reward, none",
                "unset",
                "--set grpo.advantage.scale=group",
                "none for dr_grpo, rloo",
            ],
        ),
        ("model", ["model.tiny.layers", "float32, bfloat16"]),
        ("grpo.objective", ["leave_one_out", "the geometric mean", "reward"]),
        ("rewards.answer.weight", ["recorded, not trained on", "--set rewards.NAME.weight=1.0"]),
        ("grpo.task.seed", ["Seed of the generated problems"]),
        ("stages", ["sft\n    Supervised fine-tuning", "grpo\n    Group relative"]),
        ("grpo", ["Group relative policy optimisation", "grpo.overlong.buffer"]),
        ("model.lora.dora", ["(DoRA, Liu et al. 2024); slower."]),
        ("task.arithmetic", ["Sums of made-up numbers.", "task.digits = 3  integer", "    Digits of each number."]),
        ("task.arithmetic.digits", ["More are harder.", "--set task.digits=3"]),
        ("task.digits", ["task.arithmetic.digits", "More are harder."]),
        ("rewards.answer.take", ["--set rewards.NAME.take=boxed"]),
        ("task.type", ["task.arithmetic"]),
        ("sft.optimiser.learning_rate", ["0.001"]),
    ],
)
def test_a_key_in_full(key: str, words: list[str]) -> None:
    text = shown(key)
    assert [word for word in words if word not in text] == []


def test_an_unknown_key_points_at_a_known_one() -> None:
    for key, words in [
        ("grpo.group_siez", "grpo.group_size"),
        ("temperature", "temperature"),
        ("task.hedlout", "task.heldout"),
        ("qqq", "lists every key"),
    ]:
        with pytest.raises(RecipeError) as caught:
            explain(key)
        assert words in caught.value.fix


@pytest.mark.parametrize(
    "key", ["grpo.group_size", "model.dtype", "grpo.sampling.stop", "grpo.optimiser.betas", "threads", "seed"]
)
def test_the_example_can_be_typed(key: str) -> None:
    recipe(set_example(find_key(key)).strip("'"))
