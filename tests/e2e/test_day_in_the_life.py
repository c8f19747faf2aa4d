"""A day with Oncurve, as README and docs describe it: what is typed here is what the pages say.

The wheel is installed in an empty virtual environment. Packages that it depends on are not downloaded but linked from the
environment of the tests, and only those that its metadata names: a dependency that is not declared is not there. pip, without
an index, then accepts the environment or refuses it. No command sees the repository.
"""

from __future__ import annotations

import json
import re
import runpy
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import oncurve
from oncurve.models.loading.load import build_model, build_tokenizer
from oncurve.recipe.schema.model import TinyModel
from tests.serve.serving import TEMPLATE
from tests.test_packaging import ROOT, build_wheel_from_sdist, metadata_of

read_blocks = runpy.run_path(str(ROOT / "docs" / "code_blocks.py"))["read_blocks"]
SHORT = [
    "sft.steps=60", "grpo.steps=9", "grpo.prompts_per_step=16", "grpo.save_every=3", "grpo.eval_every=3",
    "grpo.optimiser.warmup_steps=2", "task.heldout=40", "threads=1",
]  # fmt: skip
"""The README's run, in seconds instead of minutes."""
CAPITALS = {
    "Peru": "Lima", "France": "Paris", "Japan": "Tokyo", "Italy": "Rome", "Kenya": "Nairobi", "Cuba": "Havana",
    "Norway": "Oslo", "Egypt": "Cairo", "Chile": "Santiago", "Ghana": "Accra", "Spain": "Madrid", "Iran": "Tehran",
}  # fmt: skip


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def block(name: str, language: str, containing: str) -> str:
    """The one code block of a page that contains a text."""
    blocks = re.findall(rf"^```{language}(?: title=[^\n]*)?\n(.*?)^```", page(name), re.M | re.S)
    (found,) = [code for code in blocks if containing in code]
    return str(found)


