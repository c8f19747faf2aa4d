"""Reasoning steps, their rewards, and their last tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from oncurve.algos.advantages import grade
from oncurve.errors import RecipeError
from oncurve.records import Ints
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.models.process import ProcessOptions, ProcessReward, check_arithmetic
from oncurve.rewards.models.step_spans import SPLITTERS, Split, last_tokens, validate_spans
from tests.rewards.builders import group


def byte_tokenizer() -> Tokenizer:
    """One token per byte, the worst case of byte-level BPE: a character may take several."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


def decode(ids: Ints) -> str:
    return str(BYTES.decode(ids.tolist()))


@pytest.mark.parametrize(
    ("split", "text", "steps"),
    [
        ("lines", "a\n\n  b \nc", ["a", "b", "c"]),
        ("lines", "\n \n", []),
        ("numbered", "Intro.\nStep 1: add\nmore\n**Step 2**: done", ["Step 1: add\nmore", "**Step 2**: done"]),
        ("sentences", "It is 3.5. So what? Yes!\nEnd", ["It is 3.5.", "So what?", "Yes!", "End"]),
        ("sentences", "一。二！", ["一。", "二！"]),
        ("tags", "<step>a b</step> x <step>\nc</step><step></step>", ["a b", "c"]),
    ],
)
def test_splitters(split: Split, text: str, steps: list[str]) -> None:
    assert [text[begin:end] for begin, end in SPLITTERS[split](text)] == steps


def test_a_splitter_of_one_s_own_is_checked() -> None:
    assert validate_spans([[0, 1], (2, 3)], "abc") == [(0, 1), (2, 3)]
    for spans in ([(0, 9)], [(2, 1)], [(0, 2), (1, 3)], [(-1, 1)]):
        with pytest.raises(ValueError, match="empty, out of the text"):
            validate_spans(spans, "abc")


@settings(deadline=None)
@given(st.lists(st.text(alphabet="ab1 .é漢🙂", min_size=1), min_size=1, max_size=6))
def test_a_step_ends_at_the_token_of_its_last_byte(parts: list[str]) -> None:
    """With one token per byte the last token's index is the number of bytes up to the step's end, minus 1."""
    text = "\n".join(parts)
    ids = np.array(BYTES.encode(text).ids, dtype=np.int64)
    spans = SPLITTERS["lines"](text)
    expected = [len(text[:end].encode()) - 1 for _, end in spans]
    assert last_tokens(ids, text, spans, decode) == expected


def test_tokens_that_are_of_another_text() -> None:
    with pytest.raises(ValueError, match="not the text of its tokens"):
        last_tokens(np.array(BYTES.encode("xyz").ids, dtype=np.int64), "abc", [(0, 3)], decode)


@pytest.mark.parametrize(
    ("step", "reward"),
    [
        ("12*3 = 36", 1.0),
        ("First 2+2=4, then 4*5=20.", 1.0),
        ("First 2+2=4, then 4*5=21.", 0.0),
        ("(1+2)/3 = 1", 1.0),
        ("1/2 + 1/3 = 5/6", 1.0),
        ("3 − 5 = −2", 1.0),
        ("7-5=-2", 0.0),
        ("x = 4", None),
        ("12 = 12", None),
        ("We think.", None),
        ("1/0 = 5", None),
        ("2*3 = 6.5", None),
        ("9**9**9 = 1", None),
    ],
)
def test_arithmetic_lines(step: str, reward: float | None) -> None:
    assert check_arithmetic(step) == reward


def scored(reward: ProcessReward, *texts: str) -> list[tuple[tuple[tuple[int, float], ...] | None, str | None]]:
    sampled = group(*texts)
    tokens = [np.array(BYTES.encode(text).ids, dtype=np.int64) for text in texts]
    sampled_texts = [
        replace(c, token_ids=ids, loss_mask=np.ones(len(ids), bool)) for c, ids in zip(sampled.completions, tokens, strict=True)
    ]
    mix = RewardMix([reward])
    mix.bind(lambda: decode)
    (one,) = mix.score([replace(sampled, completions=tuple(sampled_texts))])
    return [(s.aspects[0].steps, s.aspects[0].failure) for s in one.scored]


