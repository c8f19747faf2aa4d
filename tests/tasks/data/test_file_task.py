"""Prompts from files and from Python, and every error that a file can have."""

import gzip
import hashlib
import importlib
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from oncurve.errors import DataError, MissingPackage, OncurveError, RecipeError
from oncurve.recipe.schema.sections import Task
from oncurve.tasks.data.file_task import FileOptions, read_prompts
from oncurve.tasks.data.prompt_list import PromptList
from oncurve.tasks.registry import build_task


def file_task(path: Path, heldout: int = 200, **options: object) -> PromptList:
    task = build_task(Task.model_validate({"type": "file", "path": str(path), "heldout": heldout, **options}))
    assert isinstance(task, PromptList)
    return task


def write(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", [{"prompt": f"{i}+1=", "answer": i + 1, "level": "easy"} for i in range(20)])


def test_rows_become_prompts(sums: Path) -> None:
    task = file_task(sums, heldout_share=0.0, difficulty="level")
    assert task.train_size == 20
    assert task.heldout == ()
    assert task.examples == ()
    assert task.alphabet is None
    prompt = task.train_prompt(4)
    assert (prompt.id, prompt.text) == ("sums.jsonl/train/5", "4+1=")
    assert prompt.columns == {"answer": 5, "level": "easy", "difficulty": "easy"}


def test_held_out_by_share_and_by_count(sums: Path) -> None:
    task = file_task(sums)
    assert (len(task.heldout), task.train_size) == (4, 16)
    assert {p.text for p in task.heldout}.isdisjoint(p.text for p in task.train)
    assert [p.id for p in file_task(sums, heldout=3).heldout] == [p.id for p in file_task(sums, heldout=3).heldout]
    assert len(file_task(sums, heldout=3).heldout) == 3


def test_duplicates_of_held_out_rows_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 10}", "completion": "a"} for i in range(40)]
    task = file_task(write(tmp_path / "twins.jsonl", rows), heldout=3)
    heldout_texts = {p.text for p in task.heldout}
    assert heldout_texts.isdisjoint(p.text for p in task.train)
    assert heldout_texts.isdisjoint(e.prompt.text for e in task.examples)


def test_a_file_for_evaluation(sums: Path, tmp_path: Path) -> None:
    measured = write(tmp_path / "test.jsonl", [{"prompt": "0+1="}, {"prompt": "50+1="}])
    task = file_task(sums, heldout_path=str(measured))
    assert [p.id for p in task.heldout] == ["test.jsonl/heldout/1", "test.jsonl/heldout/2"]
    assert task.train_size == 19


def test_template_chat_and_system(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": "How many?", "n": 3}])
    task = file_task(path, prompt_template="{question} {{{n}}}", chat=True, system="Be brief.", heldout_share=0)
    assert task.train[0].messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many? {3}"},
    )
    assert task.train[0].columns == {"question": "How many?", "n": 3}


def test_messages_and_demonstrations(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = [
        {"prompt": messages, "completion": [{"role": "assistant", "content": "Hello"}]},
        {"prompt": "Hi there", "completion": "Yo"},
    ]
    task = file_task(write(tmp_path / "c.jsonl", rows), heldout_share=0)
    assert task.train[0].messages == ({"role": "user", "content": "Hi"},)
    assert [e.completion for e in task.examples] == ["Hello", "Yo"]
    assert task.examples[1].prompt.text == "Hi there"


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"prompt": ["a", "b"], "answer": ["1", "2"]}), path)
    task = file_task(path, heldout_share=0)
    assert [(p.text, p.columns["answer"]) for p in task.train] == [("a", "1"), ("b", "2")]


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1")

    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingPackage, match="pyarrow is not installed"):
        file_task(path)


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\n')
    assert [p.id for p in file_task(path, heldout_share=0).train] == ["bom.jsonl/train/1", "bom.jsonl/train/3"]


