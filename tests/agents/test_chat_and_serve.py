"""`chat --tools` and `serve --tools` run the tools that a model was trained with."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.cli.app import main
from oncurve.errors import DataError
from oncurve.recipe.load import parse_recipe
from oncurve.runs.folder import RunFolder
from oncurve.terminal.chat import Chat, ChatSettings, converse
from oncurve.training.start import begin
from tests.agent_programs.taught import CALL, taught_policy
from tests.serve.serving import MODEL, Endpoint, endpoint

QUESTION = "1+2?"
ANSWER = [CALL, "→ add: 3", "3."]
SUMS = '''
class Sums:
    """Adds, and counts what it has added."""

    def reset(self, first: int, **columns):
        self.count = first

    def add(self, a: int, b: int) -> int:
        """
        Adds.

        Args:
            a: One number.
            b: Another.
        """
        self.count += 1
        return a + b
'''


def sums(**options: Any) -> ToolEnvironment:
    namespace: dict[str, Any] = {"__name__": "sums"}
    exec(SUMS, namespace)
    return ToolEnvironment([], namespace["Sums"], **options)


def chat(**options: Any) -> Chat:
    settings = {"environment": sums(), "columns": {"first": 0}, "max_new_tokens": 100, **options}
    return Chat(taught_policy().copy(), ChatSettings(**settings))


def test_a_chat_runs_the_calls_and_prints_their_results() -> None:
    talk, out = chat(), io.StringIO()
    assert talk.ask(QUESTION, out) == "3."
    assert out.getvalue().splitlines() == ANSWER
    assert talk.episode is not None
    policy = talk.policy
    text = f"{START.partition(CALL)[0]}{CALL}{policy.tokenizer.eos_token}\nt 3\na 3.{policy.tokenizer.eos_token}"
    assert talk.episode.token_ids == policy.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_a_conversation_keeps_its_instance_until_a_new_one() -> None:
    talk = chat()
    converse(talk, [QUESTION, QUESTION], io.StringIO(), live=True)
    first = talk.episode
    assert first is not None
    assert talk.policy.decode(np.asarray(first.token_ids)).count(f"u {QUESTION}") == 2
    converse(talk, ["/new", QUESTION], io.StringIO(), live=True)
    assert talk.episode is not first


def test_an_environment_that_fails_is_reported_and_the_chat_continues() -> None:
    class Broken:
        def reset(self) -> None:
            raise OSError("no connection")

    out = io.StringIO()
    converse(chat(environment=ToolEnvironment([], Broken), columns={}, max_new_tokens=3), [QUESTION, "x"], out, live=True)
    assert out.getvalue().count("reset: OSError: no connection") == 2


class FullStops:
    """The pure form: replies to every full stop, twice."""

    calls = (".",)

    def reply(self, prompt: object, turns: Sequence[str], dice: object) -> str | None:
        return f"<{len(turns)}>" if len(turns) < 5 else None


START = f"T addu {QUESTION}\na {CALL}<end>\nt 3\na "
"""What the taught model continues with `3.`"""


def test_the_pure_form_replies_in_the_middle_of_a_text() -> None:
    policy, out = taught_policy().copy(), io.StringIO()
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.chat_template = None
    talk = Chat(policy, ChatSettings(20, environment=FullStops()))
    talk.ask(START, out)
    assert out.getvalue().startswith("3.\n→ <1>\n")
    assert talk.episode is not None
    assert policy.decode(np.asarray(talk.episode.token_ids)).partition("\nt 3\na ")[2].startswith("3.<1>")


def test_the_pure_form_without_the_columns_that_it_reads() -> None:
    class Priced(FullStops):
        def reply(self, prompt: Any, turns: Sequence[str], dice: object) -> str | None:
            return str(prompt.columns["prices"])

    policy = taught_policy().copy()
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.chat_template = None
    with pytest.raises(DataError, match="chat: its environment failed: KeyError: 'prices'") as caught:
        Chat(policy, ChatSettings(20, environment=Priced())).ask(START, io.StringIO())
    assert "give them, such as --columns" in caught.value.fix
    out = io.StringIO()
    Chat(policy, ChatSettings(20, environment=Priced(), columns={"prices": 7})).ask(START, out)
    assert "→ 7\n" in out.getvalue()


@pytest.fixture(scope="module")
def served() -> Iterator[Endpoint]:
    with endpoint(taught_policy(), limit=200, environment=sums(max_turns=3)) as running:
        yield running


def ask(served: Endpoint, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": QUESTION}]
    settings = {"messages": messages, "temperature": 0, "extra_body": {"columns": {"first": 0}}, **options}
    return served.client().chat.completions.create(model=MODEL, **settings)


def test_a_served_model_answers_after_its_tools_have_run(served: Endpoint) -> None:
    response = ask(served, n=2, logprobs=True)
    for choice in response.choices:
        assert (choice.message.content, choice.finish_reason) == ("3.", "stop")
        called, result, answered = choice.messages
        assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "b": 2}
        assert result == {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "name": "add", "content": "3"}
        assert answered["content"] == "3."
        assert [entry.token for entry in choice.logprobs.content] == ["3", "."]
    policy = served.policy
    written = len(policy.encode_completion(CALL)) + len(policy.encode_completion("3."))
    assert response.usage.completion_tokens == 2 * written
    assert served.client().models.list().data[0].tools == ["add"]  # type: ignore[attr-defined]


def test_a_stream_gives_the_same(served: Endpoint) -> None:
    chunks = list(ask(served, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "3."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert [message["role"] for message in chunks[-2].choices[0].messages] == ["assistant", "tool", "assistant"]
    assert chunks[-1].usage.completion_tokens


def test_the_limit_is_for_all_turns_and_calls_that_did_not_run_are_returned(served: Endpoint) -> None:
    written = len(served.policy.encode_completion(CALL))
    assert ask(served, max_tokens=written + 3).choices[0].finish_reason == "length"
    with endpoint(taught_policy(), limit=200, environment=sums(max_turns=1)) as short:
        choice = ask(short).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "add"


def test_what_a_server_with_tools_refuses(served: Endpoint) -> None:
    tool: Any = {"type": "function", "function": {"name": "mine"}}
    for options, words in (
        ({"extra_body": {}}, "first missing"),
        ({"tools": [tool]}, "runs the model's own tools"),
        ({"max_tokens": 300}, "at most 200"),
        ({"response_format": {"type": "json_object"}}, "json_object: with it the model could not call its tools"),
        ({"parallel_tool_calls": False}, "runs all calls of a turn"),
        ({"tool_choice": "none"}, "tool_choice: this server runs the model's own tools"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            ask(served, **options)
    with pytest.raises(openai.BadRequestError, match="use /v1/chat/completions"):
        served.client().completions.create(model=MODEL, prompt="x", extra_body={"columns": {"first": 0}})
    with endpoint(taught_policy()) as plain, pytest.raises(openai.BadRequestError, match="no environment runs here"):
        ask(plain)


def test_an_environment_that_fails_is_a_server_error() -> None:
    class Broken:
        def reset(self) -> None:
            raise OSError("no connection")

    with endpoint(taught_policy(), limit=50, environment=ToolEnvironment([], Broken)) as broken:
        with pytest.raises(openai.InternalServerError, match="no connection"):
            ask(broken, extra_body={})
        with pytest.raises(openai.APIError, match="no connection"):
            list(ask(broken, extra_body={}, stream=True))


def test_text_completions_run_the_pure_form() -> None:
    with endpoint(taught_policy(), limit=200, environment=FullStops()) as running:
        response = running.client().completions.create(model=MODEL, prompt=START, max_tokens=60, temperature=0)
    assert response.choices[0].text.startswith("3.<1>")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run whose recipe names an environment, with the taught model as its result."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "sums.py").write_text(SUMS)
    rows = [{"prompt": f"{n}+2?", "first": n, "completion": "3."} for n in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data: dict[str, Any] = {
        "name": "sums",
        "threads": 1,
        "model": {"tiny": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1, "head_size": 16, "chat": True}},
        "task": {
            "type": "file",
            "path": str(folder / "rows.jsonl"),
            "chat": True,
            "environment": f"{folder / 'sums.py'}:Sums",
            "heldout": 1,
        },
        "rewards": [{"type": "length", "target": 3}],
        "stages": [{"type": "sft", "steps": 1}],
    }
    made = begin(parse_recipe(data), out=folder / "run")
    shutil.rmtree(made.model)
    taught_policy().save(made.model)
    return made


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "oncurve", *arguments]


@pytest.mark.slow
def test_a_chat_as_a_process(run: RunFolder) -> None:
    arguments = command("chat", str(run.path), "--tools", "--columns", '{"first": 0}')
    piped = subprocess.run(arguments, input=f"{QUESTION}\n{QUESTION}\n", capture_output=True, text=True, check=True)
    assert piped.stdout.splitlines() == [*ANSWER, *ANSWER]


@pytest.mark.slow
def test_a_server_as_a_process(run: RunFolder) -> None:
    arguments = command("serve", str(run.path), "--tools", "--port", "0", "--name", MODEL, "--json", "--until-closed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    address = json.loads(process.stdout.readline())["address"]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": QUESTION}]
        response = client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, extra_body={"columns": {"first": 0}}
        )
    assert response.choices[0].message.content == "3."
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chat", "RUN", "--tools"], "--columns: missing: first"),
        (["chat", "RUN", "--tools", "--columns", "first"], "it is not a JSON object"),
        (["chat", "RUN", "--columns", "{}"], "add --tools"),
        (["chat", "MODEL", "--tools"], "no tools to run because a run's recipe names its tools"),
        (["serve", "MODEL", "--tools", "--port", "0"], "no tools to run because a run's recipe names its tools"),
        (["chat", "COPY", "--tools", "--columns", '{"first": 0}'], "not trusted: task.environment runs Python"),
        (["serve", "COPY", "--tools", "--port", "0"], "not trusted: task.environment runs Python"),
    ],
)
def test_bad_input(run: RunFolder, tmp_path: Path, arguments: list[str], message: str, capsys: Any) -> None:
    names = {"RUN": str(run.path), "MODEL": str(run.model), "COPY": str(tmp_path / "copy")}
    if "COPY" in arguments:
        shutil.copytree(run.path, tmp_path / "copy")
    assert main([names.get(argument, argument) for argument in arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
