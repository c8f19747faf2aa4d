"""Generated bad input: every recipe, data file, run folder, checkpoint and command line is a success or one clear error.

Never a traceback, never a hang: the command line is called in this process, a bug would be raised through it, and an alarm ends
what takes over ten seconds of CPU time. `make test` tries some of each kind, `make test-slow` many more of the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oncurve import trust
from oncurve.cli.app import main
from oncurve.errors import OncurveError
from oncurve.recipe.explain import find_key
from oncurve.recipe.keys import recipe_keys
from oncurve.recipe.load import dump_recipe, parse_recipe, parse_toml
from oncurve.runs.checkpoints.files import load, newest_valid
from oncurve.runs.folder import RunFolder
from oncurve.tasks.registry import build_task
from oncurve.training.start import begin
from tests.faults.cases import GRPO, SFT, recipe

SECONDS = 10
Test = TypeVar("Test", bound=Callable[..., Any])


def many(count: int) -> Callable[[Test], Test]:
    """``count`` inputs, always the same ones: a test that fails must fail again."""
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    return settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=quiet)


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """Ends what computes for ten seconds, however busy the machine is, or waits for minutes."""

    def late(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it took over {SECONDS} s")

    before = {kind: signal.signal(kind, late) for kind in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(30 * SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for kind, handler in before.items():
            signal.signal(kind, handler)


def exit_code_of(*words: str) -> int:
    """The exit code of a command, which must be a success or a refusal with its reason; anything else raises through it."""
    out, err = io.StringIO(), io.StringIO()
    with in_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    lines = out.getvalue() + err.getvalue()
    assert code in (0, 2), (words, code, lines)
    assert code == 0 or lines.strip(), words
    assert "Traceback" not in lines
    return code


def clear(attempt: Callable[[], object]) -> None:
    """Succeeds, or raises the error that a user is shown, with a reason and a fix."""
    with in_time(), contextlib.suppress(UserErrorRaised):
        try:
            attempt()
        except OncurveError as error:
            raise UserErrorRaised(error.because and error.fix) from error


class UserErrorRaised(Exception):
    """A user's error, with its reason and its fix."""

    def __init__(self, complete: str) -> None:
        assert complete


NUMBERS = st.one_of(st.integers(), st.floats(), st.sampled_from([0, -1, 1, 2**63, 1e308, 5e-324]))
ODD = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.text(max_size=8), st.sampled_from(["grpo", "tiny", "../x", "\x00", "é" * 99])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)),
    max_leaves=5,
)
"""What no one would write on purpose."""
PLAIN: dict[str, Any] = tomllib.loads(dump_recipe(recipe(SFT, GRPO)))
KEYS = sorted({entry.key for entry in recipe_keys()})


@st.composite
def damaged_trees(draw: st.DrawFn) -> dict[str, Any]:
    """A good recipe with a few values, anywhere in it, made odd, dropped or renamed."""
    data: dict[str, Any] = json.loads(json.dumps(PLAIN))
    for _ in range(draw(st.integers(1, 3))):
        at: Any = data
        while True:
            key = draw(st.sampled_from(sorted(at))) if isinstance(at, dict) else draw(st.integers(0, len(at) - 1))
            inside = at[key]
            if not isinstance(inside, dict | list) or not inside or draw(st.integers(0, 3)) == 0:
                break
            at = inside
        deed = draw(st.sampled_from(["odd", "drop", "rename"]))
        if deed == "odd" or not isinstance(at, dict):
            at[key] = draw(ODD)
        elif deed == "drop":
            del at[key]
        else:
            at[draw(st.text(max_size=12))] = at.pop(key)
        if not data:
            break
    return data


def try_recipe(data: dict[str, Any]) -> None:
    clear(lambda: parse_recipe(data))


TOML = dump_recipe(recipe(SFT, GRPO))


