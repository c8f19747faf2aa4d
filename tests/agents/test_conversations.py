"""What tools add to a conversation: its tokens, its messages for rewards, the task's keys and the Python arguments."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import oncurve
from oncurve.agents.episode_record import decode_observation, encode_observation
from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.engines.base import SampleKey
from oncurve.errors import DataError, OncurveError, RecipeError
from oncurve.models.chat_template import encode_reply
from oncurve.models.loading.load import load_policy
from oncurve.models.policy import Policy
from oncurve.recipe.load import load_recipe, parse_recipe
from oncurve.recipe.schema.model import Model, TinyModel
from oncurve.recipe.schema.sections import Reward, Sampling, Task
from oncurve.records import EpisodeRecord, Group, Message, Observation, Outcome, Prompt, Rollout, ToolCall, Turn
from oncurve.rewards.base import completion_by_letters
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.registry import build_reward
from oncurve.runs.database import row_codec
from oncurve.runs.folder import RunFolder
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.registry import build_task
from oncurve.training.inputs import changed_inputs, record_inputs
from oncurve.trust import capabilities_of
from tests.agent_programs.taught import CALL, QUESTION, taught_policy
from tests.agents.test_tool_environment import Counter, call, multiply
from tests.engines.native.plain import engine_for

HERMES = (
    "{%- if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool.function.name }} {% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template like Qwen's: results of one turn share a user message."""


@cache
def built_in() -> Policy:
    return load_policy(
        Model(tiny=TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, chat=True)), alphabet=None, seed=0
    )


def hermes() -> Policy:
    policy = built_in().copy()
    policy.tokenizer = load_policy(
        Model(tiny=TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, chat=True)), alphabet=None, seed=0
    ).tokenizer
    policy.tokenizer.chat_template = HERMES.replace("<|im_end|>", policy.tokenizer.eos_token)
    return policy


@pytest.mark.parametrize("policy", [built_in, hermes])
def test_the_token_stream_is_that_of_the_template_over_the_complete_conversation(policy: Any) -> None:
    """What the model wrote is never tokenised again; here the two agree, as every character is a token."""
    opened: Policy = policy()
    environment = ToolEnvironment([multiply], Counter)
    prompt = Prompt("p", messages=({"role": "user", "content": "count"},), columns={"start": 1}, environment=environment)
    episode = environment.begin(Rollout(prompt, 0, 1, 0, opened.tokenizer))
    start = episode.start()
    assert start is not None
    start.result(5)
    stream = opened.encode(prompt).tolist()
    written: list[Message] = list(prompt.messages or ())
    turns = [call("increment", '{"step": 2}') + call("multiply", '{"a": 2, "b": 3}'), call("oops", "{}"), "it is 3"]
    for index, text in enumerate(turns):
        ids = np.asarray([*opened.tokenizer(text, add_special_tokens=False)["input_ids"], opened.eos_ids[0]])
        stream += ids.tolist()
        observation = episode.answer(Turn(index, ids, text)).result(5)
        written.append({"role": "assistant", "content": text})
        if observation.reply is not None:
            stream += encode_reply(opened, prompt, observation.reply, ended=True)
            assert isinstance(observation.reply, tuple)
            written += observation.reply
    plain = opened.tokenizer.apply_chat_template(written, tools=list(environment.tools), tokenize=True, return_dict=True)[
        "input_ids"
    ]
    assert stream == plain[: len(stream)]
    assert opened.tokenizer.decode(plain[len(stream) :]).strip() == "", "a template may write a line break after the end token"


