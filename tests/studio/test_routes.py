"""The HTTP API: intact runs, broken runs, and names that are not runs."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import subprocess
import sys
import urllib.request
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

from oncurve.records import Prompt
from oncurve.runs.database.writer import RunWriter
from oncurve.runs.folder import RunFolder
from oncurve.studio.curves import Follower, curves, downsample
from oncurve.studio.groups import token_texts
from oncurve.studio.run_list import NOTES, flatten, overview
from oncurve.studio.server import STATIC
from tests.studio.samples import HOSTILE, completion, make_free_run, make_run, step_report
from tests.studio.serving import Served, served


def test_the_list_shows_every_folder(studio: Served) -> None:
    runs = {run["name"]: run for run in studio.ask("/api/runs").json}
    assert runs["sums-1"]["status"] == "finished"
    assert runs["sums-1"]["accuracy"] == 0.5
    assert runs["sums-1"]["stages"][0] == {"name": "grpo", "type": "grpo", "steps": 8, "done": 4, "finished": True}
    for broken in ("foreign", "torn", "bad-json", "newer", "no-database"):
        assert runs[broken]["status"] == "broken", broken
        assert runs[broken]["reason"]
    assert "newer version" in runs["newer"]["reason"]


def test_the_newest_checkpoint_is_the_one_to_fork(tmp_path: Path) -> None:
    """Not the last step, which may have none; stages in the order of training, not of the alphabet."""
    run = make_run(tmp_path, "live", finished=False)
    assert overview(tmp_path)[0]["checkpoint"] is None
    with RunWriter.open(run.path) as store:
        store.begin_stage("after", "grpo", 1, 8)
    for name in ("grpo-000001", "grpo-000003", "unknown-000009"):
        (run.checkpoints / name).mkdir(parents=True)
    assert overview(tmp_path)[0]["checkpoint"] == {"stage": "grpo", "step": 3}
    (run.checkpoints / "after-000002").mkdir()
    assert overview(tmp_path)[0]["checkpoint"] == {"stage": "after", "step": 2}


def test_prometheus_reads_every_run(studio: Served) -> None:
    text = studio.ask("/metrics").body.decode()
    assert 'oncurve_run_status{run="sums-1",status="finished"} 1\n' in text
    assert 'oncurve_run_steps{run="sums-1",stage="grpo"} 4\n' in text
    assert 'oncurve_run_accuracy{run="sums-1"} 0.5\n' in text
    assert 'oncurve_run_metric{run="sums-1",metric="reward"} ' in text
    assert 'oncurve_run_status{run="torn",status="broken"} 1\n' in text


@pytest.mark.parametrize("name", ["foreign", "torn", "bad-json", "newer", "no-database"])
@pytest.mark.parametrize(
    "what", ["curves", "step?stage=grpo&step=1", "group?stage=grpo&step=1&position=0", "search", "feedback"]
)
def test_a_broken_run_is_reported_and_the_server_continues(studio: Served, name: str, what: str) -> None:
    answer = studio.ask(f"/api/runs/{name}/{what}")
    assert answer.status in (404, 422) or (name, what) == ("torn", "feedback")
    if answer.status != 200:
        assert set(answer.json["error"]) == {"where", "what", "because", "fix"}
    assert studio.ask("/api/runs").status == 200


@pytest.mark.parametrize(
    "name", ["..", "../runs", "/etc", ".", "%00", "sums-1/..", "nope", "....//", "C:\\", ".hidden", "x" * 300]
)
def test_a_name_is_never_a_path(studio: Served, name: str) -> None:
    (studio.runs_dir.parent / "outside").mkdir(exist_ok=True)
    assert studio.ask(f"/api/runs/{quote(name, safe='%')}/recipe").status == 404


def test_curves(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/curves").json
    metrics = data["stages"][0]["metrics"]
    assert metrics["kl"] == {"steps": [1, 2, 3, 4], "values": [0.01, 0.02, 0.03, 0.04]}
    assert metrics["loss"]["values"] == [0.01, None, 0.01, 0.01]
    assert metrics["seconds/sample"]["values"] == [0.5] * 4
    assert data["evals"][0]["accuracy"] == 0.5


def test_a_run_without_a_verifiable_reward_has_rewards_instead_of_accuracies(tmp_path: Path) -> None:
    run = make_free_run(tmp_path, "talk")
    data = curves(run)["evals"]
    assert [(e["step"], e["accuracy"], e["reward"]) for e in data] == [(0, None, -1.25), (4, None, 0.5)]
    (listed,) = overview(tmp_path)
    assert (listed["accuracy"], listed["heldout_reward"]) == (None, 0.5)


def test_thinning_keeps_the_spikes() -> None:
    points = [(step, 1.0) for step in range(10_000)]
    points[1234], points[7000] = (1234, 99.0), (7000, -99.0)
    sampled = downsample(points, 100)
    assert len(sampled) <= 100
    assert (1234, 99.0) in sampled
    assert (7000, -99.0) in sampled
    assert sampled == sorted(sampled)
    assert downsample(points[:50], 100) == points[:50]


def test_thinning_keeps_the_spikes_of_a_span_that_begins_with_a_gap() -> None:
    points = [(step, math.nan if step % 200 == 0 else 1.0) for step in range(10_000)]
    points[1234], points[7000], points[7001] = (1234, 99.0), (7000, math.nan), (7001, -99.0)
    sampled = downsample(points, 100)
    assert {(1234, 99.0), (7001, -99.0)} <= set(sampled)
    assert downsample([(step, math.nan) for step in range(1000)], 100)[0][0] == 0


def test_a_metric_that_is_logged_now_and_then_has_its_curve(tmp_path: Path) -> None:
    """`heldout_loss` is logged at every evaluation, and a run that still trains has not logged it at its last step."""
    run = make_run(tmp_path, "live", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in range(1, 6):
            report = step_report(step)
            more = {"heldout_loss": 2.0 / step} if step in (2, 4) else {}
            store.record_step(dataclasses.replace(report, metrics={**report.metrics, **more}))
    (stage,) = curves(run)["stages"]
    assert stage["metrics"]["heldout_loss"] == {"steps": [2, 4], "values": [1.0, 0.5]}
    assert list(stage["metrics"]) == sorted({*step_report(1).metrics, "heldout_loss", "seconds/sample", "seconds/update"})


def test_a_group_in_full(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/group?stage=grpo&step=2&position=0").json
    assert data["prompt"] == {"id": "sums/2", "shown": "1+2=", "columns": {"answer": "3"}}
    totals = [one["total"] for one in data["completions"]]
    assert totals == pytest.approx([1.1, 1.0, 0.1, 0.0])
    expected = (np.array(totals) - np.mean(totals)) / (np.std(totals, ddof=1) + 1e-4)
    assert [one["advantage"] for one in data["completions"]] == pytest.approx(expected, abs=1e-6)
    tokens = data["completions"][3]["tokens"]
    assert "".join(tokens["pieces"]) == HOSTILE
    assert {len(tokens[key]) for key in ("ids", "pieces", "logp", "ratio", "entropy", "clipped", "kl", "advantage")} == {
        len(HOSTILE) + 1
    }


def test_what_if_gets_the_settings_and_rewards_of_the_step(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/grading?stage=grpo&step=1").json
    assert data["settings"] == {"baseline": "mean", "scale": "group", "eps": 1e-4, "mask_cut": False}
    assert data["off"] is None
    assert [one["reward"] for one in data["batch"][0]] == pytest.approx([1.1, 1.0, 0.1, 0.0])
    failed, cut, steps = data["batch"][2][1:]
    assert (failed["reward"], failed["failed"], failed["steps"]) == (None, True, None)
    assert (cut["truncated"], cut["failed"]) == (True, False)
    assert steps["steps"] == [[2, 0.5], [5, -1.0]]
    held_out = studio.ask("/api/runs/sums-1/grading?stage=grpo&step=4&kind=eval").json
    assert held_out["settings"] is None
    assert "Held-out" in held_out["off"]


def test_failures_cuts_and_steps_are_shown(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/group?stage=grpo&step=1&position=2").json["completions"]
    assert data[1]["failure"] == "answer: ValueError: no number here"
    assert (data[1]["total"], data[1]["graded"]) == (None, False)
    assert data[2]["stop"] == "length"
    assert data[3]["aspects"][2]["steps"] == [[2, 0.5], [5, -1.0]]


def test_a_conversation_is_listed_by_what_the_user_says_last(tmp_path: Path) -> None:
    report = step_report(1)
    said = [("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "1+2=")]
    messages = tuple({"role": role, "content": text} for role, text in said)
    first = report.groups[0]
    asked = dataclasses.replace(first.scored.group, prompt=Prompt("chat/1", messages=messages))
    run = make_run(tmp_path, "chat", steps=0)
    with RunWriter.open(run.path) as store:
        group = dataclasses.replace(first, scored=dataclasses.replace(first.scored, group=asked))
        store.record_step(dataclasses.replace(report, groups=(group,), stats=()))
    with served(tmp_path) as here:
        step = here.ask("/api/runs/chat/step?stage=grpo&step=1").json
        found = here.ask("/api/runs/chat/search?kind=train").json
    assert [group["prompt"] for group in step["groups"]] == ["1+2="]
    assert {one["prompt"] for one in found["completions"]} == {"1+2="}


def test_held_out_groups_too(studio: Served) -> None:
    data = studio.ask("/api/runs/sums-1/group?stage=grpo&step=4&position=1&kind=eval").json
    assert data["completions"][0]["advantage"] is None
    assert data["completions"][0]["tokens"]["ratio"] is None


def test_a_prompt_through_training(studio: Served) -> None:
    visits = studio.ask("/api/runs/sums-1/prompt?id=sums/2").json["asked"]
    assert [(one["step"], one["group"]) for one in visits] == [(1, 0), (2, 0), (3, 0), (4, 0)]
    assert visits[0]["mean"] == pytest.approx(0.55)
    solved = []
    for one in visits:
        group = studio.ask(f"/api/runs/sums-1/group?stage=grpo&step={one['step']}&position={one['group']}").json
        answers = [a["value"] for c in group["completions"] for a in c["aspects"] if a["name"] == "answer"]
        solved.append(sum(value is not None and value >= 1 for value in answers))
    assert [one["solved"] for one in visits] == solved
    assert any(solved)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("aspect=answer:ge:1&aspect=format:lt:1", 4),
        ("no_signal=true", 4),
        ("failed=true", 4),
        ("cut=true", 4),
        ("text=onerror", 4),
        ("text=1%2B50", 16),
        ("text=100%25", 0),
        ("text=_", 0),
        ("kind=eval", 2),
        ("stage=grpo&step=3", 12),
        ("stage=grpo&step=99", 0),
        ("stage=grpo&step=3&failed=true", 1),
    ],
)
def test_filters(studio: Served, query: str, found: int) -> None:
    page = studio.ask(f"/api/runs/sums-1/search?{query}").json
    assert len(page["completions"]) == found
    assert page["before"] is None
    assert page["of"] == 50


def test_the_highest_kl_first(studio: Served) -> None:
    found = studio.ask("/api/runs/sums-1/search?highest_kl=true").json["completions"]
    assert found[0]["step"] == 4
    assert [one["kl"] for one in found] == sorted((one["kl"] for one in found), reverse=True)


def test_the_highest_kl_among_matches(studio: Served) -> None:
    """Text, an aspect and the split are conditions of this search too. All completions that it looked at are counted."""
    everything = studio.ask("/api/runs/sums-1/search?highest_kl=true").json
    wrong = [one["id"] for one in everything["completions"] if one["text"].endswith("<answer>4</answer>")]
    assert 0 < len(wrong) < len(everything["completions"])
    found = studio.ask(f"/api/runs/sums-1/search?highest_kl=true&text={quote('<answer>4')}").json
    assert [one["id"] for one in found["completions"]] == wrong
    assert found["seen"] == everything["seen"]
    right = studio.ask("/api/runs/sums-1/search?highest_kl=true&aspect=answer:ge:1").json["completions"]
    assert right
    assert all((one["total"] or 0) >= 1 for one in right)
    assert studio.ask("/api/runs/sums-1/search?highest_kl=true&kind=eval").json["completions"] == []


def test_the_kl_of_an_agent_is_over_its_own_tokens(tmp_path: Path) -> None:
    """Half of the tokens are the environment's; their KL is stored as 0."""
    run = make_run(tmp_path, "agent", steps=0)
    report = step_report(1)
    graded, tokens = report.groups[0], report.stats[0][0]
    assert tokens is not None
    first = graded.scored.scored[0]
    mask = np.arange(len(first.completion.token_ids)) % 2 == 0
    masked = dataclasses.replace(first, completion=dataclasses.replace(first.completion, loss_mask=mask))
    scored = dataclasses.replace(graded.scored, scored=(masked, *graded.scored.scored[1:]))
    kl = np.where(mask, np.float32(0.5), np.float32(0.0))
    stats = ((dataclasses.replace(tokens, kl=kl), *report.stats[0][1:]), *report.stats[1:])
    groups = (dataclasses.replace(graded, scored=scored), *report.groups[1:])
    with RunWriter.open(run.path) as store:
        store.record_step(dataclasses.replace(report, groups=groups, stats=stats))
    with served(tmp_path) as here:
        found = here.ask("/api/runs/agent/search?highest_kl=true").json["completions"]
    assert found[0]["kl"] == pytest.approx(0.5)


