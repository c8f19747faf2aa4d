"""The library of experiences: a readable file, and what may be done to it: add, change, delete, keep."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oncurve.errors import DataError
from oncurve.runs.disk import put_file

HEAD = "# Experiences\n\nEach is advice that goes before the question. Edit, add or delete lines as you like.\n\n"
_LINE = re.compile(r"- \*\*E(\d+)\*\* (.+)")
_LONGEST = 600
"""Characters of one experience: advice, not an essay."""


@dataclass(frozen=True)
class Library:
    """Experiences by number; a number is never given twice, so that a file's history can be followed."""

    entries: Mapping[int, str]
    last: int = 0

    @classmethod
    def begun(cls, path: str | None) -> Library:
        """What a stage begins with: the file's experiences, or none."""
        return cls({}) if path is None else cls.read(Path(path))

    @classmethod
    def read(cls, path: Path) -> Library:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = "it can't be read" if path.exists() else "no such file"
            because = f"the library begins with it ({getattr(error, 'strerror', None) or error})"
            raise DataError(str(path), what, because=because, fix="check the path, or leave it out") from None
        found = {int(m[1]): m[2].strip() for m in map(_LINE.fullmatch, lines) if m}
        return cls(found, max(found, default=0))

    def write(self, path: Path) -> None:
        lines = "".join(f"- **E{number}** {text}\n" for number, text in sorted(self.entries.items()))
        put_file(path, (HEAD + (lines or "None yet.\n")).encode())

    @property
    def told(self) -> str:
        """As the model reads it; empty where there is nothing to tell."""
        if not self.entries:
            return ""
        lines = "\n".join(f"E{number}. {text}" for number, text in sorted(self.entries.items()))
        return f"Experiences from problems like this one. Use those that help:\n{lines}"

    def after(self, changes: Sequence[Change], most: int) -> Library:
        """With the changes made in order. Beyond ``most`` the oldest goes. A change of what is not there does nothing."""
        entries, last = dict(self.entries), self.last
        for change in changes:
            if change.do == "add" and change.text and change.text not in entries.values():
                last += 1
                entries[last] = change.text
            elif change.do == "change" and change.number in entries and change.text:
                entries[change.number] = change.text
            elif change.do == "delete":
                entries.pop(change.number or 0, None)
        while len(entries) > most:
            entries.pop(min(entries))
        return Library(entries, last)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing to do to the library. ``keep`` does nothing, and says so."""

    do: str
    number: int | None = None
    text: str | None = None


def read_changes(reply: str) -> list[Change]:
    """A teacher's reply: a JSON list of {"do": "add" | "change" | "delete" | "keep", "number": …, "text": …}; text around it is
    passed over. Raises ValueError where there is none."""
    start, end = reply.find("["), reply.rfind("]")
    told = json.loads(reply[start : end + 1]) if 0 <= start < end else None
    if not isinstance(told, list):
        raise ValueError("the teacher gave no JSON list of changes")
    return [_change(one) for one in told]


def _change(told: Any) -> Change:
    if not isinstance(told, dict) or told.get("do") not in ("add", "change", "delete", "keep"):
        raise ValueError(f"no change: {str(told)[:80]}")
    number, text = told.get("number"), told.get("text")
    digits = re.sub(r"\D", "", str(number)) if number is not None else ""
    words = " ".join(str(text).split())[:_LONGEST] if text is not None else None
    return Change(str(told["do"]), int(digits) if digits else None, words)
