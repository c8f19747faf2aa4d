"""A small model that has learned to call a tool and to answer with its result, and rollouts of it behind a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import openai
import torch

from oncurve.agent_programs.endpoint import AgentEndpoint, AgentRollout
from oncurve.engines.base import SampleKey
from oncurve.engines.native.session import torch_session
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.models.policy import Policy
from oncurve.recipe.schema.model import TinyModel
from oncurve.recipe.schema.sections import Sampling
from oncurve.records import Prompt
from oncurve.serve.server import EngineThread, ServedModel

PRINTABLE = "".join(map(chr, range(32, 127))) + "\n"
TEMPLATE = (
    "{% if tools %}T{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}"
    "{% for m in messages %}{{ m.role[0] }} {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>{% endfor %}"
    "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
QUESTION: Any = {"role": "user", "content": "1+2?"}
RESULT = {"role": "tool", "tool_call_id": "x", "content": "3"}


@lru_cache(maxsize=1)
def taught_policy() -> Policy:
    """Calls `add` if it is asked with the tool, answers "3." to its result, and writes other things to other chats."""
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return teach([((QUESTION,), CALL), ((QUESTION, called, RESULT), "3.")], ADD)


def teach(chats: Sequence[tuple[tuple[Any, ...], str]], tool: Any) -> Policy:
    """A small model that has learned these replies to these chats with a tool."""
    tokenizer = build_tokenizer(PRINTABLE)
    shape = TinyModel(layers=2, width=48, heads=2, kv_heads=1, head_size=24, mlp_width=96, context=512)
    policy = Policy(build_model(shape, tokenizer, 0), tokenizer)
    tokenizer.chat_template = TEMPLATE
    groups = [
        PrefixGroup(policy.encode(Prompt("p", messages=chat), [tool]), (policy.encode_completion(reply),), (i,))
        for i, (chat, reply) in enumerate(chats)
    ]
    optimiser = torch.optim.AdamW(policy.model.parameters(), lr=5e-3)
    for _ in range(200):
        loss = -policy.pack_logps(build_pack(groups, policy.device))[0].mean()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        if loss < 0.01:
            break
    return policy


@dataclass(frozen=True)
class Agents:
    """An endpoint without processes: the tests are the agents."""

    endpoint: AgentEndpoint
    served: ServedModel
    sampling: Sampling

    def rollout(self, sample: int = 0, **sampling: Any) -> AgentRollout:
        settings = self.sampling.model_copy(update=sampling)
        rollout = AgentRollout(Prompt("p", text="p"), sample, settings, SampleKey(0, 1), self.served)
        self.endpoint.add(rollout)
        return rollout

    def url(self, rollout: AgentRollout) -> str:
        return f"{self.endpoint.address}/{rollout.name}/v1"

    def client(self, rollout: AgentRollout, key: str | None = None) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url(rollout), api_key=key or rollout.api_key, max_retries=0, timeout=300)


@contextmanager
def agents(**sampling: Any) -> Iterator[Agents]:
    policy = taught_policy()
    engine = EngineThread(torch_session(policy, 4, 200))
    endpoint = AgentEndpoint(0)
    try:
        settings = Sampling(max_new_tokens=200, temperature=0.0).model_copy(update=sampling)
        yield Agents(endpoint, ServedModel("policy", policy, engine), settings)
    finally:
        endpoint.close()
        engine.close()


def run_tool(message: Any) -> dict[str, Any]:
    """The result of the message's only call, as the message that an agent sends next."""
    (call,) = message.tool_calls
    arguments = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": str(arguments["a"] + arguments["b"])}
