"""The endpoint of agents: OpenAI's client and curl, tools, streams, sequences and forks, and what is recorded of each call."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest
import torch

from oncurve.agent_programs.agent_engine import read_outcome
from oncurve.agent_programs.agent_processes import AgentResult
from oncurve.agent_programs.conversation import RolloutSequence, build_group, rollout_json, rollout_of, to_completion
from oncurve.agent_programs.endpoint import AgentRollout
from oncurve.engines.native.session import SampledToken
from oncurve.models.packing import PrefixGroup, build_pack
from oncurve.records import AgentProgram, Completion, Outcome, Prompt, ToolCall
from tests.agent_programs.taught import ADD, CALL, QUESTION, TEMPLATE, Agents, agents, run_tool, taught_policy
from tests.runs.samples import same


@pytest.fixture(scope="module")
def served() -> Iterator[Agents]:
    with agents() as running:
        yield running


def completion_of(rollout: AgentRollout) -> Completion:
    return to_completion(rollout.end(), "", Outcome())


def assert_log_probs_are_the_models_own(completion: Completion, temperature: float = 1.0) -> None:
    """Of the tokens that the policy wrote, in each sequence's own context."""
    policy = taught_policy()
    group = PrefixGroup(np.zeros(1, np.int64), (completion.token_ids,), (0,), (completion.contexts,))
    with torch.no_grad():
        logps = policy.pack_logps(build_pack([group], policy.device), temperature)[0].numpy()
    written = completion.loss_mask
    np.testing.assert_allclose(completion.logps[written], logps[written], atol=1e-4)
    assert not completion.logps[~written].any()


def solve(served: Agents, rollout: AgentRollout, *, stream: bool = False) -> list[Any]:
    """An agent with a tool: asks, runs the tool, and asks again. Returns its messages."""
    client, messages = served.client(rollout), list[Any]([QUESTION])
    for _ in range(2):
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=[ADD]) as events:
                message: Any = events.get_final_completion().choices[0].message
            message = {key: value for key, value in message.model_dump().items() if key in ("role", "content", "tool_calls")}
            for call in message["tool_calls"] or ():
                call["function"].pop("parsed_arguments", None)
                call.pop("index", None)
            messages.append(message)
            if message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"})
        else:
            choice = client.chat.completions.create(model="policy", messages=messages, tools=[ADD]).choices[0]
            messages.append(choice.message)
            if choice.message.tool_calls:
                assert choice.finish_reason == "tool_calls"
                messages.append(run_tool(choice.message))
    return messages


def test_calls_that_extend_each_other_are_one_sequence_with_the_tokens_that_were_sampled(served: Agents) -> None:
    rollout, policy = served.rollout(), taught_policy()
    messages = solve(served, rollout)
    assert [m.content if hasattr(m, "content") else m["content"] for m in messages] == ["1+2?", None, "3", "3."]
    completion = completion_of(rollout)
    (first, context), *rest = completion.contexts
    assert (first, rest) == (0, [])
    assert context.tolist() == policy.encode(Prompt("p", messages=(QUESTION,)), [ADD]).tolist()
    # The complete conversation, encoded at once by transformers: the same tokens.
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    called: Any = {"role": "assistant", "content": "", "tool_calls": [call]}
    chat = (QUESTION, called, {"role": "tool", "content": "3"})
    before = policy.encode(Prompt("p", messages=chat), [ADD])
    expected = [*before[len(context) :].tolist(), *policy.encode_completion("3.").tolist()]
    assert completion.token_ids.tolist() == expected
    written = policy.tokenizer.decode(completion.token_ids[completion.loss_mask].tolist())
    assert written == f"{CALL}{policy.tokenizer.eos_token}3.{policy.tokenizer.eos_token}"
    assert_log_probs_are_the_models_own(completion)
    assert completion.episode is not None
    turns = completion.episode.turns
    assert [(o.message or {}).get("content") for _, _, o in turns] == [None, "3."]
    assert [o.reply and o.reply[0]["content"] for _, _, o in turns] == ["3", None]  # type: ignore[index]
    assert completion.episode.calls == [ToolCall("add", {"a": 1, "b": 2}, "3", seconds=None)]