GOOD = b'{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("content", "line", "what"),
    [
        (b"", "", "no rows"),
        (b"\n\n", "", "no rows"),
        (GOOD + b"{oops", ":2", "not valid JSON"),
        (GOOD + b"[" * 100_000, ":2", "not valid JSON"),
        (GOOD + b'"text"', ":2", "a JSON str"),
        (GOOD + b'{"prompt": "\xff"}', ":2", "not UTF-8"),
        (GOOD + b'{"question": "a", "n": 1}', ":2", "no column 'prompt'"),
        (GOOD + b'{"prompt": ""}', ":2", "the prompt is ''"),
        (GOOD + b'{"prompt": null}', ":2", "the prompt is None"),
        (GOOD + b'{"prompt": []}', ":2", "the prompt is []"),
        (GOOD + b'{"prompt": [{"role": "user"}]}', ":2", "the prompt is [{'role': 'user'}]"),
        (GOOD + b'{"prompt": "b", "completion": 3}', ":2", "column 'completion' holds 3"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, line: str, what: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        file_task(path)
    assert (caught.value.where, caught.value.what) == (f"{path}{line}", what)


def test_bad_json_names_the_column_and_only_the_line_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + b'{"prompt": "b"\n' + GOOD)
    with pytest.raises(DataError) as caught:
        file_task(path)
    assert (caught.value.where, caught.value.because) == (f"{path}:2", "Expecting ',' delimiter at column 15")


def test_missing_columns_name_those_found(tmp_path: Path) -> None:
    path = write(tmp_path / "q.jsonl", [{"question": "a", "n": 1}])
    with pytest.raises(DataError, match="the columns found there are: question, n"):
        file_task(path)


@pytest.mark.parametrize(
    ("name", "what"),
    [("none.jsonl", "no such file"), (".", "it is a folder"), ("x.txt", "of type '.txt'"), ("x", "without an ending")],
)
def test_unreadable_files(tmp_path: Path, name: str, what: str) -> None:
    (tmp_path / "x.txt").write_text("a,b")
    (tmp_path / "x").write_text("a,b")
    with pytest.raises(DataError, match=what):
        file_task(tmp_path / name)


def test_a_table_as_text(tmp_path: Path) -> None:
    rows = 'prompt,answer,note\n"a, ""b""",1,\n"two\nlines",2,x\n\n5+5=,10,é\n'
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf" + rows.encode())
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(rows.encode()))
    (tmp_path / "t.tsv").write_text("prompt\tanswer\na, b\t1\n", encoding="utf-8")
    for name in ("t.csv", "t.csv.gz"):
        task = file_task(tmp_path / name, heldout_share=0)
        assert [p.text for p in task.train] == ['a, "b"', "two\nlines", "5+5="]
        assert [dict(p.columns) for p in task.train] == [
            {"answer": "1"},
            {"answer": "2", "note": "x"},
            {"answer": "10", "note": "é"},
        ]
        assert [p.id.rpartition("/")[2] for p in task.train] == ["2", "4", "6"], "the line on which a row ends"
    assert file_task(tmp_path / "t.tsv", heldout_share=0).train[0].text == "a, b"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prompt,answer\na,b,c\n", "x.csv:2: a row of another length"),
        ("prompt,answer\na\n", "x.csv:2: a row of another length"),
        ("prompt,prompt\na,b\n", "two columns of one name"),
        ("prompt,\na,b\n", "a column without a name"),
        ('prompt\n"a\n', "not valid CSV"),
        ("question\na\n", "no column 'prompt'"),
        ("prompt;answer\na;b, c\n", "by semicolons instead of commas\n  fix: write the file with commas"),
        ('"prompt";"answer"\n"a";"b"\n', "with commas between columns"),
        ("prompt\tanswer\na\tb\n", "fix: write the file with commas, or rename it to .tsv"),
        ("", "no rows"),
        ("prompt\n", "no rows"),
    ],
)
def test_errors_of_a_table(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        file_task(tmp_path / "x.csv")
    assert message in str(caught.value)
    (tmp_path / "x.csv").write_bytes(b"prompt\n\xff\n")
    with pytest.raises(DataError, match="not UTF-8"):
        file_task(tmp_path / "x.csv")


def test_a_column_that_the_recipe_names_and_no_row_has(sums: Path) -> None:
    for key, name in (("difficulty", "lvl"), ("answer", "lbl"), ("completion", "solution"), ("prompt", "question")):
        options: dict[str, Any] = {key: name}
        with pytest.raises(DataError, match=f"column '{name}'") as caught:
            file_task(sums, **options)
        assert "level" in caught.value.because
    rows = [{"prompt": "a", "level": 1}, {"prompt": "b"}]
    with pytest.raises(DataError, match="no column 'level'"):
        file_task(write(sums.parent / "some.jsonl", rows), difficulty="level")


def test_the_prompt_s_own_column_reaches_rewards(tmp_path: Path) -> None:
    """And that of the demonstrations, unless rewards have another meaning for the name."""
    rows = [{"question": "2+2?", "expected": "4", "solution": "It is 4."}]
    path = write(tmp_path / "q.jsonl", rows)
    task = file_task(path, prompt="question", answer="expected", completion="solution", heldout_share=0)
    assert task.train[0].columns == {"question": "2+2?", "expected": "4", "answer": "4", "solution": "It is 4."}
    plain = file_task(write(tmp_path / "p.jsonl", [{"prompt": "a", "completion": "b", "n": 1}]), heldout_share=0)
    assert plain.train[0].columns == {"n": 1}


def test_fewer_held_out_prompts_than_the_recipe_asks_for(sums: Path, tmp_path: Path) -> None:
    (line,) = file_task(sums, heldout=15).log_lines
    assert line == (
        "4 prompts are held out: task.heldout is 15, but it is at most task.heldout_share = 0.2 of the file's 20 rows"
    )
    (line,) = file_task(write(tmp_path / "one.jsonl", [{"prompt": "a"}]), heldout=5).log_lines
    assert line.startswith("no prompt is held out, so nothing is evaluated: ")
    other = write(tmp_path / "test.jsonl", [{"prompt": "0+1="}, {"prompt": "50+1="}])
    *_, line = file_task(sums, heldout=5, heldout_path=str(other)).log_lines
    assert line == "2 prompts are held out: task.heldout is 5, but task.heldout_path has 2 rows"
    assert file_task(sums, heldout=3).log_lines == ()
    assert file_task(sums, heldout_share=0).log_lines == ()


def test_the_log_counts_rows_that_are_dropped_because_their_prompt_is_held_out(sums: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "test.jsonl", [{"prompt": "0+1="}, {"prompt": "1+1="}, {"prompt": "50+1="}])
    task = file_task(sums, heldout=3, heldout_path=str(other))
    assert (task.train_size, task.log_lines) == (18, ("2 rows dropped: their prompt is held out",))
    # Two prompts of one file, 20 times each: one of 40 rows is held out, and its 19 copies are dropped.
    copies = write(tmp_path / "copies.jsonl", [{"prompt": f"q{i % 2}"} for i in range(40)])
    task = file_task(copies, heldout=1)
    assert (task.train_size, task.log_lines) == (20, ("19 rows dropped: their prompt is held out",))
    assert PromptList.of(["a", "b"], heldout=["b"]).log_lines == ("1 row dropped: its prompt is held out",)


def test_the_log_counts_prompts_whose_last_message_is_left_out() -> None:
    asked = {"role": "user", "content": "1+1="}
    task = PromptList.of([[asked, {"role": "assistant", "content": "It is"}], [asked], "1+2="])
    assert task.train[0].messages == (asked,)
    assert task.log_lines == ("1 of 3 prompts end with the assistant's message, which is left out",)


def test_a_missing_file_is_reported_with_its_key(sums: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sums.parent)
    with pytest.raises(DataError) as caught:
        file_task(sums, heldout_path="none.jsonl")
    assert caught.value.because == f"task.heldout_path names it, relative to {Path.cwd()}"
    assert "--set task.heldout_path=FILE" in caught.value.fix


@pytest.mark.parametrize("damage", ["cut", "changed", "other"])
def test_a_truncated_gzip_file(tmp_path: Path, damage: str) -> None:
    whole = gzip.compress(b"".join(b'{"prompt": "%d"}\n' % i for i in range(200)))
    middle = len(whole) // 2
    parts = {"cut": whole[:middle], "changed": whole[:middle] + bytes(9) + whole[middle + 9 :], "other": b"no gzip"}
    (tmp_path / "x.jsonl.gz").write_bytes(parts[damage])
    with pytest.raises(DataError, match="not a complete gzip file"):
        file_task(tmp_path / "x.jsonl.gz")


def test_a_parquet_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not a Parquet file"):
        file_task(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"prompt_template": "{prompt.__class__}"}, "task.prompt_template"),
        ({"prompt_template": "{prompt!r}"}, "task.prompt_template"),
        ({"prompt_template": "{}"}, "task.prompt_template"),
        ({"prompt_template": "{prompt"}, "task.prompt_template"),
        ({"system": "Be brief."}, "task.system"),
        ({"pth": "x"}, "task.pth"),
        ({"heldout_share": 2}, "task.heldout_share"),
    ],
)
def test_bad_options(sums: Path, options: dict[str, object], where: str) -> None:
    with pytest.raises(RecipeError) as caught:
        file_task(sums, **options)  # type: ignore[arg-type]
    assert caught.value.where == where


