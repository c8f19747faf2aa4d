"""What needs a separate process to test: imports, signals, pipes."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer

from oncurve.cli.app import COMMANDS, main
from oncurve.runs.folder import RunFolder
from tests.cli.conftest import write_recipe

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}

QUICK = """
import sys
from oncurve.cli import main
for words in (["--help"], ["--version"], ["version"], ["runs", "--runs", sys.argv[1]]):
    main(words)
slow = [name for name in ("numpy", "torch", "oncurve.recipe.schema.recipe", "oncurve.trust") if name in sys.modules]
sys.exit(f"imported: {slow}" if slow else 0)
"""
"""The commands that people wait for most often import neither numpy nor the recipe schema."""


def test_help_version_and_the_list_of_runs_import_next_to_nothing(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUICK, str(runs)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


MISSING = """
import sys
from oncurve.cli import main
recipe = sys.argv[1]
for words in (
    ["train", "gone.toml"],
    ["train", recipe],
    ["train", recipe, "--set", "task.path=" + recipe, "--set", "task.heldout_path=gone.jsonl"],
    ["train", "arithmetic", "--set", "model.source=./gone"],
    ["train", "arithmetic", "--set", "sft.data=gone.jsonl"],
    ["train", "gone-1", "--resume"],
    ["fork", "gone-1@best"],
    ["eval", "./gone", "--data", recipe],
    ["eval", "tiny", "--data", "gone.jsonl"],
    ["eval", "tiny", "--task", recipe],
    ["chat", "./gone"],
    ["serve", "./gone"],
    ["export", "gone-1", "out"],
    ["probe", "gone.toml"],
    ["show", "gone-1"],
):
    code = main(words)
    assert code == 2, (words, code)
    slow = [name for name in ("torch", "transformers") if name in sys.modules]
    assert not slow, (words, slow)
"""


WINDOWS = """
import sys
sys.platform = "win32"
sys.modules["fcntl"] = sys.modules["resource"] = None  # as on Windows: importing them fails
from oncurve.cli import main
assert main(sys.argv[1:]) == 2
import oncurve
try:
    oncurve.train
except oncurve.errors.PlatformError as error:
    print(error)
"""


@pytest.mark.parametrize("words", [["--version"], ["train", "arithmetic"]])
def test_windows_is_refused_with_one_message(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", WINDOWS, *words], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert done.stdout.count("WSL") == 1, "from Python"
    assert done.stderr.count("WSL") == 1, "from the command line"
    assert "Traceback" not in done.stderr


def test_a_missing_file_is_reported_before_anything_slow_is_imported(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'task = { type = "file", path = "gone.jsonl" }\nrewards = [{ type = "answer" }]\n[[stages]]\ntype = "grpo"\n'
    )
    command = [sys.executable, "-c", MISSING, str(recipe)]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error ") == 15


@pytest.mark.parametrize(("name", "location", "summary"), [(row[1], row[2], row[3]) for row in COMMANDS])
def test_the_list_of_commands_says_what_a_command_says_of_itself(name: str, location: str, summary: str) -> None:
    module, _, attribute = location.partition(":")
    command = getattr(import_module(f"oncurve.cli.{module}"), attribute)
    described = command.info.help if isinstance(command, typer.Typer) else inspect.getdoc(command)
    assert (described or "").splitlines()[0] == summary


def test_a_flag_is_listed_without_a_type() -> None:
    for words in (["--help"], ["train", "--help"], ["recipe", "--help"], ["recipe", "explain", "--help"]):
        command = [sys.executable, "-m", "oncurve", *words]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True)
        assert "bool" not in done.stdout.lower()


LIGHT = """
import sys
from oncurve.cli import main
for words in (["--help"], ["runs", "--runs", sys.argv[1]], ["show", "small-1", "--runs", sys.argv[1]], ["recipe", "explain"],
              ["recipe", "show", "arithmetic"], ["train", "gone.toml"], ["version"]):
    main(words)
