"""Checks that a model can read prompts and has positions for them and their completions.

A token has at least one byte, so only texts with more bytes than the model has positions are tokenised. In addition, one chat
is tokenised for each order of roles, because a chat template may refuse a role. A model that can't know its tools is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from oncurve.errors import ModelError
from oncurve.models.chat_template import apply_chat_template, encode_example, with_system_prompt
from oncurve.models.loading.load import CHAT_TEMPLATE
from oncurve.models.policy import Policy
from oncurve.records import Example, Prompt

TEMPLATE_BYTES = 1024
"""More than any chat template adds to a prompt, besides the system prompt."""


class _ToolSet(NamedTuple):
    """The tools of some prompts. ``has_reset``: their environment begins with a text of its own, which may describe them."""

    names: tuple[str, ...]
    where: str
    has_reset: bool


def _not_in(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """The names that do not occur in a text as words."""
    return tuple(name for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text))


class PromptChecker:
    """Checks texts for one policy, and remembers the orders of roles that its chat template accepted."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._accepted: set[tuple[str, ...] | None] = set()
        self._unnamed: dict[_ToolSet, tuple[str, ...]] = {}
        """The tools of each set that no text has named so far."""
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
        self._note_tools(prompt, prompt.tools, prompt.shown, "task")

    def check_example(self, example: Example) -> None:
        if self.must_encode(example.prompt, example.prompt.shown + example.completion, 1):
            new_tokens = len(encode_example(self.policy, example)[0])
            self._check_length(example.prompt, new_tokens, "a demonstration", example.tools)
        text = f"{example.prompt.shown}\n{example.completion}"
        self._note_tools(example.prompt, example.tools or example.prompt.tools, text, "demonstrations")

    def _note_tools(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], text: str, where: str) -> None:
        """Notes whether the template shows the tools, and which of them the text names. The built-in template leaves them out
        by design."""
        names = tuple(sorted({str(tool.get("function", tool).get("name")) for tool in tools}))
        if self._shows_tools or not names or prompt.messages is None:
            return
        has_reset = getattr(prompt.environment, "factory", None) is not None
        tool_set = _ToolSet(names, where, has_reset)
        if tool_set not in self._unnamed:
            written = self._written_without_tools(prompt, tools, where)
            if written is None:
                self._shows_tools = True
                return
            self._unnamed[tool_set] = _not_in(written, names)
        self._unnamed[tool_set] = _not_in(text, self._unnamed[tool_set])

    def _written_without_tools(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]], where: str) -> str | None:
        """The prompt as the template writes it without tools; None if the template shows them."""
        messages = with_system_prompt(self.policy, prompt.messages or ())
        given = {**self.policy.template_options, "tools": [dict(tool) for tool in tools]}  # as `Policy.encode` gives them
        options = {"add_generation_prompt": True, "tokenize": False}
        shown = str(apply_chat_template(self.policy.tokenizer, messages, where, **options, **given))
        try:
            plain = str(apply_chat_template(self.policy.tokenizer, messages, where, **options, **given | {"tools": None}))
        except ModelError:  # a template that needs tools reads them
            return None
        return plain if plain == shown else None

    def check_tools(self, *, has_demonstrations: bool) -> str | None:
        """Call it after all prompts. Many templates ignore tools without an error: such a model can call only the tools that
        it learns of elsewhere. Raises ModelError if it certainly learns of none: no prompt names any, no environment's `reset`
        may describe them, and no demonstrations may teach them. Otherwise returns a warning of tools that no prompt names."""
        if self._shows_tools:
            return None
        because = "the model's chat template does not show tools to the model"
        for tool_set, unnamed in self._unnamed.items():
            if len(unnamed) == len(tool_set.names) and not tool_set.has_reset and not has_demonstrations:
                raise ModelError(
                    tool_set.where,
                    f"tools that the model never sees: {', '.join(unnamed)}",
                    because=f"{because}, and no prompt names one",
                    fix="use a model whose template does (Qwen 2.5 or Qwen 3), describe the tools in model.system_prompt, or "
                    "set model.tiny.chat = true for the built-in model",
                )
        hidden = sorted({name for unnamed in self._unnamed.values() for name in unnamed})
        if not hidden:
            return None
        return (
            f"{because}, and no prompt names {', '.join(hidden)}: the model calls only tools that it learns of elsewhere, "
            "such as in the text of an environment's `reset` or in demonstrations. Describe them in model.system_prompt, or "
            "use a model whose template shows them (Qwen 2.5 or Qwen 3)"
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
