"""Training-Free GRPO end to end in two processes: `oncurve serve` and `oncurve train`; only the advice changes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.recipe.schema.stages import TrainingFree
from oncurve.records import Prompt
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward
from oncurve.runs.database.reader import RunReader
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.training_free import Library, TrainingFreeLoop
from tests.serve.serving import TEMPLATE

PRINTABLE = "".join(map(chr, range(32, 127))) + "…\n"
RIGHT, WRONG, ADVICE = "<answer>7</answer>", "no", "Say 7."
LESSON = json.dumps([{"do": "add", "text": ADVICE}])
ROWS = [{"prompt": [{"role": "user", "content": f"Q{i}"}], "answer": "7"} for i in range(10)]


def build_loop(folder: Path) -> TrainingFreeLoop:
    """A loop that builds the stage's requests; nothing listens at its URL."""
    stage = TrainingFree(model="small", base_url="http://127.0.0.1:1/v1", prompts_per_step=1, group_size=2)
    task = PromptList.of(ROWS[:8], ROWS[8:])
    return TrainingFreeLoop(stage, 0, task, RewardMix([AnswerReward("answer", 1.0, AnswerOptions())]), folder)


def teach(folder: Path) -> None:
    """Trains and saves a small model. Without advice it gives the wrong answer 6 times in 10, with advice the right one; as a
    teacher it gives the advice."""
    tokenizer = build_tokenizer(PRINTABLE)
    shape = TinyModel(layers=2, width=48, heads=2, kv_heads=1, head_size=24, mlp_width=96, context=2048)
    policy = Policy(build_model(shape, tokenizer, 0), tokenizer)
    tokenizer.chat_template = TEMPLATE
    loop, rng = build_loop(folder), np.random.default_rng(0)
    prompts = PromptList.of(ROWS).train
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    known = Library({1: ADVICE}, 1)
    for _ in range(60):
        prompt = prompts[int(rng.integers(8))]
        pair = {"prompt": [dict(m) for m in prompt.messages or ()], "chosen": RIGHT, "rejected": WRONG}
        lessons = [
            (loop._sample_request(prompt, Library({}), 0, 1), RIGHT, 0.4),
            (loop._sample_request(prompt, Library({}), 0, 1), WRONG, 0.6),
            (loop._sample_request(prompt, known, 0, 1), RIGHT, 1.0),
            (loop._teacher_request(pair, 1, 0), LESSON, 1.0),
        ]
        optimiser.zero_grad()
        for request, reply, weight in lessons:
            ids = policy.encode(Prompt("p", messages=tuple(request["messages"])))
            pack = build_pack([PrefixGroup(ids, (policy.encode_completion(reply),), (0,))], policy.device)
            (-weight * policy.pack_logps(pack)[0].sum()).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimiser.step()
    policy.save(folder / "small")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Runs `oncurve serve` in a process; yields its address."""
    command = [sys.executable, "-m", "oncurve", "serve", str(folder), "--name", "small", "--port", "0", "--json"]
    environ = {name: value for name, value in os.environ.items() if name != "ONCURVE_SERVE_KEY"} | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--until-closed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    )
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.communicate(timeout=300)
    assert process.returncode == 0


@pytest.mark.slow
def test_advice_is_stored_and_held_out_accuracy_is_measured_with_and_without_it(tmp_path: Path) -> None:
    teach(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with served(tmp_path / "small") as address:
        (tmp_path / "free.toml").write_text(f"""
threads = 1
model.tiny = {{ layers = 1, width = 32, context = 64 }}
task = {{ type = "file", path = "{tmp_path / "rows.jsonl"}", heldout = 2, heldout_share = 0.5 }}
rewards = [{{ type = "answer" }}]
[[stages]]
type = "training_free"
model = "small"
base_url = "{address}/v1"
steps = 2
prompts_per_step = 4
group_size = 8
retries = 0
reply_tokens = 64
sampling.max_new_tokens = 24
""")
        command = [sys.executable, "-m", "oncurve", "train", str(tmp_path / "free.toml"), "--out", str(tmp_path / "run")]
        trained = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert trained.returncode == 0, trained.stderr
    library = (tmp_path / "run" / "experience" / "training_free.md").read_text()
    assert f"- **E1** {ADVICE}\n" in library
    with RunReader.open(tmp_path / "run") as store:
        metrics = {name: dict(store.metric(name, "training_free")) for name in ("heldout_without", "heldout_with", "accuracy")}
        assert metrics["heldout_without"] == {2: 0.0}
        assert metrics["heldout_with"] == {2: 1.0}
        assert metrics["accuracy"][1] < 0.8 < metrics["accuracy"][2]
        assert len(store.step("training_free", 1).groups) == 4
    assert "held-out accuracy 0.0 % without the experiences, 100.0 % with them" in " ".join(trained.stdout.split())
    assert "experience/training_free.md" in "".join(trained.stdout.split())
    assert "oncurve chat" not in trained.stdout, "the recipe's own model has learned nothing"
