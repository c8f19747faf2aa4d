"""What is refused before a model is loaded or a folder is made."""

import json
import re
from pathlib import Path

import pytest

from oncurve.agents.tool_environment import ToolEnvironment
from oncurve.errors import ModelError, OncurveError, RecipeError, RewardError
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.models.policy import Policy
from oncurve.recipe.load import dump_recipe, parse_recipe
from oncurve.recipe.schema.model import TinyModel
from oncurve.records import Example, Message, Prompt
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.training.prompt_checker import PromptChecker
from oncurve.training.start import begin, build_tasks_and_rewards, fork, resume
from oncurve.training.trainer import TimeUp
from tests.faults.cases import GRPO, recipe

ROWS = [{"question": f"{n}+1=", "label": str(n + 1), "level": n % 2} for n in range(10)]


@pytest.mark.parametrize(
    ("task", "reward", "message"),
    [
        ({}, {"type": "answer"}, "rewards.answer: no prompt has the columns that it needs: 'answer'"),
        ({}, {"type": "math", "column": "gold"}, "needs: 'gold'"),
        ({}, {"type": "code"}, "'tests' or 'test_code'"),
        ({}, {"type": "python", "name": "own", "function": "own.py:exact"}, "rewards.own: no prompt has the columns"),
        ({"answer": "lbl"}, {"type": "answer"}, "no row has a column 'lbl'"),
        ({"difficulty": "lvl"}, {"type": "length", "target": 3}, "no column 'lvl'"),
    ],
)
def test_a_column_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: dict[str, str], reward: dict[str, str], message: str
) -> None:
    """One error with the columns that there are; never a traceback, and never a run that can't learn."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("own.py").write_text("def exact(completion, expected):\n    return 0.0\n")
    section = {"type": "file", "path": "rows.jsonl", "prompt": "question", **task}
    config = parse_recipe({"name": "x", "task": section, "rewards": [reward], "stages": [{"type": "grpo", "steps": 1}]})
    with pytest.raises(OncurveError) as caught:
        build_tasks_and_rewards(config)
    assert message in str(caught.value)
    assert "label" in caught.value.because


def test_the_prompt_s_own_column_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    Path("named.py").write_text("def exact(completion, question, label):\n    return float(label in completion)\n")
    config = parse_recipe(
        {
            "name": "x",
            "task": {"type": "file", "path": "rows.jsonl", "prompt": "question"},
            "rewards": [{"type": "python", "name": "own", "function": "named.py:exact"}],
            "stages": [{"type": "grpo", "steps": 1}],
        }
    )
    try:
        build_tasks_and_rewards(config)
    except RewardError as error:
        pytest.fail(str(error))


@pytest.mark.parametrize(
    ("scale", "who", "sets"),
    [
        ({"samplers": 2}, "any run", ["scale.samplers=0"]),
        ({"samplers": 2, "reward_workers": 1}, "any run", ["scale.samplers=0", "scale.reward_workers=0"]),
        ({"samplers": 1, "max_staleness": 2}, "a new run or a fork", ["scale.samplers=0", "scale.max_staleness=0"]),
    ],
)
def test_processes_of_a_cluster_are_refused_without_one(
    tmp_path: Path, scale: dict[str, int], who: str, sets: list[str]
) -> None:
    """One message for a new run, a resumed one and a fork. Its fix works: asynchronous runs resume on a cluster only."""
    stage = {**GRPO, "steps": 2, "save_every": 1}
    on_ray, message = recipe(stage, scale=scale), ", ".join(f"{key} = {n}" for key, n in scale.items())
    with pytest.raises(RecipeError, match=f"scale: {message}\n") as refused:
        begin(on_ray, out=tmp_path / "new")
    assert list(tmp_path.iterdir()) == []
    without = " ".join(f"--set {change}" for change in sets)
    assert (
        refused.value.fix == f"add --ray auto to oncurve train, with or without --resume; {who} can also do without: {without}"
    )
    with pytest.raises(TimeUp):
        begin(recipe(stage), out=tmp_path / "run", minutes=1e-9)
    run = RunFolder(tmp_path / "run")
    run.write_recipe(dump_recipe(on_ray))
    with pytest.raises(RecipeError, match=re.escape(str(refused.value))):
        resume(run)
    with pytest.raises(RecipeError, match=re.escape(str(refused.value))):
        fork(run, 1, [], out=tmp_path / "fork")
    assert fork(run, 1, sets, out=tmp_path / "fork").state().current_status == "finished"
    if who == "any run":
        assert resume(run, sets=sets).state().current_status == "finished"
    else:
        with pytest.raises(RecipeError, match="only keys that describe the machine"):
            resume(run, sets=sets)


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
WITH_TOOLS = PLAIN + "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
WITHOUT_IF = PLAIN + "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
PRICE = {"type": "function", "function": {"name": "price", "description": "Look up a price."}}


class Shop:
    """Shows one tool to the policy."""

    tools = (PRICE,)


def chat_policy(template: str | None, system: str | None = None) -> Policy:
    """``template`` None: that of the built-in model."""
    words = build_tokenizer("".join(map(chr, range(32, 127))) + "\n", chat=True)
    words.chat_template = template or words.chat_template
    tiny = TinyModel(layers=1, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=48)
    model = build_model(tiny, words, seed=0)
    return Policy(model, words, system_prompt=system)


CHAT: tuple[Message, ...] = ({"role": "user", "content": "tea?"},)


def tools_warning(policy: Policy, *prompts: Prompt | Example, taught: bool = False) -> str | None:
    """The warning about tools; an error if they are refused."""
    checker = PromptChecker(policy)
    for prompt in prompts:
        if isinstance(prompt, Example):
            checker.check_example(prompt)
        else:
            checker.check_prompt(prompt, 4)
    return checker.check_tools(has_demonstrations=taught)


def shop(text: str = "tea?", environment: object = None) -> Prompt:
    """A chat with the tools of an environment."""
    return Prompt("shop/1", messages=({"role": "user", "content": text},), environment=environment or Shop())  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["prompt", "demonstration"])
@pytest.mark.parametrize(
    ("template", "system", "is_refused"),
    [
        (PLAIN, None, True),
        (PLAIN, "Call price.", False),
        (PLAIN, "Call get_price at the priceless shop.", True),
        (WITH_TOOLS, None, False),
        (WITHOUT_IF, None, False),
        (None, None, False),
    ],
)
def test_tools_that_the_model_never_sees(kind: str, template: str | None, system: str | None, is_refused: bool) -> None:
    """Many chat templates ignore tools: the run would sample without them and say nothing."""
    policy = chat_policy(template, system)
    given = shop() if kind == "prompt" else Example(Prompt("shop/1", messages=CHAT), "7", tools=(PRICE,))
    if not is_refused:
        assert tools_warning(policy, given) is None
        return
    with pytest.raises(ModelError, match=r"tools that the model never sees: price\n.*does not show tools to the model"):
        tools_warning(policy, given)


def test_tools_that_the_model_may_learn_of_elsewhere_get_a_warning() -> None:
    """Only a model that certainly learns of no tool is refused."""
    policy = chat_policy(PLAIN)

    class Till:
        def reset(self) -> str:
            return "Call price(item)."

        def price(self, item: str) -> str:
            """Look up a price.

            Args:
                item: What is sold.
            """
            return item

        def close(self) -> None:
            """Close the till."""

    till = ToolEnvironment(factory=Till)
    assert "no prompt names close, price:" in (tools_warning(policy, shop("tea?", till)) or "")
    assert "no prompt names close:" in (tools_warning(policy, shop("Call price.", till)) or "")
    assert "no prompt names price:" in (tools_warning(policy, shop(), taught=True) or "")
    demonstration = Example(Prompt("shop/1", messages=CHAT), '{"name": "price"}', tools=(PRICE,))
    assert tools_warning(policy, demonstration, taught=True) is None
    assert tools_warning(policy, shop("tea?"), shop("Call price.")) is None, "every prompt is read, not only the first"


def test_a_task_s_tools_replace_those_of_the_template_s_options() -> None:
    policy = chat_policy(WITH_TOOLS)
    policy.template_options = {"tools": [{"name": "other"}]}
    assert tools_warning(policy, shop()) is None


def test_the_log_warns_of_tools_that_no_prompt_names(tmp_path: Path) -> None:
    rows = [{"messages": [*CHAT, {"role": "assistant", "content": n}], "tools": [PRICE]} for n in "78"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "tea?", "answer": "7"}))
    sft = {"type": "sft", "steps": 1, "batch_size": 2, "data": str(path)}
    task = {"type": "file", "path": str(prompts), "chat": True}
    options = {"name": "x", "threads": 1, "task": task, "rewards": [{"type": "answer"}], "stages": [sft]}
    run = begin(parse_recipe(options), out=tmp_path / "run", policy=chat_policy(PLAIN + "assistant: "))
    with RunReader.open(run.path) as store:
        warnings = [event.message for event in store.events("warning")]
    assert len(warnings) == 1
    assert "no prompt names price:" in warnings[0]
