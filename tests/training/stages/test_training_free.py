"""Training-Free GRPO with a real HTTP endpoint: the library grows and helps, and a resumed run sends no request twice."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oncurve.errors import DataError, RecipeError, RewardError, RunError
from oncurve.operations.run_model import load_model
from oncurve.operations.verify import verify
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.recipe.schema.stages import TrainingFree
from oncurve.rewards.mix import RewardMix
from oncurve.rewards.python_function import FunctionReward
from oncurve.rewards.verifiers.answer import AnswerOptions, AnswerReward
from oncurve.runs.database.reader import RunReader
from oncurve.runs.folder import RunFolder
from oncurve.runs.step_notes import watch_progress
from oncurve.studio.playground import models_of
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.training.listeners import Listener
from oncurve.training.stages.training_free import Change, Library, TrainingFreeLoop, parse_changes
from oncurve.training.start import begin, resume
from tests.rewards.models.test_judge import Judge
from tests.training.test_trainer import StopAfter

HINT = "Write the sum between answer tags."
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
TASK = PromptList.of(ROWS[:6], ROWS[6:])


@pytest.fixture
def endpoint() -> Iterator[Judge]:
    """Answers correctly if the prompt says how, else for every other seed; as the teacher, it says how."""
    server = Judge()

    def reply(body: dict[str, Any]) -> str:
        config = body["messages"][-1]["content"]
        if body["messages"][0]["role"] == "system":
            return f"Let me see. {json.dumps([{'do': 'add', 'text': HINT}, {'do': 'keep'}])}"
        total = int(config.rpartition("\n")[2].partition("+")[0]) + 1
        lucky = body["temperature"] > 0 and body["seed"] % 2 == 0
        return f"<answer>{total}</answer>" if lucky or HINT in config else str(total)

    server.reply = reply
    yield server
    server.server.shutdown()
    server.server.server_close()


def test_without_a_verifiable_reward_the_library_is_measured_by_reward(endpoint: Judge, tmp_path: Path) -> None:
    stage_loop = loop(endpoint, tmp_path, steps=1)
    stage_loop.rewards = RewardMix([FunctionReward(lambda completion: 0.5 * completion.count("<"), "marks")], accuracy_names=())
    metrics = stage_loop.step(1).metrics
    assert "accuracy" not in metrics
    assert "heldout_with" not in metrics
    assert (metrics["heldout_reward_without"], metrics["heldout_reward_with"]) == (0.0, 1.0)


def loop(endpoint: Judge, folder: Path, **options: Any) -> TrainingFreeLoop:
    settings = {
        "model": "any", "base_url": endpoint.url, "steps": 3, "prompts_per_step": 3, "group_size": 4, "retries": 0, **options
    }  # fmt: skip
    rewards = RewardMix([AnswerReward("answer", 1.0, AnswerOptions())])
    return TrainingFreeLoop(TrainingFree.model_validate(settings), 0, TASK, rewards, folder)


def test_the_library_says_what_set_better_answers_apart_and_held_out_accuracy_rises(endpoint: Judge, tmp_path: Path) -> None:
    stage_loop = loop(endpoint, tmp_path)
    reports = [stage_loop.step(n) for n in range(1, 4)]
    assert stage_loop.library.entries == {1: HINT}
    assert reports[0].metrics["changes"] == 1.0  # said for each group, added once
    assert 0 < reports[0].metrics["accuracy"] < 1
    assert reports[1].metrics["accuracy"] == 1.0
    last = reports[-1].metrics
    assert (last["heldout_without"], last["heldout_with"]) == (0.0, 1.0)
    written = (tmp_path / "experience" / "training_free.md").read_text()
    assert f"- **E1** {HINT}" in written
    assert Library.read(tmp_path / "experience" / "training_free.md").entries == stage_loop.library.entries


def test_the_held_out_measurement_shows_its_progress(endpoint: Judge, tmp_path: Path) -> None:
    """Two prompts, first without the library, then with it; later with it alone."""
    stage_loop = loop(endpoint, tmp_path)
    shares: list[float] = []
    with watch_progress(shares.append):
        stage_loop.step(1)
        assert shares == []
        stage_loop.measure()
        assert shares == [0, 0.25, 0.5, 0.75, 1]
        stage_loop.measure()
    assert shares[5:] == [0, 0.5, 1]


def test_a_resumed_run_sends_no_request_twice_and_ends_the_same(endpoint: Judge, tmp_path: Path) -> None:
    full = loop(endpoint, tmp_path / "whole")
    first = [full.step(n) for n in range(1, 4)]
    count = len(endpoint.requests)
    again = loop(endpoint, tmp_path / "whole")
    again.load_state(loop(endpoint, tmp_path / "whole").state())
    second = [again.step(n) for n in range(1, 4)]
    assert len(endpoint.requests) == count
    assert [r.metrics["reward"] for r in first] == [r.metrics["reward"] for r in second]
    halfway = loop(endpoint, tmp_path / "whole")
    halfway.load_state(full.state())
    assert halfway.library == full.library
    assert halfway.without_library == full.without_library


def test_an_endpoint_that_is_down_ends_the_stage_with_an_error(endpoint: Judge, tmp_path: Path) -> None:
    endpoint.reply = lambda _: (500, "out of order")
    with pytest.raises(RewardError, match="did not answer"):
        loop(endpoint, tmp_path).step(1)


def test_rewards_that_fail_end_the_run_before_the_library_is_edited(endpoint: Judge, tmp_path: Path) -> None:
    def broken(completion: str) -> float:
        raise ValueError("no connection")

    stage_loop = loop(endpoint, tmp_path, max_failure_share=0.9)
    stage_loop.rewards = RewardMix([FunctionReward(broken, "broken")])
    with pytest.raises(RewardError, match="12 of 12 completions") as raised:
        stage_loop.step(1)
    assert raised.value.where == "training_free.max_failure_share"
    assert not (tmp_path / "experience" / "training_free.md").exists()


def test_it_ends_at_its_budget_with_a_measurement(endpoint: Judge, tmp_path: Path) -> None:
    """Each reply is one word. A checkpoint holds what was spent."""
    stage_loop = loop(endpoint, tmp_path, tokens=13)
    assert "heldout_with" not in stage_loop.step(1).metrics
    assert not stage_loop.is_over
    again = loop(endpoint, tmp_path, tokens=13)
    again.load_state(stage_loop.state())
    assert "heldout_with" in again.step(2).metrics
    assert again.is_over
    timed = loop(endpoint, tmp_path, seconds=1e-9)
    timed.step(1)
    assert timed.is_over


def test_stop_strings_are_sent_to_the_endpoint(endpoint: Judge, tmp_path: Path) -> None:
    loop(endpoint, tmp_path, sampling={"stop": ["\n", "###"]}).step(1)
    sampled = [body for body in endpoint.requests if body["messages"][0]["role"] != "system"]
    assert {tuple(body["stop"]) for body in sampled} == {("\n", "###")}


def test_a_teacher_that_rambles_is_left_out(endpoint: Judge, tmp_path: Path) -> None:
    answer = endpoint.reply
    endpoint.reply = lambda body: "no idea" if body["messages"][0]["role"] == "system" else answer(body)
    stage_loop = loop(endpoint, tmp_path, measure=False)
    assert stage_loop.step(1).metrics["changes"] == 0.0
    assert "None yet" in (tmp_path / "experience" / "training_free.md").read_text()


def test_changes_by_hand() -> None:
    library = Library({1: "a", 2: "b"}, last=2)
    changes = [Change("change", 1, "A"), Change("delete", 2), Change("add", None, "c"), Change("keep"), Change("delete", 9)]
    assert library.apply(changes, max_entries=5) == Library({1: "A", 3: "c"}, last=3)
    assert library.apply([Change("add", None, "c")], max_entries=2) == Library({2: "b", 3: "c"}, last=3)
    assert library.apply([Change("add", None, "a")], max_entries=5) == library


def test_replies_of_a_teacher() -> None:
    assert parse_changes('Sure: [{"do": "change", "number": "E3", "text": "x\\ny"}]') == [Change("change", 3, "x y")]
    for wrong in ("nothing", '{"do": "add"}', '[{"do": "burn"}]', "[1"):
        with pytest.raises(ValueError):  # noqa: PT011
            parse_changes(wrong)


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        Library.read(tmp_path / "none.md")


def recipe(endpoint: Judge, tmp_path: Path, **more: Any) -> Recipe:
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({**row, "prompt": [{"role": "user", "content": row["prompt"]}]}) + "\n" for row in ROWS))
    stage = {"type": "training_free", "model": "any", "base_url": endpoint.url, "steps": 2, "prompts_per_step": 3, "retries": 0}
    return parse_recipe(
        {
            "threads": 1,
            "model": {"tiny": {"layers": 1, "width": 32, "context": 64}},
            "task": {"type": "file", "path": str(data), "heldout": 2, "heldout_share": 0.5},
            "rewards": [{"type": "answer"}],
            "stages": [stage],
            **more,
        }
    )


def test_a_complete_recipe_in_which_no_weight_changes(endpoint: Judge, tmp_path: Path) -> None:
    run = begin(recipe(endpoint, tmp_path), out=tmp_path / "run")
    with RunReader.open(run.path) as store:
        assert dict(store.metric("heldout_with", "training_free")) == {2: 1.0}
        assert len(store.step("training_free", 1).groups) == 3
    assert HINT in (run.path / "experience" / "training_free.md").read_text()


class Recording(Listener):
    """Which kinds of events there were."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()

    def on_event(self, kind: str, message: str, stage: str | None = None, step: int | None = None) -> None:
        self.kinds.add(kind)


