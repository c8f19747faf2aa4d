"""A completion with tool calls as the message that OpenAI's clients expect."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oncurve.agents.tool_calls import parse_turn
from oncurve.models.policy import Policy
from oncurve.records import Ints, Turn


class MessageReader:
    """Reads the assistant's messages of one chat: what the model has written after ``prompt_ids``, given these tools. A message
    has only the first of several calls unless ``allows_several_calls`` is set.

    ``position`` is the number of messages before it. Ids of calls follow from it and the text, so that a repeated conversation
    has the same ones.
    """

    def __init__(
        self,
        policy: Policy,
        prompt_ids: Ints,
        tools: Sequence[Mapping[str, Any]],
        position: int,
        allows_several_calls: bool = True,
    ) -> None:
        self.tokenizer, self.tools, self.position, self.prompt_ids = policy.tokenizer, tools, position, prompt_ids
        self.max_calls = None if allows_several_calls else 1

    def __call__(self, text: str, token_ids: Sequence[int]) -> dict[str, Any]:
        """Builds the message. Tool calls that can't be parsed stay in its content."""
        turn = Turn(self.position, np.asarray(token_ids, np.int64), text, context_ids=self.prompt_ids)
        message, _ = parse_turn(self.tokenizer, turn, self.tools)
        calls = [
            {
                "id": hashlib.sha256(f"{self.position}/{i}/{text}".encode()).hexdigest()[:9],
                "type": "function",
                "function": {"name": function["name"], "arguments": json.dumps(function["arguments"], ensure_ascii=False)},
            }
            for i, function in enumerate(call["function"] for call in message.get("tool_calls", ())[: self.max_calls])
        ]
        content = message["content"] or (None if calls else "")
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
