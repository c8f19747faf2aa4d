"""The SDK itself against `oncurve tinker`: it is installed into an environment of its own, or found in the one that the
variable ONCURVE_TINKER_SDK names. It has no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.recipe.schema.model import TinyModel

PACKAGE = "tinker==0.36.0"
SHAPE = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=128)
LOOPS = """
import json, sys
import tinker
from tinker import types

address, model = sys.argv[1:]
client = tinker.ServiceClient(base_url=address, api_key="tml-local")
assert [m.model_name for m in client.get_server_capabilities().supported_models] == [model]
training = client.create_lora_training_client(base_model=model, rank=4, seed=1)
tokenizer = training.get_tokenizer()
ids = tokenizer.encode("12+34=46")
prompt, adam = types.ModelInput.from_ints(ids[:6]), types.AdamParams(learning_rate=2e-2)
seen = {}

# Supervised.
weights = [0.0] * 5 + [1.0] * 2
inputs = {"target_tokens": ids[1:], "weights": weights}
datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
losses = []
for _ in range(10):
    forward, update = training.forward_backward([datum, datum], "cross_entropy"), training.optim_step(adam)
    losses.append(forward.result().metrics["loss:sum"])
    assert update.result().metrics["grad_norm"] > 0
logps = forward.result().loss_fn_outputs[1]["logprobs"].data
assert abs(2 * -sum(w * p for w, p in zip(weights, logps)) - losses[-1]) < 1e-4
seen["supervised"] = [losses[0], losses[-1]]

# Reinforcement learning: more of one digit.
training = client.create_lora_training_client(base_model=model, rank=4, seed=2)
digit = tokenizer.encode("7")[0]
counts = []
for step, loss in enumerate(["importance_sampling"] * 4 + ["ppo"] * 4):
    sampler = training.save_weights_and_get_sampling_client()
    params = types.SamplingParams(max_tokens=6, stop=[], seed=step)
    out = sampler.sample(prompt, 16, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    assert out.prompt_logprobs[0] is None and len(out.topk_prompt_logprobs[1]) == 2
    rewards = [sequence.tokens.count(digit) for sequence in out.sequences]
    counts.append(sum(rewards))
    data = []
    for sequence, reward in zip(out.sequences, rewards):
        advantage = reward - sum(rewards) / len(rewards)
        data.append(types.Datum(
            model_input=prompt.append(types.EncodedTextChunk(tokens=sequence.tokens[:-1])),
            loss_fn_inputs={
                "target_tokens": [0] * 5 + sequence.tokens,
                "logprobs": types.TensorData(data=[0.0] * 5 + sequence.logprobs, dtype="float32", shape=[11]),
                "advantages": types.TensorData(data=[0.0] * 5 + [advantage] * 6, dtype="float32", shape=[11]),
            },
        ))
    again = training.forward(data, loss).result().loss_fn_outputs
    for sequence, output in zip(out.sequences, again):  # sampler and learner agree
        assert max(abs(a - b) for a, b in zip(sequence.logprobs, output["logprobs"].data[5:])) < 1e-4
    forward, update = training.forward_backward(data, loss), training.optim_step(adam)
    forward.result(), update.result()
seen["counts"] = counts

# Saved and loaded.
state = training.save_state("state").result().path
other = client.create_training_client_from_state_with_optimizer(state)
assert other.forward([datum], "cross_entropy").result().metrics == training.forward([datum], "cross_entropy").result().metrics
path = training.save_weights_for_sampler("sampler").result().path
saved, live = client.create_sampling_client(model_path=path), training.save_weights_and_get_sampling_client()
params = types.SamplingParams(max_tokens=6, seed=1, temperature=0.5)
first, second = (s.sample(prompt, 2, params).result().sequences for s in (saved, live))
assert [s.tokens for s in first] == [s.tokens for s in second]
assert saved.compute_logprobs(prompt).result() == live.compute_logprobs(prompt).result()
assert saved.get_base_model() == model
for loss in ("stable_reinforce", "nonsense"):
    try:
        training.forward_backward([datum], loss).result()
    except tinker.RequestFailedError as error:
        assert f"no loss '{loss}'" in str(error)
    else:
        raise AssertionError(loss)
print(json.dumps(seen))
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the SDK."""
    prepared = os.environ.get("ONCURVE_TINKER_SDK")
    folder = Path(prepared) if prepared else tmp_path_factory.mktemp("sdk")
    interpreter = str(folder / "bin" / "python")
    if not prepared:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", PACKAGE], check=True, timeout=900)
    return interpreter


def test_loops_of_the_sdk_run_unchanged(python: str, tmp_path: Path) -> None:
    model, tokenizer = tmp_path / "model", build_tokenizer("0123456789+= ")
    build_model(SHAPE, tokenizer, 0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    (tmp_path / "loops.py").write_text(LOOPS)
    command = [sys.executable, "-m", "oncurve", "tinker", str(model), "--port", "0", "--out", str(tmp_path / "out")]
    server = subprocess.Popen(
        [*command, "--json", "--until-closed"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert server.stdout is not None
    try:
        address = json.loads(server.stdout.readline())["address"]
        done = subprocess.run(
            [python, str(tmp_path / "loops.py"), address, str(model)], capture_output=True, text=True, timeout=600,
            env={**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    finally:
        server.communicate(timeout=60)  # closes standard input
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["supervised"][1] < 0.5 * seen["supervised"][0]
    assert sum(seen["counts"][-2:]) > sum(seen["counts"][:2])
