"""Sinks with the real packages: what was sent is read back from their files."""

from __future__ import annotations

import importlib
import io
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from oncurve.errors import MissingPackage
from oncurve.recipe.load import parse_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.records import EvalReport, StepReport
from oncurve.runs.database.reader import RunReader
from oncurve.terminal.console import SafeConsole
from oncurve.terminal.live.display import LiveDisplay
from oncurve.training import sinks, start
from oncurve.training.listeners import Listener
from oncurve.training.sinks import SinkListener, build_sinks
from tests.training.builders import recipe as small_recipe


def recipe_with(*kinds: str, **options: Any) -> Recipe:
    stages = [{"type": "sft", "name": "first", "steps": 2}, {"type": "grpo", "steps": 3}]
    named = [{"type": kind, **options} for kind in kinds]
    return parse_recipe(
        {"name": "s", "task": {"type": "arithmetic"}, "rewards": [{"type": "answer"}], "stages": stages, "sinks": named}
    )


def tell(
    listener: Listener, recipe: Recipe, folder: Path, resumed_from: tuple[str, int] | None = None, status: str = "finished"
) -> None:
    """The events of a run; NaN stands for a metric that has no value."""
    listener.on_run_start(recipe, folder, 1000, resumed_from)
    if resumed_from is None:
        for step in (1, 2):
            listener.on_step(StepReport("first", step, {"loss": 1 / step}, {"forward": 0.5}))
    for step in (1, 2, 3):
        listener.on_step(StepReport("grpo", step, {"reward": 0.1 * step, "kl": float("nan")}, {"sample": 0.25}))
    listener.on_eval(EvalReport("grpo", 2, None, 8, {}, {"reward": -0.5}))  # as without a rule
    listener.on_eval(EvalReport("grpo", 3, 0.75, 8, {"1 digit": (3, 4)}))
    listener.on_run_end(status)


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_with("tensorboard")
    (sink,) = build_sinks(recipe)
    tell(sink, recipe, tmp_path)
    (again,) = build_sinks(recipe)
    tell(again, recipe, tmp_path, resumed_from=("first", 2))  # what was done after the checkpoint is done again
    result = EventAccumulator(str(tmp_path / "tensorboard"))
    result.Reload()
    assert [(e.step, round(e.value, 6)) for e in result.Scalars("first/loss")] == [(1, 1.0), (2, 0.5)]
    assert [(e.step, round(e.value, 6)) for e in result.Scalars("grpo/reward")] == [(3, 0.1), (4, 0.2), (5, 0.3)]
    assert [(e.step, e.value) for e in result.Scalars("grpo/heldout/accuracy")] == [(5, 0.75)]
    assert [(e.step, e.value) for e in result.Scalars("grpo/heldout/reward")] == [(4, -0.5)]
    assert result.Scalars("grpo/heldout/1 digit")[0].value == 0.75
    assert result.Scalars("grpo/seconds/sample")[0].value == 0.25
    assert "grpo/kl" not in result.Tags()["scalars"]


def records(file: Path) -> Iterator[bytes]:
    """The records of a wandb file: after a header of 7 bytes, the log format of LevelDB, in blocks of 32 KiB."""
    data, at, full = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if at + 7 + size > len(data):
            return  # not written completely yet
        full += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield full
            full = b""


def wait_until(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    """wandb's own process writes the file, and on a busy machine it still does after `finish`."""
    end = time.monotonic() + seconds
    while not is_true() and time.monotonic() < end:
        time.sleep(0.1)


@pytest.mark.slow
def test_wandb_offline(tmp_path: Path) -> None:
    """Read back from the file that `wandb sync` would send."""
    from wandb.proto.wandb_internal_pb2 import Record

    recipe = recipe_with("wandb", offline=True, project="mine")
    (sink,) = build_sinks(recipe)
    tell(sink, recipe, tmp_path)
    assert not sink.failed
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    wait_until(lambda: any(Record.FromString(data).HasField("exit") for data in records(file)))
    output = [Record.FromString(data) for data in records(file)]
    runs = [record.run for record in output if record.WhichOneof("record_type") == "run"]
    assert {(run.project, run.display_name) for run in runs} == {("mine", tmp_path.name)}
    rows = [{item.key or item.nested_key[0]: item.value_json for item in record.history.item} for record in output]
    rewards = {int(row["_step"]): float(row["grpo/reward"]) for row in rows if "grpo/reward" in row}
    assert rewards == pytest.approx({3: 0.1, 4: 0.2, 5: 0.3})
    assert [row["grpo/heldout/accuracy"] for row in rows if "grpo/heldout/accuracy" in row] == ["0.75"]


@pytest.mark.slow
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "kept"))
    from trackio.sqlite_storage import SQLiteStorage

    project = f"mine-{uuid4().hex}"  # trackio reads where it keeps things once, and may do so before this test
    recipe = recipe_with("trackio", project=project)
    (sink,) = build_sinks(recipe)
    tell(sink, recipe, tmp_path)
    assert not sink.failed
    assert capsys.readouterr().out == ""
    (name,) = SQLiteStorage.get_runs(project)
    assert name.startswith(tmp_path.name)
    logs = SQLiteStorage.get_logs(project, name)
    assert {row["step"]: row["grpo/reward"] for row in logs if "grpo/reward" in row} == pytest.approx({3: 0.1, 4: 0.2, 5: 0.3})


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_reported_before_anything_is_begun(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sinks, "import_module", nothing)
    with pytest.raises(MissingPackage, match=rf"oncurve\[{kind}\]"):
        start.begin(small_recipe(f"sinks=[{{type = '{kind}'}}]"), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_sink_that_fails_is_reported_once_and_never_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is another package's: it is printed without control characters, and recorded."""
    calls: list[int] = []

    def fail(self: SinkListener, values: Any, step: int) -> None:
        calls.append(step)
        raise ConnectionError("the network \x1b[2J went away")

    monkeypatch.setattr(sinks.TensorboardSink, "write", fail)
    out = io.StringIO()
    display = LiveDisplay(SafeConsole(file=out))
    run = start.begin(small_recipe("sinks=[{type = 'tensorboard'}]"), out=tmp_path / "run", listeners=[display])
    assert run.state().status == "finished"
    assert len(calls) == 1
    message = "tensorboard logging is disabled for this run: ConnectionError: the network �[2J went away"
    assert out.getvalue().count(message) == 1
    assert "\x1b" not in out.getvalue()
    with RunReader.open(run.path) as store:
        assert [event.kind for event in store.events() if "went away" in event.message] == ["sink"]


def test_a_run_with_a_sink_keeps_its_tokenizer_and_its_curves(tmp_path: Path) -> None:
    run = start.begin(small_recipe("sinks=[{type = 'tensorboard'}]"), out=tmp_path / "run")
    events = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    result = events.EventAccumulator(str(run.path / "tensorboard"))
    result.Reload()
    with RunReader.open(run.path) as store:
        kept = store.metric("reward", "grpo")
    assert [e.value for e in result.Scalars("grpo/reward")] == pytest.approx([value for _, value in kept])
    assert (run.path / "tokenizer" / "tokenizer.json").is_file()
