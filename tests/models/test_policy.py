"""The policy: encoding, decoding, checks of attention and head, saving; and its reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

from oncurve.engines.base import SampleKey
from oncurve.engines.native.engine import NativeEngine
from oncurve.errors import ModelError
from oncurve.models.fisher import policy_distributions, vocab_logps
from oncurve.models.loading.load import TAGS, build_model, build_tokenizer, choose_device, load_policy
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.models.reference import Reference
from oncurve.models.self_check import has_same_states
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.sections import Engine, Sampling
from oncurve.records import Prompt
from tests.models.architectures import make_model as make_architecture
from tests.models.architectures import make_policy, tokenizer
from tests.models.tiny_families import tiny_model

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
    policy = small(system_prompt="be")
    policy.template_options = {"extra": "5"}
    prompt = Prompt(id="p", messages=({"role": "user", "content": "12"},))
    with pytest.raises(ModelError, match=r"(?s)without a chat template.*model\.tiny\.chat=true.*in a file texts"):
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


def with_sinks() -> Policy:
    tokens = tokenizer()
    config = GptOssConfig(
        vocab_size=len(tokens), hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return Policy(GptOssForCausalLM(config), tokens)


def test_attention_sinks_run_through_our_attention() -> None:
    assert with_sinks().general_reason is None


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


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss", "gptj"])
def test_sequences_of_one_completion_are_forwarded_by_themselves(name: str) -> None:
    """In C, by the model's modules with our attention, and by transformers' own forward."""
    makers: dict[str, Callable[[], Policy]] = {"gpt_oss": with_sinks, "gptj": lambda: Policy(tiny_model("gptj"), tokenizer())}
    policy = makers[name]() if name in makers else make_policy(name)
    assert (policy.general_reason is not None) == (name == "gptj")
    ids, context = np.arange(3, 20), np.arange(9, 13)
    forked = build_pack([PrefixGroup(ids[:6], (ids[6:10], ids[10:]), (0, 1), ((), ((3, context),)))], policy.device)
    groups = [PrefixGroup(ids[:6], (ids[6:10], ids[10:13]), (0, 1)), PrefixGroup(context, (ids[13:],), (2,))]
    with torch.no_grad():
        ours, theirs = (policy.pack_logps(pack)[0] for pack in (forked, build_pack(groups, policy.device)))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        if policy.general_reason is None:
            own, twice = policy_distributions(policy, forked, 1.0), vocab_logps(policy, forked, 1.0)
            torch.testing.assert_close(twice, own, rtol=1e-4, atol=1e-4)


@pytest.fixture
def empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models below differ in a function that no key of a remembered self-check can cover."""
    monkeypatch.setenv("ONCURVE_CACHE", str(tmp_path))


def with_logits(change: Callable[[Tensor, Tensor], Tensor], name: str) -> PreTrainedModel:
    """A model that changes its logits: ``change`` gets them and the token ids."""
    model = make_architecture(name)
    plain = type(model).forward

    class Odd(type(model)):  # type: ignore[misc]
        def forward(self, input_ids: Tensor, **named: Any) -> Any:
            out = plain(self, input_ids, **named)
            out.logits = change(out.logits, input_ids)
            return out

    model.__class__ = Odd
    return model