def test_a_recipe_of_this_stage_only_has_no_model(endpoint: Judge, tmp_path: Path) -> None:
    """No model is loaded, reported or written: `model.source` does not exist. A stopped run resumes, `verify` accepts it, the
    studio offers no model of it, and commands that need its model say that there is none."""
    output = Recording()
    config = recipe(endpoint, tmp_path, model={"source": str(tmp_path / "nothing")})
    full = begin(config, out=tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        begin(config, out=tmp_path / "run", listeners=[output, StopAfter("training_free", 1)])
    run = resume(RunFolder(tmp_path / "run"), listeners=[output])
    assert (run.path / "experience" / "training_free.md").read_text() == (
        full.path / "experience" / "training_free.md"
    ).read_text()
    assert not output.kinds & {"loading", "model", "engine"}
    assert not list(run.path.glob("**/model*")) + list(run.path.glob("tokenizer"))
    assert {check.mark for check in verify(run)} == {"ok"}
    assert models_of(run) == []
    with pytest.raises(RunError, match="has no model"):
        load_model(str(run.path), tmp_path)


def test_what_the_stage_lacks_is_reported_before_the_folder_is_created(
    endpoint: Judge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    stage = recipe(endpoint, tmp_path).stages[0].model_dump(exclude_none=True)
    cases: dict[str, dict[str, str | None]] = {
        "base_url: banana": {"base_url": "banana"},
        "OPENAI_API_KEY is not set": {"base_url": None},
        "no such file": {"library": str(tmp_path / "none.md")},
        "can't be read": {"library": str(tmp_path)},
    }
    for words, changed in cases.items():
        config = {key: value for key, value in {**stage, **changed}.items() if value is not None}
        with pytest.raises((RewardError, DataError), match=words):
            begin(recipe(endpoint, tmp_path, stages=[config]), out=tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_rewards_of_single_steps_have_no_tokens_to_read(endpoint: Judge, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="reads tokens"):
        begin(recipe(endpoint, tmp_path, rewards=[{"type": "answer"}, {"type": "process"}]), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