heavy = [name for name in ("torch", "transformers", "trl", "datasets", "fastapi", "uvicorn") if name in sys.modules]
sys.exit(f"imported: {heavy}" if heavy else 0)
"""


def test_looking_and_explaining_import_nothing_heavy(runs: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(runs)], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


INTERRUPTED = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, path=None, target=None):
        if name == "oncurve.cli.options":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
from oncurve.cli import main
sys.exit(main(["--help"]))
"""


def test_ctrl_c_before_a_command_starts_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_closed_pipe_is_quiet() -> None:
    command = f"'{sys.executable}' -m oncurve recipe explain | head -1"
    done = subprocess.run(command, shell=True, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("name")
    assert done.stderr == ""


def test_in_a_terminal_there_is_one_picture_and_ctrl_c_finishes_the_step(tmp_path: Path) -> None:
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    command = [sys.executable, "-m", "oncurve", "train", str(recipe), "--out", str(out), "--set", "grpo.steps=5000"]
    leader, follower = os.openpty()
    environment = ENVIRONMENT | {"TERM": "xterm-256color"}
    with subprocess.Popen(command, env=environment, stdout=follower, stderr=subprocess.PIPE, text=True) as process:
        os.close(follower)
        shown = read(leader, until="of groups")
        process.send_signal(signal.SIGINT)
        shown += read(leader)
        _, error = process.communicate(timeout=600)
    os.close(leader)
    assert process.returncode == 130, error
    for words in ("held-out", "no signal", "tokens/s", "/5000", "stopping after this step", "\x1b[?25h"):
        assert words in shown
    assert "stopped by you" in error
    assert "Traceback" not in error
    assert RunFolder(out).state().current_status == "interrupted"
    assert list((out / "checkpoints").glob("grpo-*"))


def read(handle: int, until: str | None = None) -> str:
    """What a program writes to its terminal, up to some text or its end."""
    text = b""
    while until is None or until.encode() not in text:
        try:
            part = os.read(handle, 65536)
        except OSError:  # Linux says EIO where the other end has closed
            break
        if not part:
            break
        text += part
    return text.decode(errors="replace")


LIMITED = """
import resource, sys
from oncurve.cli import main
from oncurve.training import start
resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, 90_000))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_full_disk_is_reported_and_the_run_resumes_once_there_is_room(tmp_path: Path) -> None:
    """A file size limit acts as a full disk for one process."""
    recipe, out = write_recipe(tmp_path), tmp_path / "run"
    words = ["train", str(recipe), "--out", str(out), "--set", "grpo.prompts_per_step=8", "--set", "grpo.steps=8"]
    full = subprocess.run([sys.executable, "-c", LIMITED, *words], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert full.returncode == 2, full.stderr
    assert full.stderr.startswith("error ")
    assert "Traceback" not in full.stderr
    assert main([*words, "--resume"]) == 0
    assert RunFolder(out).state().status == "finished"


def test_an_ascii_terminal_gets_marks_instead_of_a_traceback(runs: Path) -> None:
    command = [sys.executable, "-m", "oncurve", "show", "small-1", "--runs", str(runs)]
    done = subprocess.run(command, env=ENVIRONMENT | {"PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert b"?" in done.stdout


LOST_INTERRUPT = """
import signal, sys, time
from oncurve import cli
from oncurve.cli import app

class Dropped:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def version():
    Dropped()
    time.sleep(20)
    print("not interrupted")

app.version = version
sys.exit(cli.main(["version"]))
"""


def test_an_interrupt_in_a_destructor_ends_the_command_too() -> None:
    """Python itself would print the traceback, drop the interrupt, and let the command end with 0."""
    words = [sys.executable, "-c", LOST_INTERRUPT]
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_python_m_oncurve_imports_the_commands_where_an_interrupt_is_handled() -> None:
    words = [sys.executable, "-c", "import sys, oncurve.__main__; sys.exit('oncurve.cli.app' in sys.modules)"]
    assert subprocess.run(words, env=ENVIRONMENT, check=False, timeout=60).returncode == 0
