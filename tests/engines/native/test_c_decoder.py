"""The C runner: against full forwards of transformers, against torch, and without a compiler."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from oncurve.engines.base import SampleKey, SampleRequest
from oncurve.engines.native.c_decoder import CRunner, can_decode
from oncurve.engines.native.engine import NativeEngine
from oncurve.engines.native.torch_runner import TorchRunner
from oncurve.models import lora
from oncurve.models.llama.c_build import load_library
from oncurve.models.policy import Policy
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Group, Prompt
from oncurve.training.start import with_machine_defaults
from tests.engines.native.plain import NEAR_TIE, assert_logps, assert_same_greedy, generate, next_logits, prompt_of
from tests.models.architectures import adapted, shake, tokenizer

PROMPTS = [prompt_of(n, name) for name, n in zip("abcdef", (1, 2, 17, 64, 66, 131), strict=True)]
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"attention_bias": True}),
    "qwen2": (Qwen2Config, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": 24}),
}


def make_model(name: str) -> PreTrainedModel:
    kind, special = MODELS[name]
    words = tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "pad_token_id": 0, "bos_token_id": None}
    config = kind(**sizes | ids | {"num_hidden_layers": 3, "max_position_embeddings": 512} | special)
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest) -> tuple[PreTrainedModel, Policy]:
    """A plain model, and the same one as a policy."""
    model = make_model(request.param)
    return model, Policy(copy.deepcopy(model), tokenizer())


def run(policy: Policy, sampling: Sampling, *, compiled: bool = True, group_size: int = 3, slots: int = 6) -> list[Group]:
    engine = NativeEngine(policy if compiled else _by_torch(policy), Engine(slots=slots))
    assert runner_type(engine, PROMPTS, sampling) is (CRunner if compiled else TorchRunner)
    return engine.sample(PROMPTS, group_size, sampling, SampleKey(0, 1))


def runner_type(engine: NativeEngine, prompts: list[Prompt], sampling: Sampling) -> type:
    requests = [SampleRequest(p, engine.policy.encode(p), 1, sampling, SampleKey(0, 1)) for p in prompts]
    return type(engine.build_runner(requests))


def _by_torch(policy: Policy) -> Policy:
    return Policy(copy.deepcopy(policy.model), policy.tokenizer, compiled=False)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_a_full_forward(pair: tuple[PreTrainedModel, Policy], temperature: float) -> None:
    model, policy = pair
    for group in run(policy, Sampling(max_new_tokens=70, temperature=temperature)):
        for completion in group.completions:
            assert_logps(model, group.prompt_ids, completion, temperature)


def test_greedy_texts_are_those_of_transformers(pair: tuple[PreTrainedModel, Policy]) -> None:
    model, policy = pair
    sampling = Sampling(max_new_tokens=70, temperature=0.0)
    for group in run(policy, sampling, group_size=1):
        ours = group.completions[0].token_ids
        assert_same_greedy(model, group.prompt_ids, ours, generate(model, group.prompt_ids, sampling))


def test_an_adapter_is_merged_and_an_update_of_it_is_sampled_from() -> None:
    """Log-probs are those of peft's merged model, before and after the adapter changes, and of the base if it is disabled."""
    model = adapted(make_model("qwen3"))
    policy = Policy(copy.deepcopy(model), tokenizer())
    sampling, texts = Sampling(max_new_tokens=20), []
    for _ in range(2):
        groups = run(policy, sampling)
        merged = lora.merge_copy(policy.model)
        merged.set_attn_implementation("eager")
        for group in groups:
            for completion in group.completions:
                assert_logps(merged, group.prompt_ids, completion, 1.0)
        texts.append([c.text for group in groups for c in group.completions])
        shake(policy.model)
    assert texts[0] != texts[1]
    with lora.adapter_disabled(policy.model):
        group = run(policy, sampling)[2]
    assert_logps(make_model("qwen3"), group.prompt_ids, group.completions[0], 1.0)


