"""engine = "vllm" where vLLM is missing or of another version; its process when it dies, fails or falls silent; settings."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oncurve.engines.base import SampleKey, SampleRequest, check_engine
from oncurve.engines.native.turns import build_requests
from oncurve.engines.vllm.engine import (
    VllmProcess,
    VllmProcessLost,
    check_vllm,
    device_name,
    environment,
    named_weights,
    via_shared_memory,
)
from oncurve.engines.vllm.messages import Answer, Start, TurnRequest
from oncurve.engines.vllm.requests import PendingRequests, logprobs_for, seed_of
from oncurve.errors import MissingPackage, RecipeError
from oncurve.recipe.defaults import with_importance_cap
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.sections import Sampling
from oncurve.recipe.schema.stages import Grpo
from oncurve.records import Group
from oncurve.rewards.reply_cache import ReplyCache
from tests.agents.test_history import policy as chat_policy
from tests.agents.test_history import prompts as chat_prompts
from tests.engines.native.plain import prompt_of
from tests.models.architectures import make_policy

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
START = Start("nowhere", "nowhere", "float32", 8, "raw_logprobs", 0, False, 0.5, 1 << 20)


def train(tmp_path: Path, *, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = dict(os.environ) | ({"PYTHONPATH": str(path)} if path else {})
    command = [
        sys.executable,
        "-m",
        "oncurve",
        "train",
        str(ROOT / "recipes" / "arithmetic.toml"),
        "--out",
        str(tmp_path / "run"),
    ]
    return subprocess.run([*command, "--set", "scale.engine=vllm"], env=env, capture_output=True, text=True, check=False)


def test_a_missing_vllm_is_one_message_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode == 2
    assert "scale.engine: vLLM is not installed" in done.stderr
    assert "pip install 'oncurve[vllm]'" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "run").exists()


def installed(site: Path, version: str) -> Path:
    """A vLLM as pip would have left it, that must not be imported."""
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text("raise SystemError('it was imported')")
    (site / f"vllm-{version}.dist-info").mkdir()
    (site / f"vllm-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return site


@pytest.mark.slow
def test_a_vllm_of_another_version_is_one_message_too(tmp_path: Path) -> None:
    done = train(tmp_path, path=installed(tmp_path / "site", "0.33.0"))
    assert done.returncode == 2
    assert "vLLM 0.33.0" in done.stderr
    assert "0.26 to 0.32" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr + done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("version", "known"), [("0.25.1", False), ("0.26.0", True), ("0.32.4", True), ("1.0", False), ("x", False)]
)
def test_which_versions_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path, version)))
    if known:
        assert check_vllm() == version
        return
    with pytest.raises(MissingPackage, match=version):
        check_vllm()


def test_a_process_that_fails_a_request_gives_the_reason() -> None:
    """A real one, in an environment without vLLM."""
    process = VllmProcess(60.0, CPU)
    process.send(START)
    with pytest.raises(VllmProcessLost, match="failed while starting: ModuleNotFoundError: No module named 'vllm'") as caught:
        process.receive("starting")
    assert "Traceback" in caught.value.log.read_text()
    caught.value.log.unlink()
    assert process.process.poll() is not None


def test_a_process_that_is_killed_is_noticed() -> None:
    process = VllmProcess(60.0, CPU)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(VllmProcessLost, match=rf"the vLLM process {process.pid} died while starting \(signal 9\)") as caught:
        process.receive("starting")
    caught.value.log.unlink()


def test_a_process_that_falls_silent_is_given_up_and_ended() -> None:
    process = VllmProcess(1.0, CPU)
    os.kill(process.pid, signal.SIGSTOP)
    process.send(START)
    with pytest.raises(VllmProcessLost, match="has sent nothing for 1 s while starting") as caught:
        process.receive("starting")
    caught.value.log.unlink()
    assert process.process.poll() is not None


def test_a_process_that_is_closed_is_gone_and_leaves_no_log() -> None:
    process = VllmProcess(60.0, CPU)
    process.close()
    assert process.process.poll() is not None
    assert not process.log.exists()


def test_the_process_finds_its_gpu_and_none_of_torchruns_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    env = environment(torch.device("cuda", 1))
    assert env["CUDA_VISIBLE_DEVICES"] == "6"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PYTORCH_CUDA_ALLOC_CONF"} & set(env)
    assert device_name(2, None) == "2"


def test_seeds_are_a_function_of_seed_step_prompt_sample_and_turn() -> None:
    seeds = [
        seed_of(SampleKey(seed, step), prompt, sample, at)
        for seed in (0, 1) for step in (1, 2) for prompt in ("a", "b") for sample in (0, 1) for at in (0, 5)
    ]  # fmt: skip
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= one < 1 << 63 for one in seeds)
    assert seed_of(SampleKey(0, 1), "a", 0) == seeds[0]


@pytest.mark.parametrize(
    ("key", "sets"),
    [
        ("grpo.sampling.temperature", ["grpo.sampling.temperature=0.7", "grpo.sampling.top_k=4"]),
        ("grpo.sampling.temperature", ["grpo.sampling.temperature=0.7", "grpo.sampling.top_p=0.9"]),
        ("grpo.sampling.temperature", ["grpo.sampling.temperature=0.7", "grpo.sampling.min_p=0.1"]),
        ("grpo.sampling.temperature", ["grpo.sampling.temperature=0.7", "grpo.sampling.min_new_tokens=4"]),
        ("grpo.sampling.stop", ["grpo.sampling.stop=['x']", "grpo.sampling.min_new_tokens=4"]),
        ("model.lora.dora", ["model.lora.dora=true"]),
        ("model.quantise", ["model.lora.rank=8", "model.quantise=nf4"]),
    ],
)
def test_what_vllm_can_not_do_is_refused_by_its_key(key: str, sets: list[str]) -> None:
    """Before it is looked for: another machine would not help."""
    recipe = load_recipe(ROOT / "recipes" / "arithmetic.toml", [*sets, "scale.engine=vllm"])
    with pytest.raises(RecipeError, match=r'scale\.engine = "native"') as caught:
        check_engine(recipe)
    assert caught.value.where == key


def test_which_log_probs_are_requested() -> None:
    assert [logprobs_for(Sampling(temperature=t)) for t in (0.0, 1.0, 0.7)] == [None, "raw_logprobs", "processed_logprobs"]


def test_a_foreign_sampler_is_corrected_for_unless_the_recipe_says_how() -> None:
    def cap(*sets: str) -> float | None:
        stage = with_importance_cap(load_recipe(ROOT / "recipes" / "arithmetic.toml", list(sets)))[1]
        assert isinstance(stage, Grpo)
        return stage.importance_cap

    assert cap() is None
    assert cap("scale.engine=vllm") == 2.0
    assert cap("scale.samplers=1", "scale.max_staleness=2") == 2.0
    assert cap("scale.engine=vllm", "grpo.importance_cap=5.0") == 5.0
    assert cap("scale.engine=vllm", "grpo.mismatch_limit=1.1") is None
    assert cap("engine.kv_dtype=fp8") == 2.0
    assert cap("engine.kv_dtype=fp8", "grpo.correction=tis") is None


def test_weights_go_under_the_names_of_a_checkpoint_tied_ones_once(tmp_path: Path) -> None:
    tied, untied = named_weights(make_policy("qwen3")), named_weights(make_policy("llama"))
    assert "lm_head.weight" not in tied
    assert "lm_head.weight" in untied
    with via_shared_memory(tied, tmp_path) as file:
        stored = load_file(file.path)
    assert not Path(file.path).exists()
    assert stored.keys() == tied.keys()
    assert all(torch.equal(stored[name], tied[name]) for name in tied)


def test_a_turn_begun_by_a_lost_process_is_requested_again_from_its_start() -> None:
    reported: list[int] = []

    def whole(place: int, group: Group) -> None:
        reported.append(place)

    policy = make_policy("qwen3")
    prompts = [prompt_of(3), prompt_of(4)]
    requests = [SampleRequest(p, policy.encode(p), 2, Sampling(max_new_tokens=3), SampleKey(0, 1)) for p in prompts]
    pending = PendingRequests(policy, requests, whole, 4)
    first = {request.key: request for request in pending.turn_requests()}
    assert [request.max_tokens for request in first.values()] == [3] * 4
    for key in ("0/0", "0/1", "1/1"):
        pending.take(Answer(key, (5, 6, 7), (-1.0, -2.0, -3.0), "length"))
    assert reported == [0]
    pending.version = 5
    pending.mark_version({"1/0": 2})
    assert pending.pending["1/0"].versions == {0: 4, 2: 5}
    (again,) = pending.turn_requests()
    assert again == first["1/0"]
    assert pending.pending["1/0"].versions == {0: 5}
    pending.take(Answer("1/0", (5, policy.eos_ids[0]), (-1.0, -2.0), "end"))
    assert reported == [0, 1]
    ended = pending.groups[1].completions
    assert [(c.stop, len(c.token_ids), c.versions) for c in ended] == [("end", 2, ((0, 5),)), ("length", 3, ((0, 4),))]


def test_a_history_by_the_template_sends_what_the_template_writes() -> None:
    """The first turn loses what is before its question mark; the second is as the template writes it, and stays."""
    policy, prompt = chat_policy(), chat_prompts("template")[0]
    requests = build_requests(policy, [prompt], 1, Sampling(max_new_tokens=80), SampleKey(0, 1))
    pending = PendingRequests(policy, requests, None, None)
    sent = [*pending.turn_requests()]
    for text in ("a?b", "ab", "b"):
        ids = (*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.eos_ids[0])
        following = pending.take(Answer("0/0", ids, (-1.0,) * len(ids), "end"))
        sent += [] if following is None else [following]
    messages: list[Any] = list(prompt.messages or ())
    for request, text in zip(sent, ("a?b", "ab", "b", ""), strict=True):
        written = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert list(request.token_ids) == written
        result = {"role": "tool", "content": "ab" * (21 if text == "ab" else 1)}
        messages += [{"role": "assistant", "content": text}, result]
    sequence = pending.pending["0/0"]
    assert [len(part.spans) for part in sequence.chain] == [1, 2]
    assert len({request.seed for request in sent}) == 4


def test_a_turn_that_differs_from_its_record_starts_the_conversation_again() -> None:
    """vLLM's rounding depends on its batch, so a resumed step may sample another turn than the recorded one."""
    policy, prompt, replies = chat_policy(), chat_prompts("tokens")[0], ReplyCache()
    replies.load({}, None)

    def converse(*texts: str) -> tuple[PendingRequests, list[TurnRequest]]:
        requests = build_requests(policy, [prompt], 1, Sampling(max_new_tokens=80), SampleKey(0, 1), replies)
        pending = PendingRequests(policy, requests, None, None, replies)
        sent = [*pending.turn_requests()]
        for text in texts:
            ids = (*policy.tokenizer(text, add_special_tokens=False)["input_ids"], policy.eos_ids[0])
            following = pending.take(Answer("0/0", ids, (-1.0,) * len(ids), "end"))
            sent += [] if following is None else [following]
        return pending, sent

    first, sent = converse("a", "b", "a", "b")
    assert (len(sent), list(first.groups)) == (4, [0])
    again, sent = converse("a", "a", "b", "b", "b", "b")
    assert sent[2] == sent[0], "from the prompt, with the seed of its first turn"
    (completion,) = again.groups[0].completions
    assert completion.episode is not None
    assert len(completion.episode.turns) == 4
    assert len(completion.token_ids) == len(completion.logps)