def test_from_text_to_advantages() -> None:
    texts = ("1+1=2\n2+2=4", "1+1=2\n2+2=5")
    reward = ProcessReward("steps", 1.0)
    assert [steps for steps, _ in scored(reward, *texts)] == [((4, 1.0), (10, 1.0)), ((4, 1.0), (10, 0.0))]
    mix = RewardMix([reward])
    mix.bind(lambda: decode)
    sampled = group(*texts)
    ids = [np.array(BYTES.encode(text).ids, dtype=np.int64) for text in texts]
    sampled_texts = tuple(replace(c, token_ids=i) for c, i in zip(sampled.completions, ids, strict=True))
    (graded,) = grade(
        mix.score([replace(sampled, completions=sampled_texts)]), baseline="mean", scale="group", eps=1e-4, mask_cut=False
    )
    good, bad = (0.25 / 0.5001), (-0.75 / 0.5001)  # of 1, 1, 1, 0: mean 0.75, std 0.5
    assert graded.advantages[0][[0, 4, 5, 10]] == pytest.approx([2 * good, 2 * good, good, good], abs=1e-5)
    assert graded.advantages[1][[0, 4, 5, 10]] == pytest.approx([good + bad, good + bad, bad, bad], abs=1e-5)


def test_where_no_step_can_be_judged() -> None:
    assert scored(ProcessReward("steps", 1.0), "hello") == [(None, None)]


def test_functions_for_steps_and_for_splitting(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def halves(text): return [(0, len(text) // 2), (len(text) // 2, len(text))]\n"
        "def long(steps, prompt): return [len(s) + len(prompt) if s != 'x' else None for s in steps]\n"
        "def wrong(steps): return [1.0]\n"
    )
    own = {"source": "python", "function": f"{tmp_path}/mine.py:long", "splitter": f"{tmp_path}/mine.py:halves"}
    assert scored(ProcessReward("s", 1.0, ProcessOptions.model_validate(own)), "abcd", "xy") == [
        (((1, 3.0), (3, 3.0)), None),
        (((1, 2.0),), None),
    ]
    wrong = ProcessOptions(source="python", function=f"{tmp_path}/mine.py:wrong")
    assert scored(ProcessReward("s", 1.0, wrong), "a\nb") == [(None, "ValueError: returned 1 rewards for 2 steps")]


def test_without_a_tokenizer_and_without_a_source() -> None:
    (one,) = RewardMix([ProcessReward("s", 1.0)]).score([group("1+1=2")])
    assert one.scored[0].failure == "s: RuntimeError: the steps' tokens can't be found without a tokenizer"
    with pytest.raises(RecipeError, match="function"):
        ProcessReward("s", 1.0, ProcessOptions(source="python"))


@pytest.mark.parametrize(
    ("step", "score"),
    [
        ("-3+5=2", 1.0),
        ("-3+5=3", 0.0),
        ("1.5*2=3", None),
        ("1,000 + 1 = 1,001", 1.0),
        ("1,000 + 1 = 1,002", 0.0),
        ("x + 3 + 1 = 7", None),
        ("x^2+3+1=7", None),
        ("2x + 3*2 = 7", None),
        ("3*4 = 2*6 = 12", 1.0),
        ("3*4 = 2*6 = 13", 0.0),
        ("2+3=5x", None),
        ("- 2+3=5", 1.0),
        ("1. So 16 - 3 - 4 = 9 eggs, then 9 * 2 = 18.", 1.0),
    ],
)
def test_equations_with_signs_decimals_thousands_and_variables(step: str, score: float | None) -> None:
    assert check_arithmetic(step) == score