@pytest.mark.usefixtures("empty_memory")
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("change", [lambda z, _: 2 * z, lambda z, _: torch.tanh(z) + 0.5 * z.roll(1, -1)])
def test_a_head_that_does_more_than_scale_and_cap_is_called_itself(
    name: str, change: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Else an unnoticed factor between head and logits would silently train on wrong numbers."""
    model = with_logits(change, name)
    own = copy.deepcopy(model)
    policy = Policy(model, tokenizer())
    assert policy.check.own_head
    assert policy.general_reason is None
    group = NativeEngine(policy, Engine(slots=4)).sample(
        [Prompt(id="p", text="abc")], 3, Sampling(max_new_tokens=8, temperature=0.7), SampleKey(0, 1)
    )[0]
    completions = tuple(c.token_ids for c in group.completions)
    pack = build_pack([PrefixGroup(group.prompt_ids, completions, (0, 1, 2))], policy.device)
    logp_M, entropy_M = policy.pack_logps(pack, 0.7)
    theirs, entropies = [], []
    for ids in completions:
        row = torch.from_numpy(np.concatenate((group.prompt_ids, ids)))[None]
        logps = (own(row).logits[0, len(group.prompt_ids) - 1 : -1] / 0.7).log_softmax(-1)
        theirs.append(logps[range(len(ids)), ids])
        entropies.append(-(logps.exp() * logps).sum(-1))
    weight_M = torch.linspace(-1, 1, len(logp_M))
    torch.testing.assert_close(logp_M, torch.cat(theirs), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy_M, torch.cat(entropies), rtol=0, atol=1e-5)
    np.testing.assert_allclose(np.concatenate([c.logps for c in group.completions]), logp_M.detach(), atol=1e-5)
    for logp, entropy in ((logp_M, entropy_M), (torch.cat(theirs), torch.cat(entropies))):
        (logp @ weight_M + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    ours = {name: p.grad for name, p in policy.model.named_parameters()}
    for parameter, p in own.named_parameters():
        torch.testing.assert_close(ours[parameter], p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("empty_memory")
@pytest.mark.parametrize("size", [1.0, 0.05])
def test_a_soft_cap_by_another_name_is_found_in_16_bits_too(size: float) -> None:
    """RecurrentGemma calls it logits_soft_cap. It changes logits of 6 by 1 %, less than bfloat16's tolerance."""
    model = tiny_model("recurrent_gemma").to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(size)
    assert Policy(model, tokenizer()).check.own_head
    assert not Policy(tiny_model("gemma2").to(torch.bfloat16), tokenizer()).check.own_head, "its cap is in the config"


def test_a_head_that_reads_the_token_ids_is_refused() -> None:
    model = with_logits(lambda z, ids: z + torch.nn.functional.one_hot(ids, z.shape[-1]), "llama")
    with pytest.raises(ModelError, match="do not follow from its last hidden state"):
        Policy(model, tokenizer())


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_mean_of_16_bit_weights_is_kept_in_float32(on_cpu: bool, is_mixed: bool) -> None:
    """A hundred steps of 1 % toward a policy that is one rounding unit away: 16-bit weights would never move. Some families
    keep some weights in float32 (``is_mixed``)."""
    policy = small()
    policy.model.to(torch.bfloat16)
    if is_mixed:
        policy.backbone.norm.float()
    with torch.no_grad():
        for p in policy.model.parameters():
            p.fill_(1.0)
    reference = Reference(policy, on_cpu)
    with torch.no_grad():
        for p in policy.model.parameters():
            p.fill_(1 + 2**-7)
    for _ in range(100):
        reference.refresh(policy, 0.01)
    expected = 1 + 2**-7 * (1 - 0.99**100)
    state = {name: tensor.clone() for name, tensor in reference.state().items()}
    means = {name: mean for name, mean in state.items() if name.endswith("/mean")}
    assert means
    assert all(torch.allclose(mean, torch.tensor(expected), atol=1e-6) for mean in means.values())
    resumed = Reference(policy, on_cpu)
    resumed.load_state(state)
    for one in (reference, resumed):
        one.refresh(policy, 0.01)
    assert all(torch.equal(value, resumed.state()[name]) for name, value in reference.state().items())
    assert float(state[next(iter(means)).removesuffix("/mean")].flatten()[0]) == 1 + 2**-7, "rounded for the pass"


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


def sharp(seed: int, factor: float = 8.0) -> Policy:
    """A policy in bfloat16 whose attention prefers one token to all others, and whose states have one very large element."""
    model, generator = tiny_model("qwen2"), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5)
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(factor)
        model.model.norm.weight[0] = 200.0
    return Policy(model.bfloat16(), tokenizer())


@pytest.mark.parametrize("seed", [0, 3])
def test_tokens_that_rounding_changes_completely_do_not_cost_the_fast_path(seed: int) -> None:
    """As in a pretrained model: in 16 bits rounding decides which token attracts a few others."""
    policy = sharp(seed)
    assert policy.fast_backbone is not None, policy.module_reason


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_a_fast_path_with_a_slightly_wrong_scale_is_noticed_in_16_bits(factor: float) -> None:
    policy = sharp(1, factor=4.0)
    fast, policy.fast_backbone = policy.fast_backbone, None
    assert fast is not None
    assert has_same_states(policy, fast.hidden)
    fast.scale *= factor
    assert not has_same_states(policy, fast.hidden)
