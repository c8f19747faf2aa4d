from __future__ import annotations

import dataclasses
import math
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oncurve.errors import DiskError, RunError
from oncurve.records import Aspect, Completion, GradedGroup, Group, Prompt, ScoredCompletion, ScoredGroup, StepReport
from oncurve.runs.database import row_codec
from oncurve.runs.database.reader import STARTED, RunReader
from oncurve.runs.database.writer import RunWriter
from tests.runs.processes import finish, kill_when_ready, start
from tests.runs.samples import eval_report, same, step_report


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunWriter]:
    with RunWriter.create(tmp_path) as created:
        created.begin_stage("sft", "sft", 0, 2)
        created.begin_stage("grpo", "grpo", 1, 10)
        yield created


def one_completion(text: str, ids: np.ndarray, advantages: np.ndarray) -> StepReport:
    logps = np.linspace(-1, 0, len(ids), dtype=np.float32)
    completion = Completion(ids, text, "end", logps, logps, logps, np.ones(len(ids), dtype=np.bool_))
    scored = ScoredCompletion(completion, (Aspect("answer", 1.0),))
    group = ScoredGroup(Group(Prompt("p", text=text), np.array([], np.int64), (completion,)), (scored,))
    return StepReport("grpo", 1, {}, {}, (GradedGroup(group, (advantages,), (True,)),), ((None,),))


def test_a_step_comes_back_bit_for_bit(store: RunWriter) -> None:
    reports = [step_report("grpo", step) for step in (1, 2, 3)]
    for report in reports:
        store.record_step(report)
    for report in reports:
        assert same(report, store.step("grpo", report.step))


def test_one_group_comes_back_with_what_the_learner_saw(store: RunWriter) -> None:
    report = step_report("grpo", 1)
    store.record_step(report)
    recorded = store.group("grpo", 1, 2)
    assert same(recorded.graded, report.groups[2])
    assert same(recorded.stats, report.stats[2])
    assert recorded.graded.scored.totals == report.groups[2].scored.totals
    assert store.group("grpo", 1, 0).stats == (None,) * 8
    completion = recorded.graded.group.completions[1]
    assert completion.sampled_logps is completion.logps
    assert completion.raw_logps is completion.logps


def test_what_is_usual_takes_no_room(store: RunWriter) -> None:
    store.record_step(step_report("grpo", 1))
    read_back = store._connection.execute(
        "SELECT loss_mask, sampled_logps, raw_logps, length(advantages) FROM tokens WHERE completion_id = 2"
    )
    assert tuple(read_back.fetchone()) == (None, None, None, 4)


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.characters(), max_size=20), length=st.integers(0, 5), data=st.data())
def test_any_text_and_any_length_come_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, length: int, data: st.DataObject
) -> None:
    numbers = st.lists(st.floats(width=32, allow_nan=True), min_size=length, max_size=length)
    advantages = np.array(data.draw(numbers), dtype=np.float32)
    report = one_completion(text, np.arange(length), advantages)
    with RunWriter.create(tmp_path_factory.mktemp("run")) as store:
        store.begin_stage("grpo", "grpo", 0, 1)
        store.record_step(report)
        assert same(report, store.step("grpo", 1))


def test_lone_surrogates_and_zero_bytes_are_kept(store: RunWriter) -> None:
    report = one_completion("a\ud800\0b", np.arange(2), np.ones(2, np.float32))
    store.record_step(report)
    assert store.group("grpo", 1, 0).graded.group.completions[0].text == "a\ud800\0b"


def test_columns_beyond_json_do_not_stop_a_run() -> None:
    columns = {"n": np.int64(3), "a": np.array([1.5, 2.0]), "path": Path("x"), "pair": (1, 2)}
    assert row_codec.to_json(columns) == '{"n":3,"a":[1.5,2.0],"path":"x","pair":[1,2]}'


def test_numbers_by_hand(store: RunWriter) -> None:
    store.record_step(one_completion("x", np.arange(4), np.array([1, 2, 3, 6], np.float32)))
    row = store._connection.execute("SELECT total, advantage, length, graded FROM completions").fetchone()
    assert tuple(row) == (1.0, 3.0, 4, 1)
    read_back = store.groups("grpo", 1)
    assert [(g.position, g.prompt_id, g.has_signal, g.completions, g.failures, g.mean_total) for g in read_back] == [
        (0, "p", True, 1, 0, 1.0)
    ]


