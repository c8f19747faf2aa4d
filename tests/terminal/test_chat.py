"""Conversations, with and without a chat template."""

from __future__ import annotations

import io

import torch
from transformers import GenerationConfig

from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.records import Prompt
from oncurve.terminal.chat import Chat, ChatSettings, Printer, converse

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+=:; "


def policy(template: str | None = None) -> Policy:
    tokenizer = build_tokenizer(ALPHABET)
    tokenizer.chat_template = template
    shape = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=96)
    return Policy(build_model(shape, tokenizer, 0), tokenizer)


def test_greedy_answers_are_those_of_the_model_and_the_same_each_time() -> None:
    model = policy()
    ids = torch.from_numpy(model.encode(Prompt("p", text="1+2=")))[None]
    expected = []
    with torch.no_grad():
        model.model.set_attn_implementation("eager")
        for _ in range(5):
            ids = torch.cat([ids, model.model(ids).logits[:, -1:].argmax(-1)], 1)
            expected.append(int(ids[0, -1]))
    out = io.StringIO()
    chat = Chat(model, ChatSettings(max_new_tokens=5))
    text = chat.ask("1+2=", out)
    assert text == model.tokenizer.decode(expected, skip_special_tokens=True)
    assert out.getvalue() == text + "\n"
    assert chat.ask("1+2=", io.StringIO()) == text
    assert chat.messages == []


def test_answers_are_those_of_the_policy_and_not_of_its_generation_config() -> None:
    """Qwen2.5 comes with a repetition penalty, others with tokens to exclude: the trained policy has neither."""
    plain, configured = policy(), policy()
    configured.model.generation_config = GenerationConfig(repetition_penalty=5.0, no_repeat_ngram_size=1, suppress_tokens=[5])
    texts = [Chat(model, ChatSettings(max_new_tokens=12)).ask("1+2=", io.StringIO()) for model in (plain, configured)]
    assert texts[0] == texts[1]


def test_a_chat_model_remembers_until_told_to_forget() -> None:
    chat = Chat(policy(TEMPLATE), ChatSettings(max_new_tokens=3, system="be brief"))
    out = io.StringIO()
    converse(chat, ["hello", "again"], out, live=True)
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[3]["content"] == "again"
    converse(chat, ["/new"], out, live=True)
    assert chat.messages == [{"role": "system", "content": "be brief"}]


def test_help_is_for_the_person_and_not_for_the_model() -> None:
    chat = Chat(policy(TEMPLATE), ChatSettings(max_new_tokens=3))
    out = io.StringIO()
    converse(chat, ["/help"], out, live=True)
    assert chat.messages == []
    assert out.getvalue().count("/new starts another") == 2
    converse(chat, ["/help"], out, live=False)
    assert chat.messages[0]["content"] == "/help", "from a pipe, every line is a prompt"


def test_from_a_pipe_each_line_stands_alone() -> None:
    chat = Chat(policy(TEMPLATE), ChatSettings(max_new_tokens=3))
    converse(chat, ["hello", "", "again"], io.StringIO(), live=False)
    assert chat.messages[0]["content"] == "again"


def test_at_a_terminal_too_long_a_prompt_is_reported_and_the_chat_continues() -> None:
    out = io.StringIO()
    converse(Chat(policy(), ChatSettings(max_new_tokens=3)), ["1" * 200, "1+2="], out, live=True)
    lines = out.getvalue().splitlines()
    assert "96 positions" in lines[1]
    assert len(lines) == 3


def test_sampling_depends_on_the_seed_alone() -> None:
    def answers(seed: int) -> list[str]:
        chat = Chat(policy(), ChatSettings(max_new_tokens=12, temperature=1.0, seed=seed))
        return [chat.ask("1+2=", io.StringIO()) for _ in range(2)]

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_half_a_character_waits_for_its_other_half() -> None:
    class Bytes:
        """Tokens are bytes, as in byte-level tokenizers."""

        class tokenizer:  # noqa: N801
            @staticmethod
            def decode(ids: list[int], skip_special_tokens: bool) -> str:
                return bytes(ids).decode(errors="replace")

    out = io.StringIO()
    printer = Printer(Bytes(), out)  # type: ignore[arg-type]
    printer.put(torch.tensor([[1, 2]]))
    outputs = []
    for token in "aé".encode():
        printer.put(torch.tensor([token]))
        outputs.append(out.getvalue())
    assert outputs == ["a", "a", "aé"]