def test_tool_calls_are_recorded_with_their_results_wherever_the_agent_sends_these(served: Agents) -> None:
    """With more messages after them, in another sequence, or not at all."""
    rollout = served.rollout()
    client, calls = served.client(rollout), []

    def ask(*messages: Any) -> Any:
        return (
            client.chat.completions.create(model="policy", messages=list(messages), tools=[ADD], max_tokens=80)
            .choices[0]
            .message
        )

    def recorded() -> list[list[str]]:
        episode = to_completion(rollout.sequences, "", Outcome()).episode
        assert episode is not None
        assert len(episode.messages) >= len(episode.turns)
        return [[call.result for call in observation.calls] for _, _, observation in episode.turns]

    called = ask(QUESTION)
    calls.append(recorded())
    (sequence,) = rollout.sequences
    sequence.is_busy = True  # another call continues it: this one begins a new sequence
    ask(QUESTION, called, run_tool(called), {"role": "user", "content": "well?"})
    calls.append(recorded())
    assert len(rollout.sequences) == 2
    assert [answers[0] for answers in calls] == [[""], ["3"]]


@pytest.mark.parametrize("branches", [False, True])
@pytest.mark.parametrize(
    ("call_ids", "result_ids"),
    [
        (("a", "b"), ("b", "a")),  # the client has ids of its own
        (None, ("a", "b")),  # only its results have
        (("a", "b"), (None, None)),  # its results have none
    ],
)
def test_results_are_recorded_if_the_client_writes_other_ids(
    served: Agents, branches: bool, call_ids: Any, result_ids: Any
) -> None:
    """By the client's own ids, else in the order of the results."""
    rollout = served.rollout()
    served.client(rollout).chat.completions.create(model="policy", messages=[QUESTION], tools=[ADD], max_tokens=80)
    (sequence,) = rollout.sequences
    (call,) = sequence.replies[0]["tool_calls"]
    sequence.replies[0] = {**sequence.replies[0], "tool_calls": [{**call, "id": "first"}, {**call, "id": "second"}]}
    assert sequence.messages is not None
    sequence.messages = (*sequence.messages[:-1], {**sequence.messages[-1], "tool_calls": sequence.replies[0]["tool_calls"]})
    sent = [{**call, "id": name} for name in call_ids or ("first", "second")]
    results = [
        {"role": "tool", "content": text, **({} if name is None else {"tool_call_id": name})}
        for name, text in zip(result_ids, ("one", "two"), strict=True)
    ]
    sequence.is_busy = branches  # another call continues it, so this one begins a new sequence
    messages: list[Any] = [QUESTION, {"role": "assistant", "content": None, "tool_calls": sent}, *results]
    served.client(rollout).chat.completions.create(model="policy", messages=messages, tools=[ADD], max_tokens=4)
    assert len(rollout.sequences) == 1 + branches
    episode = completion_of(rollout).episode
    assert episode is not None
    expected = ["two", "one"] if result_ids == ("b", "a") else ["one", "two"]
    assert [call.result for call in episode.turns[0][2].calls] == expected


def test_a_stream_gives_the_same_calls_and_the_same_record(served: Agents) -> None:
    plain, streamed = served.rollout(), served.rollout()
    solve(served, plain)
    messages = solve(served, streamed, stream=True)
    assert messages[-1]["content"] == "3."
    assert same(completion_of(plain), completion_of(streamed))


def test_a_changed_history_begins_a_new_sequence_of_the_same_completion(served: Agents) -> None:
    """As an agent does that summarises what it has, or asks a second model in between."""
    rollout = served.rollout(temperature=1.0, max_new_tokens=24)
    client = served.client(rollout)

    def ask(*contents: str) -> str:
        messages: Any = [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]
        reply = client.chat.completions.create(model="policy", messages=messages, max_tokens=3)
        return str(reply.choices[0].message.content)

    first = ask("one")
    second = ask("one", first, "two")  # extends the first
    ask("one", "something else", "two")  # does not
    ask("one", first, "two", second, "three")  # extends the second, which has no room left: its tokens are the new context
    completion = completion_of(rollout)
    lengths = [len(ids) for _, ids in completion.contexts]
    assert len(lengths) == 3
    assert completion.loss_mask.sum() == 3 * 4
    assert_log_probs_are_the_models_own(completion)
    first_ids, second_ids = completion.contexts[0][1].tolist(), completion.contexts[2][1].tolist()
    recorded = [*first_ids, *completion.token_ids[: completion.contexts[1][0]].tolist()]
    assert second_ids[: len(recorded)] == recorded


