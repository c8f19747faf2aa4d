"""Small random reward models: heads, batches, chat templates, and refused models."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
)

from oncurve.errors import ModelError
from oncurve.records import Prompt
from oncurve.rewards.mix import aspects_of
from oncurve.rewards.models.reward_model import RewardModelOptions, RewardModelReward, batches, conversation, load_step_model
from tests.rewards.builders import group

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 0,
}


def save(folder: Path, kind: type, labels: int, template: str | None = None) -> str:
    torch.manual_seed(0)
    names = {i: f"head{i}" for i in range(labels)}
    kind(Qwen3Config(**SHAPE, num_labels=labels, id2label=names, label2id={n: i for i, n in names.items()})).save_pretrained(
        folder
    )
    letters = ["<pad>", *"abcdefghijklmnopqrstuvwxyz0123456789+=?: \n<>"]
    inner = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("one"), Qwen3ForSequenceClassification, 1)


TEXTS = ("a", "abcdef", "ab", "abcdefghij klm", "")


def test_batches_change_nothing(one_head: str) -> None:
    found = []
    for budget in (1, 20, 10_000):
        reward = RewardModelReward("model", 1.0, RewardModelOptions(model=one_head, tokens_per_batch=budget))
        found.append([a.value for a in aspects_of(reward, group(*TEXTS, prompt="2+2?"))])
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[0] == pytest.approx(found[2], abs=1e-5)
    assert len(set(found[0])) == len(TEXTS)


def test_the_model_s_own_answer(one_head: str) -> None:
    model = Qwen3ForSequenceClassification.from_pretrained(one_head)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(one_head)
    expected = model(**tokenizer("2+2?4", return_tensors="pt", return_token_type_ids=False)).logits.item()
    (aspect,) = aspects_of(RewardModelReward("model", 1.0, RewardModelOptions(model=one_head)), group("4", prompt="2+2?"))
    assert aspect.value == pytest.approx(expected, abs=1e-5)


def test_several_heads(tmp_path: Path) -> None:
    source = save(tmp_path, Qwen3ForSequenceClassification, 3)
    heads = RewardModelReward("model", 1.0, RewardModelOptions(model=source, heads={"head0": 2.0, "2": -1.0}))
    parts = [RewardModelReward("m", 1.0, RewardModelOptions(model=source, heads={f"head{i}": 1.0})) for i in (0, 2)]
    (total,), (first,), (last,) = (aspects_of(reward, group("abc")) for reward in (heads, *parts))
    assert total.value == pytest.approx(2 * (first.value or 0) - (last.value or 0), abs=1e-5)
    assert total.reason is not None
    assert [word.split()[0] for word in total.reason.split(", ")] == ["head0", "head1", "head2"]
    for wrong in ({}, {"nothing": 1.0}):
        with pytest.raises(ModelError, match="head0, head1, head2"):
            RewardModelReward("model", 1.0, RewardModelOptions(model=source, heads=wrong))


def test_a_conversation_that_is_too_long_has_no_reward(one_head: str) -> None:
    reward = RewardModelReward("model", 1.0, RewardModelOptions(model=one_head, max_tokens=10))
    short, long = aspects_of(reward, group("abc", "a" * 50, prompt="?"))
    assert short.value is not None
    assert (long.value, long.failure) == (None, "ValueError: 51 tokens, and max_tokens is 10")


def test_its_own_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save(tmp_path, Qwen3ForSequenceClassification, 1, template))
    assert conversation(tokenizer, Prompt("p", text="hi"), "yo") == ("<user>hi<assistant>yo", False)
    chat = Prompt("p", messages=({"role": "system", "content": "s"}, {"role": "user", "content": "hi"}))
    assert conversation(tokenizer, chat, "yo") == ("<system>s<user>hi<assistant>yo", False)


def test_batches_by_length() -> None:
    assert batches([0, 1, 2, 3], [5, 1, 5, 2], 10) == [[1, 3], [0, 2]]
    assert batches([0, 1], [50, 60], 10) == [[0], [1]]


def test_a_process_reward_model(tmp_path: Path) -> None:
    model = load_step_model(save(tmp_path, Qwen3ForTokenClassification, 2), 1, "cpu", "here")
    good = model.score(Prompt("p", text="2+2?"), "abc\nde", [(0, 3), (4, 6)])
    whole = model.tokenizer("2+2?abc\nde", return_tensors="pt", return_token_type_ids=False)
    expected = model.model(**whole).logits[0].softmax(-1)[:, 1]
    assert good == pytest.approx([expected[6].item(), expected[9].item()], abs=1e-5)


def test_a_model_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        RewardModelReward("model", 1.0, RewardModelOptions(model=str(tmp_path / "none")))


def test_a_language_model_is_no_reward_model(tmp_path: Path) -> None:
    """transformers loads a language model as a classifier with a randomly initialised head."""
    folder = save(tmp_path, Qwen3ForCausalLM, 1)
    with pytest.raises(ModelError, match=r"not a trained reward model\n.*score\.weight.*initialised at random"):
        RewardModelReward("model", 1.0, RewardModelOptions(model=folder, heads={"LABEL_0": 1.0}))