@pytest.mark.parametrize(
    "sampling", [Sampling(max_new_tokens=50), Sampling(max_new_tokens=50, min_new_tokens=45, temperature=1.3)]
)
def test_it_samples_what_torch_samples_up_to_near_ties(pair: tuple[PreTrainedModel, Policy], sampling: Sampling) -> None:
    model, policy = pair
    for ours, theirs in zip(run(policy, sampling), run(policy, sampling, compiled=False), strict=True):
        for a, b in zip(ours.completions, theirs.completions, strict=True):
            same = next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y), None)
            shared = min(len(a.token_ids), len(b.token_ids)) if same is None else same
            for x, y in ((a.logps, b.logps), (a.sampled_logps, b.sampled_logps), (a.raw_logps, b.raw_logps)):
                assert np.abs(x[:shared] - y[:shared]).max(initial=0) < 1e-4
            if same is None:
                assert (len(a.token_ids), a.stop) == (len(b.token_ids), b.stop)
            else:
                p = (next_logits(model, ours.prompt_ids, a.token_ids[: same + 1])[-1] / sampling.temperature).softmax(-1)
                low, high = sorted((int(a.token_ids[same]), int(b.token_ids[same])))
                assert float(p[low + 1 : high].sum()) < NEAR_TIE


def test_other_slots_threads_and_neighbours_change_no_bit(pair: tuple[PreTrainedModel, Policy]) -> None:
    """Stronger than torch's guarantee: the number of slots does not matter either."""
    policy, sampling, threads = pair[1], Sampling(max_new_tokens=40), torch.get_num_threads()
    expected = [(c.token_ids.tobytes(), c.logps.tobytes()) for g in run(policy, sampling) for c in g.completions]
    try:
        for slots, count in ((3, 1), (18, 3), (9, 2)):
            torch.set_num_threads(count)
            found = [
                (c.token_ids.tobytes(), c.logps.tobytes()) for g in run(policy, sampling, slots=slots) for c in g.completions
            ]
            assert found == expected
    finally:
        torch.set_num_threads(threads)


def test_groups_of_several_blocks_share_their_prompt(pair: tuple[PreTrainedModel, Policy]) -> None:
    model, policy = pair
    (group,) = NativeEngine(policy, Engine(slots=40)).sample(PROMPTS[5:], 40, Sampling(max_new_tokens=6), SampleKey(0, 1))
    for completion in group.completions[::7]:
        assert_logps(model, group.prompt_ids, completion, 1.0)


def test_completions_end_at_the_first_stop_string(pair: tuple[PreTrainedModel, Policy]) -> None:
    sampling = Sampling(max_new_tokens=60, stop=("q", "7"))
    plain = run(pair[1], Sampling(max_new_tokens=60))
    for group, whole in zip(run(pair[1], sampling), plain, strict=True):
        for cut, full in zip(group.completions, whole.completions, strict=True):
            first = next((i for i, c in enumerate(full.text) if c in "q7"), None)
            assert cut.text == (full.text if first is None else full.text[: first + 1])
            assert cut.stop == (full.stop if first is None else "stop_string")


def test_a_changed_weight_takes_effect_without_a_call() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    before = run(policy, Sampling(max_new_tokens=20))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(0.5)
    after = run(policy, Sampling(max_new_tokens=20))
    assert any(a.completions[0].logps[0] != b.completions[0].logps[0] for a, b in zip(before, after, strict=True))
    plain = copy.deepcopy(policy.model)
    plain.set_attn_implementation("eager")
    assert_logps(plain, after[2].prompt_ids, after[2].completions[0], 1.0)


def test_truncated_sampling_other_precisions_and_models_go_through_torch() -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    assert can_decode(policy, Sampling())
    for sampling in (Sampling(top_k=5), Sampling(top_p=0.9), Sampling(min_p=0.1)):
        assert not can_decode(policy, sampling)
    assert not can_decode(Policy(make_model("qwen3").bfloat16(), tokenizer()), Sampling())


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", "there-is-no-such-compiler")
    load_library.cache_clear()
    yield
    load_library.cache_clear()


def test_without_a_compiler_torch_decodes_and_the_run_says_so(no_compiler: None) -> None:
    policy = Policy(make_model("qwen3"), tokenizer())
    assert load_library() is None
    engine = NativeEngine(policy, Engine())
    assert runner_type(engine, [Prompt("p", text="1+1=")], Sampling()) is TorchRunner
    assert "no C compiler" in engine.log_lines[0]
    recipe = parse_recipe({"task": {"type": "arithmetic"}, "stages": [{"type": "sft"}]})
    assert recipe.model.compiled
    assert not with_machine_defaults(recipe).model.compiled


def test_the_function_is_built_once_and_kept(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    load_library.cache_clear()
    assert load_library() is not None
    (built,) = (tmp_path / "oncurve").glob("*.so")
    when = built.stat().st_mtime_ns
    load_library.cache_clear()
    assert load_library() is not None
    assert [p.stat().st_mtime_ns for p in (tmp_path / "oncurve").glob("*.so")] == [when]
    load_library.cache_clear()
    assert load_library() is not None
