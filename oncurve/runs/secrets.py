"""Keeps secrets out of a run's files: values of secret environment variables, and texts that look like keys."""

from __future__ import annotations

import os
import re

NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values are secret."""
MIN_LENGTH = 8
"""Shorter values are not redacted: they would match ordinary words."""
PREFIXED = (
    r"sk-[\w-]{16,}", r"(?:sk|rk|whsec)_(?:live_|test_)?[A-Za-z0-9]{16,}", r"gsk_[A-Za-z0-9]{20,}", r"pplx-[a-z0-9]{20,}",
    r"xai-[A-Za-z0-9]{20,}", r"nvapi-[\w-]{20,}", r"r8_[A-Za-z0-9]{20,}", r"fw_[A-Za-z0-9]{20,}",
    r"(?:hf|api_org)_[A-Za-z0-9]{16,}", r"gh[pousr]_[A-Za-z0-9]{20,}", r"github_pat_\w{20,}",
    r"gl(?:pat|dt|rtr?|cbt|ptt|ft|soat|agent|imt|oas)-[\w-]{16,}",
    r"npm_[A-Za-z0-9]{20,}", r"pypi-AgE[\w-]{20,}", r"dckr_pat_[\w-]{20,}", r"dapi[0-9a-f]{32}", r"do[opr]_v1_[0-9a-f]{40,}",
    r"xox[a-z]-[\w-]{10,}", r"xapp-[\w-]{10,}", r"(?:AKIA|ASIA)[0-9A-Z]{16}", r"AIza[\w-]{30,}", r"ya29\.[\w-]{20,}",
    r"GOCSPX-[\w-]{20,}", r"SG\.[\w-]{16,}\.[\w-]{16,}", r"lin_api_[A-Za-z0-9]{20,}", r"\d{8,10}:AA[\w-]{30,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}",  # a JSON web token
)  # fmt: skip
"""Keys that their services mark by a prefix."""
KEYS = re.compile(
    rf"(?<![\w-])(?:{'|'.join(PREFIXED)})"
    r"|(?<=Bearer )[\w.~+/-]{12,}=*|(?<=Basic )[A-Za-z0-9+/]{12,}=*|(?<=://)[^\s/:@]*:[^\s/@]+(?=@)"
    r"|(?<=hooks\.slack\.com/services/)[\w/]{20,}|(?<=discord\.com/api/webhooks/)[\w/-]{20,}"
    r"|(?<=[?&])(?:sig|signature|api[_-]?key|key|token|access_token|password|secret|X-Amz-Signature)=[^&\s\"']{8,}"
    r"|(?:AccountKey|SharedAccessKey|SharedAccessSignature|aws_secret_access_key)\s*[=:]\s*[\"']?[\w/+%=&-]{16,}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)",
)
"""Key formats of well-known services, JSON web tokens, private keys, and passwords and signatures in URLs."""
HIDDEN = "***"


def redact(text: str) -> str:
    """Replaces secrets in a text, for messages from other programs that are about to be stored."""
    for name, value in os.environ.items():
        if len(value) >= MIN_LENGTH and NAMES.search(name) and value in text:
            text = text.replace(value, HIDDEN)
    return KEYS.sub(HIDDEN, text)


def holds_secret(text: str) -> bool:
    return redact(text) != text
