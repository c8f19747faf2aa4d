"""lm-eval over our engine agrees with its own Hugging Face backend, on a small model and a task from local files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from oncurve.errors import RecipeError
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.policy import Policy
from oncurve.operations.eval_harness import HarnessModel, run_harness, sampling_of
from oncurve.recipe.schema.model import TinyModel
from oncurve.runs.step_notes import watch_progress

SHAPE = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=64)
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{target}
metric_list:
  - metric: {metric}
"""


def models() -> tuple[HarnessModel, HFLM]:
    """The same weights in both; transformers' own attention in one."""
    pair = []
    for _ in range(2):
        tokenizer = build_tokenizer("0123456789+=abc ")
        model = build_model(SHAPE, tokenizer, seed=3).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)  # sharper than an untrained model: greedy choices are clear
        pair.append((model, tokenizer))
    (ours, tokenizer), (theirs, other) = pair
    return HarnessModel(Policy(ours, tokenizer)), HFLM(pretrained=theirs, tokenizer=other, device="cpu", batch_size=1)


def requests(kind: str, arguments: list[tuple[object, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_log_likelihoods_and_texts_agree_with_the_hugging_face_backend() -> None:
    ours, theirs = models()
    pairs = requests("loglikelihood", [("12+3=", "15"), ("", "abc"), ("7+8=", "1"), ("a b c", " a")])
    for mine, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    texts = requests("loglikelihood_rolling", [("12+3=15 abc",), ("1+2=3 a " * 6,)])
    for mine_sum, other_sum in zip(ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts), strict=True):
        assert mine_sum == pytest.approx(float(other_sum), abs=1e-3)
    settings = {"until": ["=", "b"], "max_gen_toks": 12, "do_sample": False}
    written = requests("generate_until", [(f"{a}+{b}", settings) for a in range(4) for b in range(3)])
    assert ours.generate_until(written) == theirs.generate_until(written)


def test_a_long_prompt_loses_its_start_as_in_the_hugging_face_backend() -> None:
    ours, theirs = models()
    written = requests("generate_until", [("1+2=3 a " * 20, {"until": ["="], "max_gen_toks": 12, "do_sample": False})])
    assert ours.generate_until(written) == theirs.generate_until(written)


@pytest.mark.parametrize(
    ("settings", "temperature", "tokens"),
    [
        ({}, 0.0, 256),
        ({"max_gen_toks": 5000}, 0.0, 512),
        ({"do_sample": True, "max_new_tokens": 7}, 1.0, 7),
        ({"temperature": 0.6, "max_tokens": 9}, 0.6, 9),
        ({"do_sample": False, "temperature": 0.6, "top_k": 3}, 0.0, 256),
    ],
)
def test_generation_settings_mean_what_they_do_in_lm_eval(settings: dict[str, Any], temperature: float, tokens: int) -> None:
    sampling = sampling_of(settings, 512)
    assert (sampling.temperature, sampling.max_new_tokens) == (temperature, tokens)
    assert temperature > 0 or not sampling.truncates


@pytest.mark.slow
def test_a_task_of_local_files_is_evaluated(tmp_path: Path) -> None:
    ours, _ = models()
    rows = [{"question": f"{a}+1=", "choices": [str(a + 1), "abc"], "label": 0} for a in range(6)]
    data = tmp_path / "sums.json"
    data.write_text("\n".join(map(json.dumps, rows)))
    target = 'doc_to_choice: "{{choices}}"\ndoc_to_target: label'
    (tmp_path / "sums.yaml").write_text(TASK.format(data=data, kind="multiple_choice", target=target, metric="acc"))
    results = run_harness(ours.policy, ["sums"], include=tmp_path, limit=4)
    assert 0 <= results["sums"]["acc,none"] <= 1
    with pytest.raises(RecipeError, match="no such task"):
        run_harness(ours.policy, ["no-such-task"], include=tmp_path)


def test_progress_is_reported_for_each_request() -> None:
    ours, _ = models()
    shares: list[float] = []
    with watch_progress(shares.append):
        ours.loglikelihood(requests("loglikelihood", [("12+3=", "15"), ("7+8=", "1")]))
        ours.generate_until(requests("generate_until", [("12+3=", {"until": ["a"], "max_gen_toks": 4})] * 2))
    assert shares == [0.0, 0.5, 0.0, 0.5, 1.0]