def test_calls_that_branch_off_or_run_in_parallel_keep_the_sampled_tokens(served: Agents) -> None:
    """Tokens that the template would not write: a reply is sampled token by token, and its text is encoded otherwise."""
    rollout = served.rollout(temperature=1.0)
    client, policy = served.client(rollout), taught_policy()

    def ask(*messages: Any) -> Any:
        reply = client.chat.completions.create(model="policy", messages=list(messages), max_tokens=6).choices[0].message
        return reply.model_dump(include={"role", "content"})

    first = ask(QUESTION)
    second = ask(QUESTION, first, {"role": "user", "content": "two"})
    (sequence,) = rollout.sequences
    end = sequence.turns[0][1]
    sequence.token_ids[end - 2] = policy.eos_ids[0]  # a token that its text does not show
    recorded = sequence.ids_after(0).tolist()
    ask(QUESTION, first, {"role": "user", "content": "another two"})  # branches off the first turn
    sequence.is_busy = True
    ask(QUESTION, first, {"role": "user", "content": "two"}, second, {"role": "user", "content": "three"})
    assert [len(s.turns) for s in rollout.sequences] == [2, 1, 1]
    branch, parallel = rollout.sequences[1:]
    following = policy.tokenizer.encode("u another two\na ", add_special_tokens=False)
    assert branch.context_ids.tolist()[: len(recorded)] == recorded
    assert branch.context_ids.tolist()[-len(following) :] == following
    both = sequence.ids_after(1).tolist()
    assert parallel.context_ids.tolist()[: len(both)] == both
    assert branch.prompt_lengths[0] == parallel.prompt_lengths[0] == sequence.prompt_lengths[0]
    assert [len(s.prompt_lengths) for s in (branch, parallel)] == [2, 3]


def test_text_calls_branch_off_an_earlier_turn_with_its_tokens(served: Agents) -> None:
    rollout = served.rollout(temperature=1.0)
    client, policy = served.client(rollout), taught_policy()
    first = client.completions.create(model="policy", prompt="12+34=", max_tokens=4).choices[0].text
    client.completions.create(model="policy", prompt=f"12+34={first} and", max_tokens=4)
    (sequence,) = rollout.sequences
    sequence.token_ids[sequence.turns[0][1] - 2] = policy.eos_ids[0]
    client.completions.create(model="policy", prompt=f"12+34={first} or", max_tokens=4)
    recorded, branch = sequence.ids_after(0).tolist(), rollout.sequences[1]
    assert branch.context_ids.tolist() == [*recorded, *policy.tokenizer.encode(" or", add_special_tokens=False)]


def test_at_another_temperature_log_probs_are_those_that_the_learner_computes(served: Agents) -> None:
    rollout = served.rollout(temperature=0.7)
    client = served.client(rollout)
    reply = client.chat.completions.create(
        model="policy",
        messages=[QUESTION],
        max_tokens=8,
        temperature=0.1,
        logprobs=True,
        top_logprobs=2,
    )
    completion = completion_of(rollout)
    assert_log_probs_are_the_models_own(completion, temperature=0.7)
    assert reply.choices[0].logprobs is not None
    shown = [token.logprob for token in reply.choices[0].logprobs.content or ()]
    np.testing.assert_allclose(shown, completion.raw_logps[: len(shown)], atol=1e-6)
    assert rollout.ignored == {"temperature 0.1"}