def test_metrics_and_time_by_phase(store: RunWriter) -> None:
    for step in (1, 2, 3):
        store.record_step(step_report("grpo", step, prompts=1, size=2))
    assert store.metric("seconds/sample", "grpo") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    assert [(row.stage, row.step, row.seconds) for row in store.steps()] == [("grpo", step, 0.75) for step in (1, 2, 3)]
    curve = store.metric("loss", "grpo")
    assert curve[:2] == [(1, 0.25), (2, 0.25)]
    assert math.isnan(curve[2][1])
    assert store.metrics_of("grpo", 2)["tokens_per_s"] == 50.0
    assert store.metric("loss", "sft") == []
    assert store.metrics_of("grpo", 9) == {}


def test_measurements_come_back_and_are_replaced_when_done_again(store: RunWriter) -> None:
    store.record_eval(eval_report("grpo", 5, accuracy=0.25))
    store.record_eval(eval_report("grpo", 5))
    report = store.evals()[0]
    groups = store.eval_groups("grpo", 5)
    assert same(dataclasses.replace(report, groups=groups), eval_report("grpo", 5))
    assert len(store.evals()) == 1
    assert store.summary().groups == 2
    assert store.groups("grpo", 5) == []


def test_events(store: RunWriter) -> None:
    store.record_event("resumed", "went on from step 3", stage="grpo", step=3, data={"checkpoint": "grpo-000003"})
    store.record_event("finished", "done")
    first, second = store.events()
    assert (first.kind, first.message, first.stage, first.step) == ("resumed", "went on from step 3", "grpo", 3)
    assert first.data == {"checkpoint": "grpo-000003"}
    assert second.step is None
    assert [event.kind for event in store.events("finished")] == ["finished"]


def test_only_a_failure_since_the_last_start_counts(store: RunWriter) -> None:
    assert store.last_failure() is None
    store.record_event("failed", "of a run of 0.1.0, which recorded no start")
    assert store.last_failure() == "of a run of 0.1.0, which recorded no start"
    store.record_event("run", STARTED)
    assert store.last_failure() is None
    store.record_event("failed", "the disk is slow")
    store.record_event("run", "failed")
    assert store.last_failure() == "the disk is slow"


def test_summary(store: RunWriter) -> None:
    store.record_step(step_report("sft", 1, prompts=0))
    store.end_stage("sft")
    store.record_step(step_report("grpo", 1))
    store.record_eval(eval_report("grpo", 1))
    summary = store.summary()
    assert [(s.name, s.steps, s.done, s.finished is not None) for s in summary.stages] == [
        ("sft", 2, 1, True),
        ("grpo", 10, 1, False),
    ]
    assert (summary.groups, summary.completions, summary.failures) == (5, 26, 3)
    assert summary.last_metrics == store.metrics_of("grpo", 1)
    assert summary.evals[0].accuracy == 0.5