def test_sampled_tokens_are_those_of_a_plain_transformers_loop() -> None:
    """That loop encodes the complete conversation by the template before each turn, and calls the same functions."""
    policy = taught_policy()
    environment, model = ToolEnvironment([add]), copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    messages: list[Message] = [QUESTION]
    for _ in range(2):
        options: dict[str, Any] = {"tools": list(environment.tools), "add_generation_prompt": True, "return_tensors": "pt"}
        ids = policy.tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
        stream = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=80)[0].tolist()
        text = policy.tokenizer.decode(stream[ids.shape[1] :], skip_special_tokens=True)
        found = re.search("<tool_call>(.*)</tool_call>", text)
        if found is None:
            break
        function = json.loads(found[1])
        called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        messages += [called, {"role": "tool", "name": "add", "content": str(add(**function["arguments"]))}]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    engine = engine_for(policy, 4, 2)
    prompt = Prompt("p", messages=(QUESTION,), environment=environment)
    (group,) = engine.sample([prompt], 2, Sampling(max_new_tokens=150, temperature=0.0), SampleKey(0, 1))
    for completion in group.completions:
        assert [*group.prompt_ids.tolist(), *completion.token_ids.tolist()] == stream
        assert policy.decode(completion.token_ids[completion.loss_mask]) == f"{CALL}3."


def test_a_template_that_begins_the_turn_is_read_together_with_it() -> None:
    """As those of thinking models do, by `<think>`: what comes before `</think>` is not the answer. Here it is `a ` and `:`."""
    policy, environment = taught_policy().copy(), ToolEnvironment([add])
    policy.tokenizer = copy.deepcopy(policy.tokenizer)
    policy.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "\n",
        "fields": {"thinking": {"open": "a ", "close": ":"}, "content": {"close": policy.tokenizer.eos_token}},
    }
    prompt = Prompt("p", messages=(QUESTION,), environment=environment)
    (group,) = engine_for(policy, 4, 2).sample([prompt], 1, Sampling(max_new_tokens=150, temperature=0.0), SampleKey(0, 1))
    assert group.completions[0].episode is not None
    thinking, _, content = CALL.partition(":")
    assert group.completions[0].episode.messages == [{"role": "assistant", "content": content.strip(), "thinking": thinking}]


def add(a: int, b: int) -> int:
    """
    Adds.

    Args:
        a: One number.
        b: Another.
    """
    return a + b


def group_with_tools() -> Group:
    tool = {"role": "tool", "name": "increment", "content": "3"}
    asked: Message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "increment", "arguments": {}}}],
    }
    said: Message = {"role": "assistant", "content": "it is 3"}
    turns = ((0, 2, Observation((tool,), asked, reward=0.25)), (4, 6, Observation(None, said, reward=1.0)))
    environment = Counter()
    environment.value = 3
    completion = replace(completion_by_letters("abcdef"), episode=EpisodeRecord(turns, Outcome(0.5, instance=environment)))
    return Group(Prompt("p", messages=({"role": "user", "content": "count"},)), np.array([1]), (completion,))


def test_rewards_see_the_conversation_and_the_environment() -> None:
    """As TRL passes them."""

    def last_message(completions: list[list[dict[str, Any]]], **columns: Any) -> list[float]:
        assert [m["role"] for m in completions[0]] == ["assistant", "tool", "assistant"]
        assert completions[0][0]["tool_calls"][0]["function"]["name"] == "increment"
        return [float(completion[-1]["content"].rpartition(" ")[2]) for completion in completions]

    def state(environments: list[Counter], **columns: Any) -> list[float]:
        return [float(environment.value) for environment in environments]

    mix = RewardMix([FunctionReward(last_message, "last"), FunctionReward(state, "state")])
    (scored,) = mix.score([group_with_tools()])
    assert [aspect.value for aspect in scored.scored[0].aspects] == [3.0, 3.0]
    assert mix.reads_environments


def test_a_list_that_a_tool_returned_reaches_rewards_as_a_list() -> None:
    """As in TRL, whose example judges a query by the rows that it found; the model reads its text. Stored and read too."""
    tool = {"role": "tool", "name": "query", "content": "[('tea', 3)]"}
    observation = Observation((tool,), None, (ToolCall("query", {}, "[('tea', 3)]", value=[["tea", 3]]),))
    stored = decode_observation(encode_observation(observation, np.array([1]), 0))[3]
    record = EpisodeRecord(((0, 1, stored),), Outcome())
    for episode in (record, row_codec.episode_of(row_codec.episode_json(record))):
        assert [message["content"] for message in episode.messages] == [[["tea", 3]]]
        assert isinstance(episode.turns[0][2].reply, tuple)
        assert episode.turns[0][2].reply[0]["content"] == "[('tea', 3)]"