def test_random_numbers_depend_on_the_conversation_and_never_on_the_order_of_calls(served: Agents) -> None:
    def texts(order: list[str], *, together: bool) -> dict[str, str]:
        rollout, replies = served.rollout(temperature=1.0), dict[str, str]()

        def ask(content: str) -> None:
            message: Any = {"role": "user", "content": content}
            reply = served.client(rollout).chat.completions.create(model="policy", messages=[message], max_tokens=12)
            replies[content] = str(reply.choices[0].message.content)

        threads = [threading.Thread(target=ask, args=(content,)) for content in order]
        for thread in threads:
            thread.start()
            if not together:
                thread.join()
        for thread in threads:
            thread.join()
        return replies

    names = ["a", "b", "c"]
    alone = texts(names, together=False)
    assert alone == texts(names[::-1], together=False) == texts(names, together=True)
    assert len(set(alone.values())) == 3


def test_a_repeated_call_is_another_sample(served: Agents) -> None:
    rollout = served.rollout(temperature=1.0)
    client = served.client(rollout)
    replies = [
        client.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=12).choices[0].message.content
        for _ in range(2)
    ]
    assert replies[0] != replies[1]
    other = served.client(served.rollout(sample=1, temperature=1.0))
    assert (
        other.chat.completions.create(model="policy", messages=[QUESTION], max_tokens=12).choices[0].message.content
        not in replies
    )


def test_sequences_are_in_the_same_order_whichever_began_or_ended_first() -> None:
    sequences = []
    for token in (5, 4):
        sequence = RolloutSequence(np.array([1, 2]), (), "", "")
        sequence.add_turn([], [SampledToken(0, 0, token, 0.0, (), "end")], 10)
        sequence.replies.append({"role": "assistant", "content": ""})
        sequence.said.append(())
        sequences.append(sequence)
    one, other = (to_completion(order, "", Outcome()).token_ids.tolist() for order in (sequences, sequences[::-1]))
    assert one == other == [4, 5]


def test_a_rollout_of_parallel_calls_is_the_same_whenever_they_arrive(served: Agents) -> None:
    """The first of two parallel calls has ended before the second arrives, or it has not."""

    def completion(order: list[str]) -> Completion:
        rollout = served.rollout(temperature=1.0)
        for content in order:
            message: Any = {"role": "user", "content": content}
            served.client(rollout).chat.completions.create(model="policy", messages=[message], max_tokens=12)
        return completion_of(rollout)

    one, other = completion(["a", "b", "longer"]), completion(["b", "longer", "a"])
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert [len(ids) for _, ids in one.contexts] == [len(ids) for _, ids in other.contexts]


def test_a_group_shares_the_context_that_most_rollouts_have(served: Agents) -> None:
    """Though other sequences of a rollout sort before it."""
    completions = []
    for sample, other in enumerate(("x", "y")):
        rollout = served.rollout(sample=sample, temperature=1.0)
        for content in ("the question", other):
            message: Any = {"role": "user", "content": content}
            served.client(rollout).chat.completions.create(model="policy", messages=[message], max_tokens=5)
        completions.append(completion_of(rollout))
    group = build_group(Prompt("p", text="p"), completions)
    policy = taught_policy()
    assert (
        group.prompt_ids.tolist()
        == policy.encode(Prompt("p", messages=({"role": "user", "content": "the question"},))).tolist()
    )
    for completion, before in zip(group.completions, completions, strict=True):
        (at, context), (start, _) = completion.contexts[0], before.contexts[1]
        assert completion.token_ids.tolist() == [*before.token_ids[start:].tolist(), *before.token_ids[:start].tolist()]
        assert context.tolist() == before.contexts[0][1].tolist()
        assert at == len(before.token_ids) - start
        assert completion.episode is not None
        assert before.episode is not None
        assert [o for _, _, o in completion.episode.turns] == [o for _, _, o in before.episode.turns][::-1]
        assert [(a, b) for a, b, _ in completion.episode.turns] == [(0, at), (at, len(completion.token_ids))]
        assert_log_probs_are_the_models_own(replace(completion, contexts=((0, group.prompt_ids), *completion.contexts)))


