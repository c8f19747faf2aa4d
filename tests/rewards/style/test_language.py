"""The fraction of a text in the required language."""

import pytest

from oncurve.errors import RecipeError
from oncurve.rewards.style.language import LanguageOptions, LanguageReward, split_by_script
from tests.rewards.builders import values

ENGLISH = "We add the two numbers and carry the one."
GERMAN = "Wir zählen die beiden Zahlen zusammen und merken uns die Eins."
CHINESE = "我们把两个数字加起来，然后进一位。"
RUSSIAN = "Мы складываем два числа и переносим единицу."


def share(language: str, text: str) -> float | None:
    return values(LanguageReward("language", 1.0, LanguageOptions(language=language)), text)[0]


@pytest.mark.parametrize(("language", "text"), [("en", ENGLISH), ("de", GERMAN), ("zh", CHINESE), ("ru", RUSSIAN)])
def test_one_language(language: str, text: str) -> None:
    assert share(language, text) == 1.0
    assert share("fr", text) == 0.0


def test_a_mixture_is_counted_by_letters() -> None:
    letters = [sum(map(str.isalpha, text)) for text in (ENGLISH, CHINESE)]
    assert share("en", f"{ENGLISH} {CHINESE}") == pytest.approx(letters[0] / sum(letters))
    assert share("zh", f"{ENGLISH} {CHINESE}") == pytest.approx(letters[1] / sum(letters))


def test_a_word_of_another_script_inside_a_sentence() -> None:
    assert 0.8 < (share("en", "We then compute the 结果 of the whole long sum") or 0) < 1.0


def test_what_belongs_to_no_language() -> None:
    assert (
        share("de", f"{GERMAN}\n```python\nfor number in numbers:\n    print(number)\n```\n$the formula x$ <answer>12</answer>")
        == 1.0
    )
    assert share("en", "12 + 34 = 46") is None
    assert share("en", "") is None


def test_short_pieces_count_by_their_script() -> None:
    assert share("en", "Sum: ok") == 1.0
    assert share("en", "да") == 0.0


def test_saying_one_thing_often_does_not_outweigh_the_rest() -> None:
    assert share("en", f"{GERMAN}\n" + f"{ENGLISH}\n" * 50) == share("en", f"{GERMAN}\n{ENGLISH}")


def test_thinking_may_be_left_out_and_prompts_may_name_their_language() -> None:
    text = f"<think>{CHINESE}</think>{ENGLISH}"
    assert values(LanguageReward("l", 1.0, LanguageOptions(thinking=False)), text) == [1.0]
    assert values(LanguageReward("l", 1.0, LanguageOptions(column="lang")), CHINESE, lang="zh") == [1.0]


def test_japanese_words_are_not_split() -> None:
    assert split_by_script("数字を足します。それから") == ["数字を足します", "それから"]


def test_a_language_that_is_no_code() -> None:
    with pytest.raises(RecipeError, match="two or three lower-case letters"):
        LanguageReward("language", 1.0, LanguageOptions(language="English"))