def test_the_environments_rewards_are_for_the_episode_and_for_each_turn() -> None:
    reward = build_reward(Reward(type="environment"))
    (scored,) = RewardMix([reward]).score([group_with_tools()])
    (aspect,) = scored.scored[0].aspects
    assert aspect.value == 0.5
    assert aspect.steps == ((1, 0.25), (5, 1.0)), "at the last token of each turn"


TOOLS = '''
def search(query: str) -> str:
    """
    Search.

    Args:
        query: What to look for.
    """
    return "found"

def unhinted(query):
    """Search."""

class Shop:
    def reset(self, **columns): ...
    def buy(self, item: str) -> str:
        """
        Buy.

        Args:
            item: What.
        """
        return "bought " + item

def no_class():
    return 1

number = 1
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(TOOLS)
    rows = [{"prompt": f"buy tea {number}", "answer": "1"} for number in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def file_task(**options: Any) -> Any:
    return build_task(Task.model_validate({"type": "file", "path": "rows.jsonl", "chat": True, **options}), "task")


def test_a_recipe_names_tools_and_an_environment(here: Path) -> None:
    task = file_task(tools=["tools.py:search"], environment="tools.py:Shop", max_turns=3, tool_timeout_s=2)
    environment = task.train_prompt(0).environment
    assert isinstance(environment, ToolEnvironment)
    assert (environment.max_turns, environment.timeout_s) == (3, 2.0)
    assert [tool["function"]["name"] for tool in task.train_prompt(0).tools] == ["search", "buy"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": ["tools.py:unhinted"]}, r"task.tools\[0\]: the tool 'unhinted' can't be described"),
        ({"tools": ["tools.py:search", "tools.py:search"]}, "two tools are called 'search'"),
        ({"tools": ["tools.py:nothing"]}, "has no 'nothing'"),
        ({"environment": "tools.py:no_class"}, "an environment is a class with `reset"),
        ({"environment": "tools.py:no_class", "tools": ["tools.py:search"]}, "an environment is a class with `reset"),
        ({"environment": "tools.py:number"}, "'number' is of type int: it can't be called.*name a function or a class"),
        ({"environment": "calculator", "tools": ["tools.py:search"]}, "tools together with the environment 'calculator'"),
        ({"tools": ["tools.py:search"], "chat": False}, "tools for a prompt in plain text"),
        ({"tools": ["tools.py:search"], "max_turns": 0}, "max_turns"),
        ({"max_turns": 3}, "task.max_turns: 3(?s:.*)this task has none"),
        ({"tool_timeout_s": 10}, "task.tool_timeout_s: 10(?s:.*)only tools, or an environment with `reset`, can use it"),
        ({"environment": "calculator", "history": "template"}, "task.history: template"),
        (
            {"tools": ["tools.py:search"], "environment_options": {"price": 3}},
            "task.environment_options: .*only an environment",
        ),
    ],
)
def test_bad_keys_get_one_clear_message(here: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OncurveError, match=f"(?s){message}"):
        file_task(**options)


def test_tools_are_code_that_must_be_trusted_and_inputs_of_the_run(here: Path) -> None:
    data = {
        "name": "shop",
        "task": {
            "type": "file",
            "path": "rows.jsonl",
            "chat": True,
            "tools": ["tools.py:search"],
            "environment": "tools.py:Shop",
        },
        "rewards": [{"type": "answer"}],
        "stages": [{"type": "grpo", "steps": 1}],
    }
    recipe = parse_recipe(data)
    assert {str(c) for c in capabilities_of(recipe)} == {
        "task.tools runs Python: tools.py:search",
        "task.environment runs Python: tools.py:Shop",
    }
    run = RunFolder.create_at(here / "run")
    record_inputs(run, recipe)
    text = (here / "run" / "inputs.json").read_text()
    assert "task.tools.0" in text
    assert "task.environment" in text
    assert (here / "run" / "sources" / "task.tools.0.py").read_text() == TOOLS


def test_python_arguments_are_trls(tmp_path: Path) -> None:
    """A tiny model writes no call, so the counters stay where they began."""
    rows = [{"prompt": [{"role": "user", "content": f"count {i}"}], "start": i} for i in range(2)]
    recipe = load_recipe("arithmetic", ["model.tiny.chat=true", "model.tiny.layers=1", "grpo.optimiser.warmup_steps=0"])
    short = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 0, "save_every": 0}
    stages = (recipe.stages[-1].model_copy(update=short),)
    run = oncurve.train(
        recipe.model_copy(update={"stages": stages, "rewards": ()}),
        prompts=rows,
        tools=[multiply],
        environment_factory=Counter,
        out=tmp_path / "run",
        quiet=True,
    )
    (first, second) = run.groups(step=1)
    for group in (first, second):
        start = group.group.prompt.columns["start"]
        for scored in group.scored.scored:
            assert [(a.name, a.value) for a in scored.aspects] == [("Counter", float(start))]
            assert scored.completion.episode is not None
    assert "environment_factory" in (run.path / "inputs.json").read_text()
    other = PromptList.of(rows, environment=ToolEnvironment([multiply], Counter, history="template"))
    assert changed_inputs(run.folder, run.recipe, task=other) == ["tool_arguments (a Python function)"]
    with pytest.raises(RecipeError, match="given without prompts"):
        oncurve.train(recipe, tools=[multiply])
    for argument in list[dict[str, Any]]([{"max_turns": 3}, {"tool_timeout_s": 5.0}, {"history": "template"}]):
        with pytest.raises(RecipeError, match="given without tools"):
            oncurve.train(recipe, **argument)
    with pytest.raises(DataError, match="plain text"):
        oncurve.train(model="tiny", prompts=["3+4="], tools=[multiply], rewards=[len])


def test_several_environments_are_chosen_by_a_column(tmp_path: Path) -> None:
    """TRL's dict of factories."""

    class Other:
        def reset(self, **columns: Any) -> None:
            self.columns = columns

        def look(self) -> str:
            """Looks."""
            return "nothing"

        def get_reward(self) -> float:
            return -1.0 if "environment" not in self.columns else 0.0

    chat = [{"role": "user", "content": "count"}]
    rows: list[Any] = [{"prompt": chat, "start": 5, "environment": "counter"}, {"prompt": chat, "environment": "other"}]
    settings: dict[str, Any] = {"environment_factory": {"counter": Counter, "other": Other}, "tools": [multiply], "quiet": True}
    recipe = load_recipe("arithmetic", ["model.tiny.chat=true", "model.tiny.layers=1", "grpo.optimiser.warmup_steps=0"])
    short = {"steps": 1, "prompts_per_step": 2, "group_size": 2, "eval_every": 0, "save_every": 0}
    built = recipe.model_copy(update={"stages": (recipe.stages[-1].model_copy(update=short),), "rewards": ()})
    run = oncurve.train(built, prompts=rows, out=tmp_path / "run", **settings)
    totals = [[(a.name, a.value) for a in s.aspects] for group in run.groups(step=1) for s in group.scored.scored]
    assert sorted(totals) == [[("environment", -1.0)]] * 2 + [[("environment", 5.0)]] * 2
    recorded = (run.path / "inputs.json").read_text()
    assert "environment_factory.Counter" in recorded
    assert "environment_factory.Other" in recorded
    with pytest.raises(DataError, match=r"prompts\[0\]: environment 'shop'(?s:.*)environment_factory has: counter, other"):
        oncurve.train(built, prompts=[{"prompt": chat, "environment": "shop"}], **settings)
