"""Secrets stay out of a run's files: values of the environment that are meant to be secret, and what looks like a key."""

from __future__ import annotations

import os
import re

NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Environment variables whose value is nobody's business."""
SHORTEST = 8
"""A shorter value would blot out ordinary words."""
KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abpr]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{12,}|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
"""The forms in which well-known services give out keys, and a password within an address."""
HIDDEN = "***"


def redact(text: str) -> str:
    """The text without secrets: for messages that came from elsewhere and are about to be kept."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and NAMES.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return KEYS.sub(HIDDEN, text)


def holds_secret(text: str) -> bool:
    return redact(text) != text