def test_pages_of_a_search_meet_without_a_gap(studio: Served) -> None:
    ids, before = [], None
    while True:
        page = studio.ask("/api/runs/sums-2/search" + (f"?before={before}" if before else "")).json
        ids += [one["id"] for one in page["completions"]]
        before = page["before"]
        if before is None:
            break
    assert ids == list(range(74, 0, -1))


def test_bad_queries_get_a_reason(studio: Served) -> None:
    assert studio.ask("/api/runs/sums-1/search?aspect=format").json["error"]["where"] == "aspect"
    assert studio.ask("/api/runs/sums-1/group?stage=grpo&step=1&position=77").status == 404
    assert studio.ask("/api/runs/sums-1/step?stage=grpo&step=minus").status == 422
    assert studio.ask("/api/runs/sums-1/step?stage=grpo&step=1&kind=odd").status == 422


def test_pieces_without_a_tokenizer_are_characters_and_tags() -> None:
    assert token_texts(completion("abc", 0), None) == ["a", "b", "c", ""]
    assert token_texts(completion("<think>a", 0), None) == ["<think>", "a", ""]
    other = dataclasses.replace(completion("abc", 0), text="a word of another tokenizer")
    assert token_texts(other, None) is None


def test_a_live_run_is_followed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "live", steps=1, finished=False)
    with served(tmp_path) as found, urllib.request.urlopen(found.address + "/api/live?run=live", timeout=120) as stream:
        lines = (line.decode().rstrip("\n") for line in stream)
        assert next(line for line in lines if line.startswith("event")) == "event: ready"
        with RunWriter.open(run.path) as store:
            store.record_step(step_report(2))
        assert next(line for line in lines if line.startswith("event")) == "event: step"
        data = json.loads(next(lines).removeprefix("data: "))
        assert (data["run"], data["stage"], data["step"], data["metrics"]["kl"]) == ("live", "grpo", 2, 0.02)
        assert next(line for line in lines if line.startswith("event")) == "event: state"
        with RunWriter.open(run.path) as store:
            store.forget_after("grpo", 1)
        assert next(line for line in lines if line.startswith("event")) == "event: reset"