def test_all_rows_can_be_held_out_for_an_evaluation(sums: Path) -> None:
    task = file_task(sums, heldout_share=1.0)
    assert (len(task.heldout), task.train_size, task.examples) == (20, 0, ())


def test_prompts_from_memory() -> None:
    chat = [{"role": "user", "content": "Hi"}]
    task = PromptList.of(["a", chat, {"prompt": "b", "answer": 2, "completion": "2"}], heldout=["c", "a"])
    assert [p.shown for p in task.train] == ["user: Hi", "b"]
    assert [p.text for p in task.heldout] == ["c", "a"]
    assert task.train[1].columns == {"answer": 2}
    assert task.examples[0].completion == "2"
    assert [reward.type for reward in task.default_rewards] == ["answer"]
    assert PromptList.of(["a"]).default_rewards == ()


@pytest.mark.parametrize("prompts", [[], [""], [3], [{"question": "a"}]])
def test_prompts_from_memory_that_are_none(prompts: list[object]) -> None:
    with pytest.raises(DataError):
        PromptList.of(prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "where", "hint"),
    [
        ({"type": "arithmetik"}, "task.type", "did you mean 'arithmetic'?"),
        ({"type": "arithmetic", "digit": 3}, "task.digit", "did you mean 'digits'?"),
        ({"type": "countdown", "number": 3}, "task.number", "did you mean 'numbers'?"),
        ({"type": "file"}, "task.path", "missing"),
        ({"type": "arithmetic", "digits": "many"}, "task.digits", "1 or more and 9 or less"),
    ],
)
def test_the_registry_says_what_is_wrong(config: dict[str, object], where: str, hint: str) -> None:
    with pytest.raises(OncurveError) as caught:
        build_task(Task.model_validate(config))
    assert caught.value.where == where
    assert hint in str(caught.value)