def test_an_agents_calls_go_past_a_proxy(served: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = served.rollout()
    for before, after in {"": "127.0.0.1", "example.com": "example.com,127.0.0.1", "*": "*"}.items():
        monkeypatch.setenv("NO_PROXY", before)
        environment = served.endpoint.add(rollout)
        assert environment["no_proxy"] == environment["NO_PROXY"] == after
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name, value in served.endpoint.add(rollout).items():
        monkeypatch.setenv(name, value)
    assert openai.OpenAI(max_retries=0).models.list().data[0].id == "policy"


def test_arguments_that_no_template_can_write_stay_a_text(served: Agents) -> None:
    function = {"name": "add", "arguments": "[" * 100_000}
    called: Any = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "type": "function", "function": function}]}
    rollout = served.rollout()
    with pytest.raises(openai.BadRequestError, match="positions"):
        served.client(rollout).chat.completions.create(model="policy", messages=[QUESTION, called, QUESTION])


@pytest.mark.parametrize(
    ("line", "reward", "failure"),
    [
        ('{"reward": true}', 1.0, None),
        ('{"reward": 0.5, "more": [1]}', 0.5, None),
        ("[1]", 0.25, None),
        ("[" * 60_000, 0.25, None),
        (f'{{"reward": 1{"0" * 400}}}', None, "not a finite number"),
        ('{"reward": NaN}', None, "not a finite number"),
        ('{"reward": -Infinity}', None, "not a finite number"),
        ('{"reward": "1"}', None, "not a finite number"),
        ('{"reward": [1]}', None, "not a finite number"),
    ],
)
def test_what_an_agent_reports(served: Agents, line: str, reward: float | None, failure: str | None) -> None:
    rollout = served.rollout()
    rollout.reward = 0.25
    outcome = read_outcome(AgentResult(0, f"noise\n{line}\n", "", False), rollout, True, 1.0)
    assert outcome.reward == reward
    assert (outcome.failure is None) == (failure is None)
    assert (failure or "") in (outcome.failure or "")


def test_text_completions_continue_by_their_text_or_their_tokens(served: Agents) -> None:
    rollout = served.rollout(temperature=1.0)
    client = served.client(rollout)
    first = client.completions.create(model="policy", prompt="12+34=", max_tokens=4, logprobs=0).choices[0]
    client.completions.create(model="policy", prompt=f"12+34={first.text} and", max_tokens=4)
    assert [len(sequence.turns) for sequence in rollout.sequences] == [2]
    ids = rollout.sequences[0].ids_after(1).tolist()
    client.completions.create(model="policy", prompt=[*ids, 40], max_tokens=4)
    client.completions.create(model="policy", prompt="13", max_tokens=4)
    assert [len(sequence.turns) for sequence in rollout.sequences] == [3, 1]
    assert_log_probs_are_the_models_own(completion_of(rollout))


def test_curl_calls_streams_and_reports_a_reward(served: Agents) -> None:
    rollout = served.rollout()

    def curl(path: str, body: dict[str, Any], *options: str) -> str:
        command = ["curl", "-sS", *options, f"{served.url(rollout)}/{path}", "-H", "Content-Type: application/json"]
        command += ["-H", f"Authorization: Bearer {rollout.api_key}", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    body = {"model": "policy", "messages": [QUESTION], "tools": [ADD]}
    message = json.loads(curl("chat/completions", body))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
    events = curl("chat/completions", {**body, "messages": [QUESTION, message, result], "stream": True}, "-N").split("\n\n")
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-2]]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "3."
    assert chunks[-1]["finish_reason"] == "stop"
    assert json.loads(curl("reward", {"reward": 0.5})) == {"reward": 0.5}
    assert rollout.reward == 0.5
    assert len(rollout.sequences) == 1


def test_refused_calls_say_why_and_are_remembered(served: Agents) -> None:
    rollout = served.rollout()
    client = served.client(rollout)
    chat: dict[str, Any] = {"messages": [QUESTION]}
    with pytest.raises(openai.NotFoundError, match=r'no model .gpt-4o. here.*task\.model_name = "gpt-4o"'):
        client.chat.completions.create(model="gpt-4o", **chat)
    assert "gpt-4o" in (rollout.refusal or "")
    with pytest.raises(openai.NotFoundError, match=r"no Responses API here: use /v1/chat/completions.*set_default_openai_api"):
        client.responses.create(model="policy", input="1+2?")
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="json_schema: the model has to be trained on unconstrained samples"):
        client.chat.completions.create(model="policy", response_format=schema, **chat)
    with pytest.raises(openai.BadRequestError, match="one completion for each call"):
        client.chat.completions.create(model="policy", n=2, **chat)
    with pytest.raises(openai.BadRequestError, match="context has 512 positions"):
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(openai.AuthenticationError):
        served.client(rollout, key=served.rollout().api_key).chat.completions.create(model="policy", **chat)
    with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
        client.chat.completions.create(model="policy", frequency_penalty=1.0, **chat)
    with pytest.raises(openai.BadRequestError, match="tool_choice: the model has to be trained on unconstrained samples"):
        client.chat.completions.create(model="policy", tools=[ADD], tool_choice="required", **chat)
    served.endpoint.remove(rollout)
    with pytest.raises(openai.NotFoundError, match="it has ended"):
        client.chat.completions.create(model="policy", **chat)
    assert not rollout.sequences


