from __future__ import annotations

import json

import pytest

from oncurve.errors import RecipeError
from oncurve.runs.secrets import HIDDEN, holds_secret, redact
from oncurve.training.start import refuse_secrets
from tests.faults.cases import GRPO, recipe

A = "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dF3hJ5"
HEX = "0123456789abcdef" * 4
PEM = "-----BEGIN RSA PRIVATE KEY-----\\nMIIEpAIBAAKCAQEA\\n-----END RSA PRIVATE KEY-----".replace("\\n", "\n")
SECRETS = [
    f"sk-proj-{A}", f"sk-ant-api03-{A}", f"sk_live_{A[:24]}", f"rk_test_{A[:24]}", f"gsk_{A}", f"pplx-{HEX[:40]}", f"xai-{A}",
    f"nvapi-{A}", f"r8_{A}", f"fw_{A[:24]}", f"hf_{A}", f"ghp_{A}", f"gho_{A}", f"ghs_{A}", f"github_pat_11ABCDEFG0{A}_{A}",
    f"glpat-{A[:20]}", f"gldt-{A[:20]}", f"glptt-{HEX[:40]}", f"npm_{A}", f"pypi-AgEIcHlwaS5vcmc{A}", f"dckr_pat_{A[:27]}",
    f"dapi{HEX[:32]}", f"dop_v1_{HEX}", f"xoxb-123456789012-{A}", f"xapp-1-A0-{A}", "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE", f"AIzaSy{A[:33]}", f"ya29.a0{A}", f"GOCSPX-{A[:28]}", f"SG.{A[:22]}.{A}", f"lin_api_{A}",
    f"123456789:AAF{A}", f"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{A}", f"Bearer {A}", "Basic dXNlcjpwYXNzd29yZA==",
    "https://me:hunter2@host/v1", "https://:hunter2@host/v1", "postgres://u:p@ss@db/x",
    f"https://hooks.slack.com/services/T00000000/B00000000/{A[:24]}", f"https://discord.com/api/webhooks/123456789012345678/{A}",
    f"https://x.blob.core.windows.net/c?sv=2022&sig={A}%3D", f"https://s3/x?X-Amz-Signature={HEX}", f"https://api/v1?api_key={A}",
    f"https://api/v1?a=b&access_token={A}", f"AccountName=x;AccountKey={A}==;EndpointSuffix=y", f"SharedAccessKey={A}",
    f"aws_secret_access_key = {A}abcd", PEM, PEM.replace("RSA ", ""), PEM.replace("RSA", "OPENSSH"), PEM[:50],
]  # fmt: skip
ORDINARY = [
    "Qwen/Qwen3-0.6B", "sk-learn", "runs/sums-1/model", HEX[:40], "https://host:8000/v1", "https://host/v1?stage=grpo&step=12",
    "reward.py:short", "task-force", "a key=value pair", "Bearer token", "hf_hub", "the basics of GRPO", "max_new_tokens",
    "OPENAI_API_KEY", "-----BEGIN CERTIFICATE-----", "eyJ.is.short", "glyph-table-of-characters", "github.com/a/b",
    "npm_install", "12:34:56", "user@host.example", "{% for m in messages %}{{ m.content }}{% endfor %}",
    "data/key=1/part-0.parquet", "pypi-mirror-of-our-company",
]  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
def test_secrets_are_recognised_anywhere_in_a_text(secret: str) -> None:
    for text in (secret, f"error: {secret} is wrong", json.dumps({"x": secret}), f"({secret})"):
        assert holds_secret(text), text
        assert HIDDEN in redact(text)
    for part in (A, HEX[:32], "hunter2", "MIIEpAIBAAKCAQEA", "IOSFODNN7"):
        assert part not in redact(f"x {secret} y")


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_texts_are_left_alone(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize(
    "arguments",
    [
        {"key": f"glpat-{A[:20]}"},
        {"headers": {"authorization": f"Bearer {A}"}},
        {"keys": [f"AIzaSy{A[:33]}"]},
        {"rows": [{"pem": PEM}]},
        {f"ghp_{A}": 1},
    ],
    ids=str,
)
def test_a_recipe_with_a_secret_anywhere_is_refused(arguments: dict[str, object]) -> None:
    reward = {"type": "python", "function": "tests.faults.grading:short", "arguments": arguments}
    with pytest.raises(RecipeError, match="key or password") as caught:
        refuse_secrets(recipe(GRPO, rewards=[reward]))
    assert A[:20] not in str(caught.value)


def test_a_recipe_without_one_passes() -> None:
    refuse_secrets(recipe(GRPO))