def test_demonstration_chats_give_an_example_for_each_answer(tmp_path: Path) -> None:
    chat = [("system", "Be brief."), ("user", "2+2?"), ("assistant", "4"), ("user", "and 1?"), ("assistant", "5")]
    rows = [{"messages": [{"role": r, "content": c} for r, c in chat]}, {"messages": [{"role": "user", "content": "hi"}]}]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, examples = read_prompts(str(file), FileOptions(path=str(file), prompt="messages"), "train", "task.path")
    assert [len(p.messages or ()) for p in prompts] == [4, 1]
    assert [(len(e.prompt.messages or ()), e.completion) for e in examples] == [(2, "4"), (4, "5")]
    assert len({e.prompt.id for e in examples}) == 2


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A stand-in of the hub's HTTP interface: files by their path in the data set me/sums and their revision."""
    files: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            name = self.path.removeprefix("/datasets/me/sums/resolve/")
            body = files.get(name)
            self.send_response(404 if body is None else 200)
            self.send_header("X-Repo-Commit", hashlib.sha1(name.partition("/")[0].encode()).hexdigest())
            self.send_header("ETag", f'"{hash(body)}"')
            self.send_header("Content-Length", str(len(body or b"")))
            if body is None:
                self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            self.wfile.write(files.get(self.path.removeprefix("/datasets/me/sums/resolve/"), b""))

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    yield files
    server.shutdown()
    server.server_close()


