"""Conversations keep their KV cache, and long prompts are prefilled between decode steps: texts stay the same."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

from oncurve.engines.native.torch_runner import PROMPT_PART
from tests.serve.serving import MODEL, Endpoint, chatting_policy, endpoint

SYSTEM = {"role": "system", "content": "add the numbers and say why " * 10}


def kept_tokens(served: Endpoint) -> int:
    with urllib.request.urlopen(f"{served.address}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith("oncurve_prompt_tokens_kept_total{")]
    return int(value)


def reply(client: openai.OpenAI, messages: list[Any]) -> str:
    response = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=12, seed=len(messages))
    return response.choices[0].message.content or ""


def test_a_conversation_keeps_its_kv_cache_and_has_the_texts_that_it_has_without() -> None:
    policy, messages, prompts = chatting_policy(), [SYSTEM], []
    with endpoint(policy) as served, served.client() as client:
        for question in ("what is 1+2", "and 3+4", "why"):
            messages.append({"role": "user", "content": question})
            text = reply(client, messages)
            with endpoint(policy) as fresh, fresh.client() as other:
                assert reply(other, messages) == text
                assert kept_tokens(fresh) == 0
            prompts.append(len(policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]))
            messages.append({"role": "assistant", "content": text})
        assert kept_tokens(served) == sum(length // PROMPT_PART * PROMPT_PART - 1 for length in prompts[:-1])


def test_long_and_short_prompts_at_once_have_the_texts_that_they_have_alone() -> None:
    policy = chatting_policy()
    prompts = ["1+2=", "abc" * 120, "x", "abc" * 100 + "d", "0123456789" * 30]

    def ask(served: Endpoint, prompt: str) -> list[str]:
        with served.client() as client:
            response = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, seed=1, n=2)
        return [choice.text for choice in response.choices]

    alone = []
    for prompt in prompts:
        with endpoint(policy) as served:
            alone.append(ask(served, prompt))
    with endpoint(policy) as served, ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(lambda prompt: ask(served, prompt), prompts * 2)) == alone * 2
        assert kept_tokens(served) > 0