def test_no_state_counts_a_step_that_was_not_sent(tmp_path: Path) -> None:
    run = make_run(tmp_path, "live", steps=1, finished=False)

    class Overtaken(Follower):
        """A step is recorded just before the state is read."""

        def _state(self, run: RunFolder) -> str:
            if self.last:
                with RunWriter.open(run.path) as store:
                    store.record_step(step_report(2))
            return super()._state(run)

    follower = Overtaken(tmp_path, run.name)
    follower.begin()
    assert [event for event, _ in follower.news()] == ["step", "state"]


def test_a_run_without_its_first_step_is_no_broken_one(tmp_path: Path) -> None:
    run = make_run(tmp_path, "fresh", finished=False)
    for file in run.path.glob("run.db*"):
        file.unlink()
    with served(tmp_path) as found:
        assert found.ask("/api/runs").json[0]["status"] == "running"


def test_the_studio_loads_without_torch() -> None:
    code = "import sys, oncurve.studio.server, oncurve.studio.report; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_reading_writes_nothing(runs_dir: Path, studio: Served) -> None:
    before = {
        path: path.read_bytes() for path in (runs_dir / "sums-1").rglob("*") if path.is_file() and path.suffix != ".db-shm"
    }
    for what in (
        "curves",
        "step?stage=grpo&step=1",
        "group?stage=grpo&step=1&position=0",
        "search?text=3",
        "feedback",
        "rewards",
    ):
        assert studio.ask(f"/api/runs/sums-1/{what}").status == 200
    assert all(
        path.read_bytes() == content for path, content in before.items() if path.name in ("run.db", "run.json", "recipe.toml")
    )