@st.composite
def damaged_texts(draw: st.DrawFn) -> str:
    """A good recipe file with characters changed, removed and inserted."""
    text = TOML
    for _ in range(draw(st.integers(1, 6))):
        a = draw(st.integers(0, len(text)))
        b = min(len(text), a + draw(st.integers(0, 12)))
        text = text[:a] + draw(st.text(max_size=6)) + text[b:]
    return text


def try_text(text: str) -> None:
    clear(lambda: parse_recipe(parse_toml(text, "fuzzed.toml")))


SETS = st.tuples(
    st.one_of(st.sampled_from(KEYS), st.text(max_size=12)),
    st.sampled_from(["=", "==", "", " = "]),
    st.one_of(ODD.map(str), st.text(max_size=12), st.sampled_from(["[[", "{", "true", "1e999", '"'])),
).map("".join)


def try_sets(changes: list[str]) -> None:
    clear(lambda: parse_recipe(PLAIN, changes))


ROWS = st.one_of(ODD, st.fixed_dictionaries({"prompt": ODD}, optional={"answer": ODD, "completion": ODD, "difficulty": ODD}))


@st.composite
def data_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file of rows, most of them invalid, with each of the extensions; sometimes truncated or overwritten."""
    ending = draw(st.sampled_from([".jsonl", ".json", ".jsonl.gz", ".parquet", ".csv", ""]))
    rows = draw(st.lists(ROWS, max_size=4))
    text = json.dumps(rows) if ending == ".json" else "\n".join(json.dumps(row) for row in rows)
    content = text.encode("utf-8", "surrogatepass")
    if draw(st.booleans()):
        content = content[: draw(st.integers(0, len(content)))] + draw(st.binary(max_size=20))
    return ending, content


def try_data(file: tuple[str, bytes]) -> None:
    ending, content = file
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{ending}"
        path.write_bytes(content)
        config = parse_recipe({**PLAIN, "task": {"type": "file", "path": str(path), "heldout": 1}})

        def read() -> None:
            task = build_task(config.task, "task")
            for i in range(min(task.train_size or 0, 3)):
                task.train_prompt(i)

        clear(read)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied and damaged."""
    short = recipe(
        {**SFT, "steps": 2, "eval_every": 0, "save_every": 1}, {**GRPO, "steps": 2, "eval_every": 0, "save_every": 1}
    )
    return begin(short, out=tmp_path_factory.mktemp("fuzz") / "run").path


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, str, bytes, float]:
    """(file, kind of damage, value, position)."""
    deed = draw(st.sampled_from(["flip", "cut", "scribble", "empty", "delete", "folder"]))
    return draw(st.integers(0, 999)), deed, draw(st.binary(min_size=1, max_size=16)), draw(st.floats(0, 1, exclude_max=True))


def damage(folder: Path, how: tuple[int, str, bytes, float], only: str = "*") -> None:
    which, deed, content, index = how
    files = sorted(p for p in folder.rglob(only) if p.is_file())
    path = files[which % len(files)]
    before = path.read_bytes()
    at = int(index * len(before))
    if deed == "flip" and before:
        path.write_bytes(before[:at] + bytes([before[at] ^ (content[0] or 1)]) + before[at + 1 :])
    elif deed == "cut":
        path.write_bytes(before[:at])
    elif deed == "scribble":
        path.write_bytes(before[:at] + content + before[at + len(content) :])
    elif deed == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if deed == "folder":
            path.mkdir()


LOOKS = [
    ("show",),
    ("show", "--step", "1"),
    ("show", "--step", "1", "--group", "0"),
    ("show", "--bad"),
    ("verify",),
    ("show", "--json"),
]


