"""Demonstrations with tools for an sft stage: only what the assistant writes is trained on, as the chat template writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import DataError, ModelError
from oncurve.models.policy import Policy
from oncurve.recipe.schema.stages import Sft
from oncurve.records import Example, Prompt
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.stages.sft import SftLoop, read_examples
from tests.agents.test_conversations import built_in, hermes
from tests.agents.test_tool_environment import multiply

CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}},
    {"id": "c2", "type": "function", "function": {"name": "multiply", "arguments": {"a": 4, "b": 5}}},
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "2*3 and 4*5?"},
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "name": "multiply", "content": "6"},
    {"role": "tool", "tool_call_id": "c2", "name": "multiply", "content": "20"},
    {"role": "assistant", "content": "6 and 20", "tool_calls": None},
]
SCHEMA = {"type": "function", "function": {"name": "times", "description": "Multiplies.", "parameters": {"type": "object"}}}


def no_task(**options: Any) -> PromptList:
    prompts = PromptList.of([{"prompt": [{"role": "user", "content": "go"}]}])
    train = tuple(Prompt(p.id, messages=p.messages, columns=p.columns, **options) for p in prompts.train)
    return PromptList(train, (), ())


def write(folder: Path, row: dict[str, Any]) -> Sft:
    (folder / "demos.jsonl").write_text(json.dumps(row) + "\n")
    return Sft(data=str(folder / "demos.jsonl"), steps=1, batch_size=1)


ROWS = {
    "messages": {"messages": CHAT},
    "prompt": {"prompt": CHAT},
    "prompt and completion": {"prompt": CHAT[:2], "completion": CHAT[2:]},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("policy", [built_in, hermes])
def test_only_the_assistants_tokens_are_trained_and_they_are_the_templates(
    policy: Any, row: dict[str, Any], tmp_path: Path
) -> None:
    opened: Policy = policy()
    loop = SftLoop(write(tmp_path, {**row, "tools": [SCHEMA]}), 0, no_task(), opened)
    tokenizer, eos = opened.tokenizer, opened.tokenizer.eos_token
    given = ({"a": 2, "b": 3}, {"a": 4, "b": 5})
    parsed = [{**c, "function": {"name": "multiply", "arguments": a}} for c, a in zip(CALLS, given, strict=True)]
    chat = [*CHAT[:2], {"role": "assistant", "content": "", "tool_calls": parsed}, *CHAT[3:]]
    complete = tokenizer.apply_chat_template(chat, tools=[SCHEMA], tokenize=True, return_dict=True)["input_ids"]
    called = "".join(f"<tool_call>{json.dumps(c['function'])}</tool_call>" for c in parsed)
    for (prompt_ids, answer_ids, mask), text in zip(loop.rows, (called, "6 and 20"), strict=True):
        assert [*prompt_ids, *answer_ids] == complete[: len(prompt_ids) + len(answer_ids)]
        assert mask.all()
        written = tokenizer.decode(answer_ids, skip_special_tokens=False)
        assert written.replace(" ", "") == f"{text}{eos}".replace(" ", ""), "a template may write JSON with other spaces"


def test_a_row_as_json_text_and_the_tasks_own_tools(tmp_path: Path) -> None:
    environment = ToolEnvironment([multiply])
    policy = hermes()
    for row, name in (({"messages": CHAT, "tools": json.dumps([SCHEMA])}, "times"), ({"messages": CHAT}, "multiply")):
        first = SftLoop(write(tmp_path, row), 0, no_task(environment=environment), policy).rows[0][0]
        assert policy.tokenizer.decode(first, skip_special_tokens=False).startswith(f"<|im_start|>system\nTools: {name}")


def test_a_prompt_keeps_the_calls_of_its_history(tmp_path: Path) -> None:
    (prompt,) = PromptList.of([{"prompt": CHAT[:5]}]).train
    assert prompt.messages is not None
    assert prompt.messages[2]["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 3}
    assert prompt.messages[3] == CHAT[3]
    assert '"a": 2' in prompt.shown


def test_wrong_calls_get_one_clear_message(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "multiply", "arguments": "{"}}
    chat = [CHAT[1], {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(DataError, match="the prompt is"):
        read_examples(write(tmp_path, {"messages": chat}), no_task())


def test_a_template_that_can_not_write_calls_is_refused(tmp_path: Path) -> None:
    policy = hermes()
    policy.tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    with pytest.raises(ModelError, match="can't write the tool calls"):
        SftLoop(write(tmp_path, {"messages": CHAT}), 0, no_task(), policy)


def test_plain_answers_are_encoded_as_before(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    (example,) = read_examples(write(tmp_path, {"messages": chat}), no_task())
    assert example == Example(example.prompt, "ho")
    assert np.array_equal(
        SftLoop(write(tmp_path, {"messages": chat}), 0, no_task(), built_in()).rows[0][1], built_in().encode_completion("ho")
    )


@pytest.mark.parametrize("rows", ["messages", "prompt and completion"])
def test_reasoning_is_written_by_the_template(rows: str, tmp_path: Path) -> None:
    """Of the answer that is trained, and of earlier ones, as far as the template keeps it."""
    policy = hermes()
    policy.tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat = [
        {"role": "user", "content": "2*3?"},
        {"role": "assistant", "content": "6", "reasoning_content": "3+3"},
        {"role": "user", "content": "2*4?"},
        {"role": "assistant", "content": "8", "reasoning_content": "4+4"},
    ]
    row = {"messages": chat} if rows == "messages" else {"prompt": chat[:3], "completion": chat[3:]}
    prompt_ids, answer_ids, mask = SftLoop(write(tmp_path, row), 0, no_task(), policy).rows[-1]
    written = [policy.tokenizer.decode(ids, skip_special_tokens=False) for ids in (prompt_ids, answer_ids)]
    assert "<think>3+3</think>6" in written[0]
    assert written[1] == f"<think>4+4</think>8{policy.tokenizer.eos_token}"
    assert mask.all()
