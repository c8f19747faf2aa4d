"""The policy: encoding, decoding, checks of attention and head, saving; and its reference."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

from oncurve.errors import ModelError
from oncurve.models.loading.load import choose_device, load_policy
from oncurve.models.loading.tiny import TAGS, build_model, build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.records import Prompt
from tests.models.architectures import make_model as make_architecture
from tests.models.architectures import tokenizer

SMALL = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=32, context=64)
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}{{ extra or '' }}"
)


def small(**options: object) -> Policy:
    return load_policy(Model(tiny=SMALL, **options), alphabet="0123456789+= abcdefgstu", seed=0)  # type: ignore[arg-type]


def test_the_tiny_tokenizer_has_one_token_per_character_and_tag() -> None:
    tiny_tokenizer = build_tokenizer("0123456789+=")
    text = "12+30=<think>5</think><answer>42</answer>"
    ids = tiny_tokenizer(text)["input_ids"]
    assert len(ids) == len("12+30=") + len("542") + len(TAGS)
    assert tiny_tokenizer.decode(ids) == text
    assert tiny_tokenizer("1x2")["input_ids"][1] == tiny_tokenizer.unk_token_id


def test_the_tiny_model_depends_only_on_its_seed_and_leaves_the_global_generator_unchanged() -> None:
    tiny_tokenizer = build_tokenizer("01")
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    one, two, other = (build_model(SMALL, tiny_tokenizer, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_text_is_encoded_unchanged_and_completions_get_the_end_token() -> None:
    policy = small()
    ids = policy.encode(Prompt(id="p", text="1+2="))
    assert policy.decode(ids) == "1+2="
    assert policy.encode_completion("3").tolist() == [*policy.encode(Prompt(id="q", text="3")).tolist(), policy.eos_ids[0]]
    assert policy.decode(policy.encode_completion("3")) == "3"
    with pytest.raises(ModelError, match="no tokens"):
        policy.encode(Prompt(id="p", text=""))


def test_messages_go_through_the_template_with_the_system_prompt_and_options() -> None:
    policy = small(system_prompt="be", template_options={"extra": "5"})
    prompt = Prompt(id="p", messages=({"role": "user", "content": "12"},))
    with pytest.raises(ModelError, match=r"(?s)without a chat template.*by its columns"):
        policy.encode(prompt)
    policy.tokenizer.chat_template = TEMPLATE
    assert policy.decode(policy.encode(prompt)) == "sbe u12 a5"
    with_system = Prompt(id="p", messages=({"role": "system", "content": "c"}, {"role": "user", "content": "1"}))
    assert policy.decode(policy.encode(with_system)) == "sc u1 a5"


def test_a_saved_policy_loads_in_transformers_and_here(tmp_path: Path) -> None:
    policy = small()
    policy.save(tmp_path / "model")
    again = load_policy(Model(source=str(tmp_path / "model")), alphabet=None, seed=9)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "model")("1+2=")["input_ids"]
        == policy.encode(Prompt(id="p", text="1+2=")).tolist()
    )
    for name, value in policy.model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
        assert torch.equal(value, again.model.state_dict()[name])
    assert again.eos_ids == policy.eos_ids


@pytest.mark.parametrize(
    ("source", "message"),
    [("{}/nowhere/at/all", "no such folder"), ("{}", "without config.json"), ("{}/broken", "can't be loaded")],
)
def test_a_folder_that_is_no_model_is_refused(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{ not json")
    with pytest.raises(ModelError, match=message):
        load_policy(Model(source=source.format(tmp_path)), alphabet=None, seed=0)


def test_a_missing_gpu_is_refused() -> None:
    if not torch.cuda.is_available():
        with pytest.raises(ModelError, match="no CUDA GPU"):
            choose_device("cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_attention_sinks_take_the_general_path() -> None:
    tokens = tokenizer()
    config = GptOssConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    reason = Policy(GptOssForCausalLM(config), tokens).general_reason
    assert reason is not None
    assert "attention sinks" in reason


def test_learned_positions_restart_after_the_prompt_too() -> None:
    """GPT-2 has learned position embeddings: each completion continues at the position after its prompt."""
    tokens = tokenizer()
    config = GPT2Config(vocab_size=len(tokens), n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1)
    plain = GPT2LMHeadModel(config).eval()
    policy = Policy(copy.deepcopy(plain), tokens)
    ids = np.arange(3, 20)
    pack = build_pack([PrefixGroup(ids[:6], (ids[6:10], ids[10:]), (0, 1))], policy.device)
    with torch.no_grad():
        ours = policy.pack_logps(pack)[0]
        theirs = [
            plain(torch.from_numpy(np.concatenate((ids[:6], completion)))[None])
            .logits[0, 5:-1]
            .log_softmax(-1)[range(len(completion)), completion]
            for completion in (ids[6:10], ids[10:])
        ]
    torch.testing.assert_close(ours, torch.cat(theirs), rtol=1e-4, atol=1e-4)


def test_a_head_that_does_more_than_scale_and_cap_is_refused() -> None:
    """An undetected factor between head and logits would silently train on wrong numbers."""
    model = make_architecture("llama")
    plain = type(model).forward

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, *arguments: object, **named: object) -> object:
            out = plain(self, *arguments, **named)
            out.logits = out.logits * 2
            return out

    model.__class__ = Odd
    with pytest.raises(ModelError, match="LM head"):
        Policy(model, tokenizer())


def test_the_reference_changes_only_when_refreshed() -> None:
    policy = small()
    reference = Reference(policy)
    pack = build_pack([PrefixGroup(np.array([7, 8, 9]), (np.array([10, 11]),), (0,))], policy.device)
    with torch.no_grad():
        start = policy.pack_logps(pack)[0]
        for p in policy.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
        moved = policy.pack_logps(pack)[0]
    assert not torch.allclose(start, moved)
    assert torch.equal(reference.logps(pack, 1.0), start)
    state = {name: value.clone() for name, value in reference.state().items()}
    reference.refresh(policy)
    assert torch.equal(reference.logps(pack, 1.0), moved)
    assert not any(p.requires_grad for p in reference._snapshot._policy.model.parameters())
    reference.load_state(state)
    assert torch.equal(reference.logps(pack, 1.0), start)
    assert torch.equal(policy.pack_logps(pack)[0].detach(), moved), "the policy's own weights are not the reference's"