def test_responses_are_compressed_but_streams_are_not(studio: Served) -> None:
    """urllib does not decompress: the body is what was sent."""
    accepts = {"accept-encoding": "gzip"}
    plain = studio.ask("/api/runs/sums-1/curves")
    packed = studio.ask("/api/runs/sums-1/curves", accepts)
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert len(packed.body) < len(plain.body) / 3
    script = next(path.name for path in (STATIC / "assets").glob("index-*.js"))
    asset = studio.ask(f"/assets/{script}", accepts)
    assert gzip.decompress(asset.body) == (STATIC / "assets" / script).read_bytes()
    assert asset.headers["cache-control"].startswith("public")
    with urllib.request.urlopen(urllib.request.Request(f"{studio.address}/api/live?run=sums-1", headers=accepts)) as stream:
        assert stream.headers.get("content-encoding") is None
        assert stream.readline() == b"retry: 1000\n"


def test_other_axes_than_the_step(tmp_path: Path) -> None:
    """Completions, tokens and seconds add up; an axis that was not recorded at every step is left out."""
    run = make_run(tmp_path, "axes", steps=0, finished=False)
    with RunWriter.open(run.path) as store:
        for step in (1, 2, 3):
            report = step_report(step)
            metrics = {**report.metrics, "tokens": 10.0 * step}
            store.record_step(dataclasses.replace(report, metrics=metrics))
    (stage,) = curves(run)["stages"]
    assert stage["axes"]["samples"] == {"steps": [1, 2, 3], "values": [12, 24, 36]}
    assert stage["axes"]["tokens"] == {"steps": [1, 2, 3], "values": [10.0, 30.0, 60.0]}
    assert stage["axes"]["seconds"]["values"] == pytest.approx([0.75, 1.5, 2.25])
    follower = Follower(tmp_path, "axes", {"grpo": 2}, 1)
    (event, data), *_ = follower.news()
    assert (event, data["step"], data["axes"]) == ("step", 3, {"samples": 12, "tokens": 30.0, "seconds": pytest.approx(0.75)})
    with RunWriter.open(run.path) as store:
        store.record_step(step_report(4))
    assert "tokens" not in curves(run)["stages"][0]["axes"]


