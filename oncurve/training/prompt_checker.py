"""Checks that a model can read prompts and has positions for them and their completions.

A token has at least one byte, so only texts with more bytes than the model has positions are tokenised. In addition, one chat
is tokenised for each order of roles, because a chat template may refuse a role. Tools that the prompt never shows are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from oncurve.errors import ModelError
from oncurve.models.chat_template import apply_chat_template, encode_example, with_system_prompt
from oncurve.models.loading.load import CHAT_TEMPLATE
from oncurve.models.policy import Policy
from oncurve.records import Example, Prompt

TEMPLATE_BYTES = 1024
"""More than any chat template adds to a prompt, besides the system prompt."""


class PromptChecker:
    """Checks texts for one policy, and remembers the orders of roles that its chat template accepted."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accepted: set[tuple[str, ...] | None] = set()
        self._known_tools: set[str] = set()
        self._shows_tools = policy.tokenizer.chat_template == CHAT_TEMPLATE

    def has_new_roles(self, prompt: Prompt) -> bool:
        """Whether no prompt with the same order of roles was checked before."""
        roles = None if prompt.messages is None else tuple(message["role"] for message in prompt.messages)
        is_new = roles not in self._accepted
        self._accepted.add(roles)
        return is_new

    def must_encode(self, prompt: Prompt, text: str, new_tokens: int) -> bool:
        """Whether the text must be tokenised to know that the model can read it and has room for it."""
        added = TEMPLATE_BYTES + len((self.policy.system_prompt or "").encode())
        may_be_long = len(text.encode(errors="replace")) + added + new_tokens > self.policy.max_positions
        return self.has_new_roles(prompt) | may_be_long

    def check_prompt(self, prompt: Prompt, new_tokens: int) -> None:
        if prompt.agent is not None:  # what the model is given is up to the agent
            return
        if self.policy.system_prompt and prompt.messages is None:
            raise ModelError(
                "model.system_prompt",
                self.policy.system_prompt,
                because=f"the prompt {prompt.id} is plain text, which has no system message: this would have no effect",
                fix="set task.chat = true, give prompts as messages, or remove it",
            )
        if self.must_encode(prompt, prompt.shown, new_tokens):
            self._check_length(prompt, new_tokens, "max_new_tokens")
        self._check_tools(prompt, prompt.tools, "task")

    def check_example(self, example: Example) -> None:
        if self.must_encode(example.prompt, example.prompt.shown + example.completion, 1):
            new_tokens = len(encode_example(self.policy, example)[0])
            self._check_length(example.prompt, new_tokens, "a demonstration", example.tools)
        self._check_tools(example.prompt, example.tools or example.prompt.tools, example.prompt.id)

    def _check_tools(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], where: str) -> None:
        """Many templates ignore tools without an error. Such a model can call only the tools that a message names. The built-in
        template leaves them out by design."""
        names = {str(tool.get("function", tool).get("name")) for tool in tools} - self._known_tools
        if self._shows_tools or not names or prompt.messages is None:
            return
        self._known_tools |= names
        messages = with_system_prompt(self.policy, prompt.messages)
        options = {"add_generation_prompt": True, "tokenize": False, **self.policy.template_options}
        without = str(apply_chat_template(self.policy.tokenizer, messages, where, **options))
        given = [dict(tool) for tool in tools]
        self._shows_tools = apply_chat_template(self.policy.tokenizer, messages, where, tools=given, **options) != without
        hidden = sorted(name for name in names if name not in without)
        if hidden and not self._shows_tools:
            raise ModelError(
                where,
                f"tools that the model never sees: {', '.join(hidden)}",
                because="the model's chat template does not show tools to the model",
                fix="use a model whose template does (Qwen 2.5 or Qwen 3), describe the tools in model.system_prompt, or set "
                "model.tiny.chat = true for the built-in model",
            )

    def _check_length(self, prompt: Prompt, new_tokens: int, purpose: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        length = len(self.policy.encode(prompt, tools))
        if length + new_tokens > self.policy.max_positions:
            raise ModelError(
                prompt.id,
                f"a prompt of {length} tokens with {new_tokens} for {purpose}",
                because=f"the model has {self.policy.max_positions} positions",
                fix="shorten or drop the prompt, lower sampling.max_new_tokens, or use a model with a longer context",
            )
