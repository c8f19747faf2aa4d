"""What needs a separate process to test: imports, signals, pipes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from oncurve.cli.app import main
from oncurve.runs.folder import RunFolder
from tests.cli.conftest import write_recipe

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80"}

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
        _, error = process.communicate(timeout=60)
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


def test_no_room_is_told_and_the_run_goes_on_once_there_is(tmp_path: Path) -> None:
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