def record_all(store: RunWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        store.record_step(step_report("grpo", step))
        if step % 2 == 0:
            store.record_eval(eval_report("grpo", step))


def test_a_resumed_run_has_the_same_rows_as_one_never_stopped(tmp_path: Path) -> None:
    prints = []
    for stopped_at in (None, 3, 4, 6):
        folder = tmp_path / str(stopped_at)
        folder.mkdir()
        with RunWriter.create(folder) as store:
            store.begin_stage("grpo", "grpo", 0, 6)
            if stopped_at:
                record_all(store, 1, stopped_at)
                store.begin_stage("later", "grpo", 1, 1)
                store.record_step(step_report("later", 1))
                store.forget_after("grpo", 2)
                store.begin_stage("grpo", "grpo", 0, 6)
            record_all(store, 3 if stopped_at else 1, 6)
            prints.append(store.fingerprint())
    assert len(set(prints)) == 1


def test_a_fingerprint_leaves_out_what_measures_the_machine(tmp_path: Path) -> None:
    prints = []
    for number, metrics in enumerate([{"loss": 1.0, "tokens_per_s": 5.0}, {"loss": 1.0, "tokens_per_s": 6.0}, {"loss": 2.0}]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with RunWriter.create(folder) as store:
            store.begin_stage("sft", "sft", 0, 1)
            store.record_step(StepReport("sft", 1, metrics, {"update": float(number)}))
            prints.append(store.fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_forgetting_reopens_a_stage_only_if_steps_were_removed(store: RunWriter) -> None:
    for step in (1, 2):
        store.record_step(step_report("sft", step, prompts=0))
    store.end_stage("sft")
    store.record_step(step_report("grpo", 1))
    store.forget_after("sft", 2)
    assert [(s.name, s.finished is not None) for s in store.stages()] == [("sft", True)]
    assert store.summary().completions == 0
    store.forget_after("sft", 1)
    assert store.stages()[0].finished is None
    assert store.stages()[0].done == 1


def test_asking_for_what_is_not_there_says_what_is(store: RunWriter) -> None:
    store.record_step(step_report("grpo", 1))
    with pytest.raises(RunError, match=r"no group 9 at step 1 of stage 'grpo'\n.*3 groups were recorded"):
        store.group("grpo", 1, 9)
    with pytest.raises(RunError, match=r"no step 7 of stage 'grpo'(.|\n)*recorded steps: grpo 1 to 1"):
        store.step("grpo", 7)


def test_a_step_that_fails_half_way_leaves_nothing(store: RunWriter) -> None:
    report = step_report("grpo", 1)
    broken = dataclasses.replace(report, stats=report.stats[:1])
    with pytest.raises(ValueError, match="shorter"):
        store.record_step(broken)
    assert store.steps() == []
    store.record_step(report)
    with pytest.raises(sqlite3.IntegrityError):
        store.record_step(report)
    assert same(report, store.step("grpo", 1))


def test_a_killed_writer_leaves_complete_steps_only(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from oncurve.runs.database.writer import RunWriter
        from tests.runs.samples import step_report
        store = RunWriter.create(Path(sys.argv[1]))
        store.begin_stage("grpo", "grpo", 0, 10**6)
        for step in range(1, 10**6):
            store.record_step(step_report("grpo", step))
            if step == 20:
                print("ready", flush=True)
    """
    kill_when_ready(start(code, tmp_path))
    with RunReader.open(tmp_path) as reader:
        steps = reader.steps()
        assert len(steps) >= 20
        assert [row.step for row in steps] == list(range(1, len(steps) + 1))
        assert reader.summary().completions == len(steps) * 24
        assert same(reader.step("grpo", len(steps)), step_report("grpo", len(steps)))


def test_a_kill_inside_a_transaction_undoes_it_and_frees_the_run(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from oncurve.runs.database import row_codec
        from oncurve.runs.database.writer import RunWriter
        from tests.runs.samples import step_report
        store = RunWriter.create(Path(sys.argv[1]))
        store.begin_stage("grpo", "grpo", 0, 10)
        store.record_step(step_report("grpo", 1))
        def stuck(*arguments):
            print("ready", flush=True)
            time.sleep(60)
        row_codec.group_rows = stuck
        store.record_step(step_report("grpo", 2))
    """
    kill_when_ready(start(code, tmp_path))
    with RunReader.open(tmp_path) as reader:
        assert [row.step for row in reader.steps()] == [1]
        assert reader.metrics_of("grpo", 2) == {}
    with RunWriter.open(tmp_path) as writer:
        writer.record_step(step_report("grpo", 2))


def test_a_reader_sees_a_live_run_and_can_not_write(store: RunWriter, tmp_path: Path) -> None:
    store.record_step(step_report("grpo", 1))
    with RunReader.open(tmp_path) as reader:
        assert len(reader.steps()) == 1
        store.record_step(step_report("grpo", 2))
        assert len(reader.steps()) == 2
        with pytest.raises(sqlite3.OperationalError, match="readonly"):
            reader._connection.execute("DELETE FROM steps")
    assert len(store.steps()) == 2


def test_one_writer_at_a_time(store: RunWriter, tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from oncurve.errors import RunError
        from oncurve.runs.database.writer import RunWriter
        try:
            RunWriter.open(Path(sys.argv[1]))
        except RunError as error:
            print(error)
    """
    assert "another process is training this run" in finish(start(code, tmp_path))
    store.close()
    assert finish(start(code, tmp_path)) == ""


def test_a_finished_run_is_readable_on_a_read_only_disk() -> None:
    code = """
        import os, sys
        from pathlib import Path
        from oncurve.runs.database.reader import RunReader
        if os.geteuid() == 0:
            os.setuid(65534)
        with RunReader.open(Path(sys.argv[1])) as reader:
            print(os.access(sys.argv[1], os.W_OK), len(reader.steps()))
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with RunWriter.create(folder) as store:
            store.begin_stage("grpo", "grpo", 0, 1)
            store.record_step(step_report("grpo", 1))
        folder.chmod(0o555)
        try:
            assert finish(start(code, folder)) == "False 1\n"
        finally:
            folder.chmod(0o755)


def test_a_newer_format_is_refused(store: RunWriter, tmp_path: Path) -> None:
    store._connection.execute("UPDATE meta SET format = 99, oncurve = '9.9'")
    store.close()
    for kind in (RunReader, RunWriter):
        with pytest.raises(RunError, match=r"newer version \(format 99, by Oncurve 9.9\)(.|\n)*upgrade Oncurve"):
            kind.open(tmp_path)


def test_a_file_that_is_no_database_is_reported(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="missing"):
        RunReader.open(tmp_path)
    path = tmp_path / "run.db"
    for content, message in ((b"not a database at all" * 100, "unreadable"), (b"", "not a run's database")):
        path.write_bytes(content)
        with pytest.raises(RunError, match=message):
            RunReader.open(tmp_path)
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.executescript("CREATE TABLE t (x); INSERT INTO t VALUES (1);")
    with pytest.raises(RunError, match="not a run's database"):
        RunReader.open(tmp_path)


def test_a_truncated_database_is_reported(store: RunWriter, tmp_path: Path) -> None:
    for step in range(1, 6):
        store.record_step(step_report("grpo", step))
    store.close()
    path = tmp_path / "run.db"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(RunError, match=r"unreadable \(database disk image is malformed\)"):
        RunReader.open(tmp_path).steps()


def test_a_database_is_never_written_over(store: RunWriter, tmp_path: Path) -> None:
    store.close()
    with pytest.raises(RunError, match="already exists"):
        RunWriter.create(tmp_path)
    with RunReader.open(tmp_path) as reader:
        assert len(reader.stages()) == 2


def test_a_full_disk_keeps_the_steps_before_it(store: RunWriter, tmp_path: Path) -> None:
    store.record_step(step_report("grpo", 1))
    pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
    store._connection.execute(f"PRAGMA max_page_count = {pages + 4}")
    with pytest.raises(DiskError, match=r"no space left(.|\n)*--resume"):
        store.record_step(step_report("grpo", 2, prompts=16))
    assert same(store.step("grpo", 1), step_report("grpo", 1))
    assert len(store.steps()) == 1
    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.record_step(step_report("grpo", 2, prompts=16))


def test_a_file_size_limit_keeps_the_steps_before_it(tmp_path: Path) -> None:
    code = """
        import resource, sys
        from pathlib import Path
        from oncurve.errors import DiskError
        from oncurve.runs.database.writer import RunWriter
        from tests.runs.samples import step_report
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        with RunWriter.create(Path(sys.argv[1])) as store:
            store.begin_stage("grpo", "grpo", 0, 10**6)
            try:
                for step in range(1, 10**6):
                    store.record_step(step_report("grpo", step))
            except DiskError as error:
                print(step, len(store.steps()))
    """
    step, recorded = map(int, finish(start(code, tmp_path)).split())
    assert recorded == step - 1 > 2
    with RunReader.open(tmp_path) as reader:
        assert same(reader.step("grpo", recorded), step_report("grpo", recorded))


def test_a_database_locked_by_another_program(store: RunWriter, tmp_path: Path) -> None:
    store._connection.execute("PRAGMA busy_timeout = 10")
    with closing(sqlite3.connect(tmp_path / "run.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match=r"locked(.|\n)*close the program"):
            store.record_step(step_report("grpo", 1))
    store.record_step(step_report("grpo", 1))


def test_flushing_leaves_everything_in_the_one_file(store: RunWriter, tmp_path: Path) -> None:
    store.record_step(step_report("grpo", 1))
    store.flush()
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "run.db").write_bytes((tmp_path / "run.db").read_bytes())
    with RunReader.open(tmp_path / "copy") as copy:
        assert same(copy.step("grpo", 1), step_report("grpo", 1))


@pytest.mark.parametrize(
    "question",
    [
        "SELECT id, text FROM completions WHERE id > 900 ORDER BY id LIMIT 50",
        "SELECT value FROM metrics WHERE stage = 'grpo' AND name = 'loss' ORDER BY step",
        "SELECT name, value FROM metrics WHERE stage = 'grpo' AND step = 3",
        "SELECT c.id FROM groups g JOIN completions c ON c.group_id = g.id WHERE stage = 'grpo' AND step = 3",
        "SELECT id FROM groups WHERE prompt_id = 'p' ORDER BY id",
        "SELECT id FROM completions WHERE failure IS NOT NULL ORDER BY failure, id LIMIT 50",
    ],
)
def test_the_questions_a_browser_asks_need_no_scan_and_no_sort(store: RunWriter, question: str) -> None:
    plan = [row["detail"] for row in store._connection.execute("EXPLAIN QUERY PLAN " + question)]
    assert not any(("SCAN" in line and "completions_by_failure" not in line) or "TEMP B-TREE" in line for line in plan), plan


def test_reading_and_writing_need_no_torch() -> None:
    code = """
        import sys
        import oncurve.runs.database.writer, oncurve.runs.folder, oncurve.runs.metrics
        print("torch" in sys.modules)
    """
    assert finish(start(code)) == "False\n"
