"""Keeps secrets out of a run's files: values of secret environment variables, and texts that look like keys."""

from __future__ import annotations

import os
import re

NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values are secret."""
MIN_LENGTH = 8
"""Shorter values are not redacted: they would match ordinary words."""
KEYS = re.compile(
    r"\b(?:sk-[A-Za-z0-9_-]{16,}|hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|xox[abpr]-[A-Za-z0-9-]{10,}|AKIA[0-9A-Z]{16})"
    r"|(?<=Bearer )[A-Za-z0-9._~+/-]{12,}|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
"""Key formats of well-known services, and passwords in URLs."""
HIDDEN = "***"


def redact(text: str) -> str:
    """Replaces secrets in a text, for messages from other programs that are about to be stored."""
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and NAMES.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return KEYS.sub(HIDDEN, text)


def holds_secret(text: str) -> bool:
    return redact(text) != text