def test_a_turn_that_the_context_cuts_is_truncated_and_one_that_its_call_cuts_is_not(served: Agents) -> None:
    """On a GPU the context can be shorter than the model's positions."""
    stops = []
    for limit in (4, 40):
        rollout = served.rollout(temperature=1.0, min_new_tokens=40)
        served.client(rollout).completions.create(model="policy", prompt="1" * 500, max_tokens=limit)
        completion = completion_of(rollout)
        stops.append((completion.length, completion.stop))
    assert stops == [(4, "end"), (512 - 500, "length")]


def test_what_a_call_asks_for_is_done_refused_or_noted(served: Agents) -> None:
    rollout = served.rollout()
    client = served.client(rollout)
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="policy", prompt="12+34=", max_tokens=0, echo=True, logprobs=0)
    assert not rollout.sequences
    text = client.completions.create(
        model="policy", prompt="12+34=", max_tokens=2, logprobs=0, seed=3, extra_body={"return_tokens_as_token_ids": True}
    )
    logprobs: Any = text.choices[0].logprobs
    assert logprobs.tokens == [f"token_id:{token_id}" for token_id in logprobs.token_ids]
    client.chat.completions.create(model="policy", messages=[QUESTION], response_format={"type": "json_object"}, max_tokens=2)
    assert rollout.ignored == {"seed", "response_format json_object"}


def test_a_rollout_is_stored_and_read_bit_for_bit_and_shares_its_groups_prompt(served: Agents) -> None:
    solver, other = served.rollout(), served.rollout(temperature=1.0)
    solve(served, solver)
    served.client(other).completions.create(model="policy", prompt="hm", max_tokens=4)
    completions = [completion_of(rollout) for rollout in (solver, other)]
    assert all(same(rollout_of(rollout_json(completion)), completion) for completion in completions)
    group = build_group(Prompt("p", text="p"), [completions[0], *completions])
    assert group.prompt_ids.tolist() == completions[0].contexts[0][1].tolist()
    assert [len(completion.contexts) for completion in group.completions] == [0, 0, 1]


REWRITING = TEMPLATE.replace(
    "{{ m.content or '' }}", "{{ '' if m.role == 'assistant' and not loop.last else m.content or '' }}"
)
"""Drops what earlier turns said."""


@pytest.mark.parametrize("history", ["tokens", "template"])
def test_a_template_that_rewrites_history_is_followed_if_the_task_says_so(served: Agents, history: Any) -> None:
    rollout, tokenizer = served.rollout(temperature=1.0), taught_policy().tokenizer
    rollout.prompt = Prompt("p", text="p", agent=AgentProgram("agent", history=history))
    tokenizer.chat_template = REWRITING
    try:
        messages: list[Any] = [QUESTION]
        for _ in range(3):
            reply = served.client(rollout).chat.completions.create(model="policy", messages=messages, max_tokens=6)
            messages += [reply.choices[0].message.model_dump(include={"role", "content"}), {"role": "user", "content": "go on"}]
        contexts = [ids.tolist() for _, ids in completion_of(rollout).contexts]
        chats = [messages[:1], messages[:3], messages[:5]]
        written = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    finally:
        tokenizer.chat_template = TEMPLATE
    assert contexts == (written if history == "template" else written[:1])
    assert ("rewrites what was sampled" in (rollout.rewriting or "")) == (history == "tokens")
    assert_log_probs_are_the_models_own(completion_of(rollout))