def test_notes_and_tags(tmp_path: Path) -> None:
    run = make_run(tmp_path, "noted")
    with served(tmp_path) as here:
        notes = {"tags": ["a", "b"], "note": "\u00e9"}
        assert here.ask("/api/runs/noted/notes", body=notes).json == notes
        assert here.ask("/api/runs").json[0]["notes"] == notes
        for bad in ({"tags": ["x" * 41]}, {"tags": ["a,b"]}, {"note": "x" * 4001}, {"other": 1}, {"tags": ["t"] * 21}):
            assert here.ask("/api/runs/noted/notes", body=bad).status == 422
        assert here.ask("/api/runs/nobody/notes", body=notes).status == 404
        assert here.ask("/api/runs").json[0]["notes"] == notes
        assert here.ask("/api/runs/noted/notes", body={"tags": ["c"]}).json == {"tags": ["c"], "note": "\u00e9"}
        assert here.ask("/api/runs/noted/notes", body={"note": ""}).json == {"tags": ["c"], "note": ""}
        (run.path / NOTES).write_text("{")
        assert here.ask("/api/runs").json[0]["notes"] == {"tags": [], "note": ""}
        assert here.ask("/api/runs").json[0]["status"] == "finished"


def test_settings_of_recipes_by_dotted_key() -> None:
    recipe = {"seed": 1, "model": {"tiny": {"layers": 2}}, "rewards": [{"type": "answer"}, {"type": "format"}], "sinks": []}
    stages = [{"type": "sft", "steps": 3}, {"type": "grpo", "name": "late", "kl": {"beta": 0.1}}]
    assert flatten({**recipe, "stages": stages}) == {
        "seed": 1, "model.tiny.layers": 2, "rewards.0.type": "answer", "rewards.1.type": "format", "sinks": [],
        "sft.type": "sft", "sft.steps": 3, "late.type": "grpo", "late.name": "late", "late.kl.beta": 0.1,
    }  # fmt: skip