def closure(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements need, with their extras and dependencies, as installed in this environment."""
    found: set[str] = set()
    left = [Requirement(line) for line in requirements]
    done: set[tuple[str, frozenset[str]]] = set()
    while left:
        requirement = left.pop()
        extras = frozenset(requirement.extras)
        if (requirement.name, extras) in done:
            continue
        done.add((requirement.name, extras))
        found.add(requirement.name)
        for line in distribution(requirement.name).requires or []:
            child = Requirement(line)
            if child.marker is None or any(child.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                left.append(child)
    return found


class User:
    """Someone with an empty virtual environment and an empty folder."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.environment, self.home, self.wheel = folder / "venv", folder / "home", wheel
        self.home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(self.environment)], check=True)
        (self.site,) = self.environment.glob("lib/*/site-packages")

    @property
    def variables(self) -> dict[str, str]:
        return {
            "PATH": f"{self.environment}/bin:/usr/bin:/bin",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.environment / "bin" / words[0]), *words[1:]], cwd=self.home, env=self.variables, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *words: str, text: str = "", code: int = 0) -> str:
        """Standard output of a command; of one that must fail, its error message on one line."""
        process = self.start(*words)
        out, err = process.communicate(text, timeout=1800)
        assert process.returncode == code, f"{' '.join(words)}: exit code {process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err, err
        return out if code == 0 else " ".join(err.split())

    def oncurve(self, line: str, code: int = 0, text: str = "") -> str:
        """A command as a page writes it."""
        return self.run("oncurve", *line.split(), code=code, text=text)

    def python(self, program: str) -> str:
        return self.run("python", "-c", program)

    def provide(self, *requirements: str) -> None:
        """Links packages of the tests' environment, with all that they depend on, in place of a download."""
        for name in closure(requirements):
            files = distribution(name).files
            assert files is not None
            for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
                if not (self.site / top).exists():
                    (self.site / top).symlink_to(distribution(name).locate_file(top))  # type: ignore[arg-type]

    def requirements(self, extra: str) -> list[str]:
        """What the wheel's metadata requires, without an extra or for one."""
        lines = [Requirement(line) for line in metadata_of(self.wheel).get_all("Requires-Dist") or []]
        plain = [line for line in lines if line.marker is None]
        chosen = [line for line in lines if line.marker is not None and line.marker.evaluate({"extra": extra})]
        return [str(line).partition(";")[0] for line in (chosen if extra else plain)]

    @contextmanager
    def server(self, line: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
        """A command that serves until it is stopped, and the first address that it prints."""
        process = self.start("oncurve", *line.split())
        try:
            assert process.stdout is not None
            address = next(found[0] for found in (re.search(r"http://[\w.:]+", printed) for printed in process.stdout) if found)
            yield process, address
        finally:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_a_day_in_the_life(tmp_path: Path) -> None:
    wheel = build_wheel_from_sdist(tmp_path)
    user = User(tmp_path, wheel)
    install(user)
    train(user)
    inspect(user)
    studio(user)
    own_reward_in_python(user)
    own_data_and_lora(user)
    how_to_pages(user)
    serve(user)
    resume_after_a_kill(user)
    fork(user)
    export_and_load(user)


def install(user: User) -> None:
    user.provide(*user.requirements(""))
    user.run("pip", "install", "--quiet", "--no-index", str(user.wheel))
    user.run("pip", "check")
    where = Path(user.python("import oncurve; print(oncurve.__file__)").strip())
    assert where == user.site / "oncurve" / "__init__.py"
    assert not where.is_symlink()
    assert user.oncurve("--version").strip() == oncurve.__version__
    assert "arithmetic" in user.oncurve("recipe list")


def add_extra(user: User, command: str, extra: str) -> None:
    """A command that needs an extra names the line that installs it, and that line works."""
    message = user.oncurve(command, code=2)
    line = re.search(r"pip install '(oncurve\[\w+\])'", message)
    assert line is not None, message
    assert line[1] == f"oncurve[{extra}]"
    user.provide(*user.requirements(extra))
    user.run("pip", "install", "--quiet", "--no-index", line[1])


def train(user: User) -> None:
    sets = " ".join(f"--set {change}" for change in SHORT)
    summary = user.oncurve(f"train arithmetic {sets}")
    assert re.search(r"^all +[\d.]+ % +[\d.]+ %$", summary, re.M), summary
    assert "The run is in runs/arithmetic-1." in summary
    suggested = re.findall(r"^  \S.*?  +oncurve (\w+ runs/arithmetic-1.*)$", summary, re.M)
    assert [line.split()[0] for line in suggested] == ["show", "chat", "eval"], "the commands that the README quotes"
    group, chat, evaluation = suggested
    assert "advantage" in user.oncurve(group)
    assert user.oncurve(chat, text="12+34=\n").strip()
    assert "40 held-out problems" in " ".join(user.oncurve(evaluation).split())


def inspect(user: User) -> None:
    listed = json.loads(user.oncurve("runs --json"))
    assert [(run["name"], run["status"]) for run in listed] == [("arithmetic-1", "finished")]
    assert "reward" in user.oncurve("show arithmetic-1")
    shown = json.loads(user.oncurve("show arithmetic-1 --step 9 --group 3 --json"))
    assert len(shown["completions"]) == 8
    assert "finished" in user.oncurve("status arithmetic-1")
    assert "intact" in user.oncurve("verify arithmetic-1")
    assert "identical" in user.oncurve("replay arithmetic-1 --step 7 --group 3")
    assert "grpo.group_size" in user.oncurve("recipe explain grpo.group_size")
    assert user.oncurve("pairs arithmetic-1 -o pairs.jsonl")
    assert json.loads((user.home / "pairs.jsonl").read_text().splitlines()[0]).keys() >= {"prompt", "chosen", "rejected"}


def studio(user: User) -> None:
    add_extra(user, "studio", "studio")
    with user.server("studio --port 0") as (_, address):
        html = urllib.request.urlopen(address, timeout=300).read().decode()
        for asset in re.findall(r'(?:src|href)="([^":]+\.(?:js|css))"', html):
            assert urllib.request.urlopen(f"{address}/{asset.lstrip('./')}", timeout=300).status == 200
        runs = json.loads(urllib.request.urlopen(f"{address}/api/runs", timeout=300).read())
        assert "arithmetic-1" in json.dumps(runs)
    user.oncurve("report arithmetic-1 -o report.html")
    assert "<svg" in (user.home / "report.html").read_text(encoding="utf-8")


def own_reward_in_python(user: User) -> None:
    program = block("README.md", "python", "def starts_right").replace(
        '"learning_rate": 1e-3}', '"learning_rate": 1e-3}, steps=3'
    )
    assert "steps=3" in program
    (user.home / "five_lines.py").write_text(program)
    assert "The run is in runs/run-1." in user.run("python", "five_lines.py")


def own_data_and_lora(user: User) -> None:
    tokenizer = build_tokenizer(string.printable)
    tokenizer.chat_template = TEMPLATE
    model = user.home / "models" / "SmolLM2-135M-Instruct"
    shape = TinyModel(layers=2, width=32, heads=2, kv_heads=1, head_size=16, mlp_width=64, context=256)
    build_model(shape, tokenizer, 0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    rows = [json.dumps({"country": country, "answer": capital}) + "\n" for country, capital in CAPITALS.items()]
    row = json.loads(block("docs/tasks.md", "json", "Lima"))
    assert row.keys() == json.loads(rows[0]).keys()
    (user.home / "capitals.jsonl").write_text("".join(rows))
    (user.home / "rewards.py").write_text(block("docs/tasks.md", "python", "names_it"))
    recipe = (
        block("docs/tasks.md", "toml", "names_it").replace("steps = 100", "steps = 2").replace("heldout = 20", "heldout = 2")
    )
    (user.home / "capitals.toml").write_text(recipe)
    tried = user.run("oncurve", "rewards", "try", "capitals.toml", "--completion", "It is Paris.")
    assert "capital of France" in tried
    assert re.search(r"names_it +1 +1\.00", tried), tried
    add_extra(user, "train capitals.toml", "lora")
    assert "groups" in user.oncurve("probe capitals.toml")
    assert "The run is in runs/capitals-1." in user.oncurve("train capitals.toml")
    adapter = "from peft import PeftConfig; print(PeftConfig.from_pretrained('runs/capitals-1/adapter').r)"
    assert user.python(adapter).strip() == "8"
    (user.home / "benchmark.csv").write_text("country,answer\nPeru,Lima\nJapan,Tokyo\n")
    assert "2 of 2 rows" in " ".join(user.oncurve("eval capitals-1 --data benchmark.csv").split())


def how_to_pages(user: User) -> None:
    """Two pages from their first block to their last, in an empty folder. All pages run in tests/examples, but there in the
    environment of the tests and next to the repository."""
    for name, printed in (("lora.md", "adapter_model.safetensors"), ("stop-and-resume.md", "small-slower")):
        folder = user.home / name.removesuffix(".md")
        folder.mkdir()
        output = ""
        for code in read_blocks(page(f"docs/how-to/{name}")):
            if code.title is not None:
                (folder / code.title).write_text(code.body)
            elif code.language == "sh" and code.reason is None:
                words = ["bash", "-e", "-o", "pipefail", "-c", code.body]
                done = subprocess.run(words, cwd=folder, env=user.variables, capture_output=True, text=True, timeout=1800)
                assert done.returncode == 0, f"{code.body}\n{done.stdout}\n{done.stderr}"
                output += done.stdout
        assert printed in output, output


def serve(user: User) -> None:
    example = block("docs/serving.md", "python", "from openai import OpenAI")
    user.provide("openai")
    with user.server("serve arithmetic-1 --port 0") as (_, address):
        program = example.replace("http://127.0.0.1:8000", address)
        assert program != example
        texts = user.python(f"{program}\nprint(len(response.choices))")
        assert texts.strip() == "8"
        greedy = (
            'client.completions.create(model="arithmetic-1", prompt="178+124=", max_tokens=30, temperature=0).choices[0].text'
        )
        (user.home / "served.txt").write_text(user.python(f"{program}\nprint({greedy})"))


def resume_after_a_kill(user: User) -> None:
    words = ["train", "arithmetic", *(word for change in SHORT for word in ("--set", change)), "--out", "runs/killed"]
    process = user.start("oncurve", *words)
    deadline = time.monotonic() + 1800
    while not (user.home / "runs/killed/checkpoints/grpo-000003").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.communicate()
    assert "interrupted" in user.oncurve("status killed")
    assert "The run is in runs/killed." in user.oncurve("train --resume killed")
    one, other = (user.home / "runs" / name / "model" / "model.safetensors" for name in ("arithmetic-1", "killed"))
    assert one.read_bytes() == other.read_bytes(), "a run that was killed ends with the same bits"


def fork(user: User) -> None:
    assert "The run is in runs/" in user.oncurve("fork arithmetic-1 --step 6 --set grpo.kl.beta=0.02 --out runs/forked")
    forked = {run["name"]: run for run in json.loads(user.oncurve("runs --json"))}["forked"]
    assert (forked["parent"]["run"], forked["parent"]["step"]) == ("arithmetic-1", 6)
    assert forked["changes"] == {"grpo.kl.beta": 0.02}


def export_and_load(user: User) -> None:
    user.oncurve("export arithmetic-1@best my-best")
    user.oncurve("export arithmetic-1 my-model")
    program = """
from transformers import AutoModelForCausalLM, AutoTokenizer

for folder in ("my-best", "my-model"):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("178+124=", return_tensors="pt", add_special_tokens=False)
    tokens = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt.input_ids.shape[1]:]
    print(tokenizer.decode(tokens, skip_special_tokens=True))
"""
    best, last = user.python(program).splitlines()
    assert best
    assert last == (user.home / "served.txt").read_text().rstrip("\n"), "transformers' own greedy answer is what was served"