def test_a_file_of_a_data_set_on_the_hub(hub: dict[str, bytes]) -> None:
    rows = [{"prompt": f"{i}+1=", "answer": i + 1} for i in range(5)]
    hub["main/data/sums.jsonl"] = "\n".join(map(json.dumps, rows)).encode()
    hub["v1/data/sums.jsonl"] = b'{"prompt": "old"}'

    def texts(path: str) -> list[str | None]:
        config = Task.model_validate({"type": "file", "path": path, "heldout_share": 0.0})
        task = build_task(config)
        assert isinstance(task, PromptList)
        return [prompt.text for prompt in task.train]

    assert texts("hf://datasets/me/sums/data/sums.jsonl") == [row["prompt"] for row in rows]
    assert texts("hf://datasets/me/sums@v1/data/sums.jsonl") == ["old"]
    with pytest.raises(DataError, match="can't be downloaded"):
        texts("hf://datasets/me/sums/data/other.jsonl")
    with pytest.raises(DataError, match="hf://datasets/OWNER/NAME/FILE"):
        texts("hf://datasets/me/sums")


def test_no_turn_of_a_held_out_conversation_is_a_demonstration(tmp_path: Path) -> None:
    def turns(i: int) -> list[dict[str, str]]:
        return [
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": "let me look"},
            {"role": "user", "content": "found"},
            {"role": "assistant", "content": f"answer {i}"},
        ]

    completions = write(tmp_path / "a.jsonl", [{"prompt": turns(i)[:1], "completion": turns(i)[1:]} for i in range(10)])
    chats = write(tmp_path / "b.jsonl", [{"prompt": turns(i)} for i in range(10)])
    for task in (file_task(completions, heldout=2), file_task(chats, heldout=2)):
        questions = {(prompt.messages or ())[0]["content"] for prompt in task.heldout}
        assert len(questions) == 2
        assert len(task.examples) == 16
        assert questions.isdisjoint((example.prompt.messages or ())[0]["content"] for example in task.examples)


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b"\n \n"])
def test_a_list_after_a_byte_order_mark_or_empty_lines(before: bytes, tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(before + b'[\n{"prompt": "a"},\n{"prompt": "b"}]')
    assert [prompt.text for prompt in file_task(path, heldout_share=0.0).train] == ["a", "b"]


def test_a_long_value_in_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("prompt,answer\n" + "x" * 200_000 + ",1\n")
    assert len(file_task(path, heldout_share=0.0).train[0].text or "") == 200_000


def test_a_null_in_a_template_is_a_missing_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"country": "Peru"}, {"country": None}])
    with pytest.raises(DataError, match=r"a\.jsonl:2: no column 'country'"):
        file_task(path, heldout_share=0.0, prompt_template="The capital of {country}?")