def try_folder(a_run: Path, how: tuple[int, str, bytes, float], look: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(a_run, copy)
        damage(copy, how)
        exit_code_of(look[0], str(copy), *look[1:])


def try_checkpoint(a_run: Path, how: tuple[int, str, bytes, float]) -> None:
    """Every changed byte of a checkpoint is found; a run then uses the checkpoint before."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkpoints"
        shutil.copytree(a_run / "checkpoints", copy)
        before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}
        damage(copy, how)
        for index in sorted(copy.iterdir()):
            full = all(p.is_file() and p.read_bytes() == content for p, content in before.items() if p.parent == index)
            try:
                load(index)
            except OncurveError:
                assert not full
            else:
                assert full
        assert newest_valid(copy, lambda path, why: None) is not None


WORDS = st.one_of(
    st.sampled_from(
        ["train", "show", "runs", "recipe", "explain", "eval", "fork", "export", "verify", "replay", "doctor", "plan", "--step"]
    ),
    st.sampled_from(
        ["--set", "--resume", "--json", "--runs", "--group", "--stage", "-o", "--out", "--help", "0", "-1", "1e9", "x.toml"]
    ),
    st.sampled_from(KEYS),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=8),
)
LONG_RUNNING = {"studio", "serve", "chat", "doctor"}
"""Commands that wait for someone, or look at the machine for some seconds."""


def try_words(words: list[str]) -> None:
    if not LONG_RUNNING & set(words):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            exit_code_of(*words)


def try_explain(key: str) -> None:
    clear(lambda: find_key(key))


@many(60)
@given(damaged_trees())
def test_recipes_some(data: dict[str, Any]) -> None:
    try_recipe(data)


@many(30)
@given(damaged_texts())
def test_recipe_files_some(text: str) -> None:
    try_text(text)


@many(30)
@given(st.lists(SETS, min_size=1, max_size=3))
def test_changes_some(changes: list[str]) -> None:
    try_sets(changes)


@many(30)
@given(data_files())
def test_data_some(file: tuple[str, bytes]) -> None:
    try_data(file)


@many(20)
@given(damages(), st.sampled_from(LOOKS[:4]))
def test_folders_some(a_run: Path, how: tuple[int, str, bytes, float], look: tuple[str, ...]) -> None:
    try_folder(a_run, how, look)


@many(20)
@given(damages())
def test_checkpoints_some(a_run: Path, how: tuple[int, str, bytes, float]) -> None:
    try_checkpoint(a_run, how)


@many(20)
@given(st.lists(WORDS, max_size=5))
def test_command_lines_some(words: list[str]) -> None:
    try_words(words)


@pytest.mark.slow
@many(700)
@given(damaged_trees())
def test_recipes_many(data: dict[str, Any]) -> None:
    try_recipe(data)


@pytest.mark.slow
@many(400)
@given(damaged_texts())
def test_recipe_files_many(text: str) -> None:
    try_text(text)


@pytest.mark.slow
@many(400)
@given(st.lists(SETS, min_size=1, max_size=3))
def test_changes_many(changes: list[str]) -> None:
    try_sets(changes)


@pytest.mark.slow
@many(300)
@given(data_files())
def test_data_many(file: tuple[str, bytes]) -> None:
    try_data(file)


@pytest.mark.slow
@many(120)
@given(damages(), st.sampled_from(LOOKS))
def test_folders_many(a_run: Path, how: tuple[int, str, bytes, float], look: tuple[str, ...]) -> None:
    try_folder(a_run, how, look)


@pytest.mark.slow
@many(150)
@given(damages())
def test_checkpoints_many(a_run: Path, how: tuple[int, str, bytes, float]) -> None:
    try_checkpoint(a_run, how)


@pytest.mark.slow
@many(200)
@given(st.lists(WORDS, max_size=5))
def test_command_lines_many(words: list[str]) -> None:
    try_words(words)


@pytest.mark.slow
@many(60)
@given(damages())
def test_damaged_runs_are_resumed_or_refused(a_run: Path, how: tuple[int, str, bytes, float]) -> None:
    """A run that was interrupted and then damaged anywhere: it resumes, or says why it can't."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "run"
        shutil.copytree(a_run, copy)
        state = json.loads((copy / "run.json").read_text())
        (copy / "run.json").write_text(json.dumps(state | {"status": "interrupted"}))
        trust.grant(RunFolder(copy))
        damage(copy, how)
        exit_code_of("train", "--resume", str(copy))
