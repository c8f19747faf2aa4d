"""The examples of docs/extending.md work: plug-ins are installed and trained with, changes are made to a copy of Oncurve."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from oncurve.runs.metrics import find

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
TIMEOUT_S = 300


def blocks(section: str, language: str = "python") -> list[str]:
    """The code blocks of a section, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[section], re.S | re.M)
    assert found, f"'{section}' has no {language} block"
    return found


def replace(path: Path, old: str, new: str) -> None:
    source = path.read_text()
    assert source.count(old) == 1, f"{path.name}: {old!r} occurs {source.count(old)} times"
    path.write_text(source.replace(old, new))


def run(source: Path, work: Path, script: str) -> str:
    """Runs a script with the packages in ``source``, in the folder ``work``."""
    command = [sys.executable, "-c", script]
    environment = {"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin", "HOME": str(work), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Oncurve and the page's package, installed as pip would."""
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "oncurve").symlink_to(ROOT / "oncurve")
    (folder / "extras").mkdir()
    for section in ("A reward", "A task", "An environment", "A sink", "An objective", "A stage"):
        block = blocks(section)[0]
        name = re.match(r"# (extras/\w+\.py)\n", block)
        assert name is not None
        (folder / name[1]).write_text(block)
    groups = tomllib.loads(blocks("Plug-ins", "toml")[0])["project"]["entry-points"]
    metadata = folder / "extras-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: extras\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items()) for group, entries in groups.items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return folder


TRAIN_PLUGINS = """
import pathlib
import torch
from safetensors.torch import load_file
import oncurve
pathlib.Path("recipe.toml").write_text('''
name = "plugins"
[model]
source = "tiny"
[task]
type = "reverse"
letters = 2
heldout = 4
[[rewards]]
type = "answer"
[[rewards]]
type = "contains"
word = "a"
weight = 0.5
[[sinks]]
type = "csv"
options.file = "curves.csv"
[[stages]]
type = "grpo"
objective = "clipped_sum"
steps = 2
prompts_per_step = 2
group_size = 4
sampling.max_new_tokens = 8
[[stages]]
type = "halve"
steps = 2
''')
recipe = oncurve.load_recipe("recipe.toml")
run = oncurve.train(recipe, out="run", quiet=True)
before, after = (load_file(f"run/{folder}/model.safetensors") for folder in ("checkpoints/grpo-000002", "model"))
assert all(torch.equal(after[name], weight / 4) for name, weight in before.items())
values = [value for _, value in run.metrics("reward/contains")]
assert len(values) == 2 and all(0 <= value <= 1 for value in values), values
lines = pathlib.Path("run/curves.csv").read_text().splitlines()
assert any(line.startswith("2,grpo/reward/contains,") for line in lines), lines
print("trained")
"""


@pytest.mark.slow
def test_plugins_train(plugins: Path, tmp_path: Path) -> None:
    assert run(plugins, tmp_path, TRAIN_PLUGINS).strip().endswith("trained")


ENVIRONMENT = """
import json, pathlib
import numpy as np
from oncurve.recipe.schema import sections
from oncurve.tasks.registry import build_task
rows = [{"prompt": f"How much is {name}?", "prices": {name: price}} for name, price in [("tea", 3), ("jam", 4), ("rye", 2)]]
pathlib.Path("rows.jsonl").write_text("\\n".join(map(json.dumps, rows)))
for name in ("shop", "EXTRAS/shop.py:Shop"):
    task = build_task(sections.Task(type="file", path="rows.jsonl", heldout=1, environment=name))
    prompt = task.train_prompt(0)
    item, price = next(iter(prompt.columns["prices"].items()))
    dice = np.random.default_rng(0)
    assert prompt.calls == ("</ask>",)
    assert prompt.environment.reply(prompt, (f"<ask>{item}</ask>",), dice) == str(price)
    assert prompt.environment.reply(prompt, ("<ask>gold</ask>",), dice) == "none left"
    assert prompt.environment.reply(prompt, ("It is 3.",), dice) is None
print("replied")
"""


def test_the_environment_replies(plugins: Path, tmp_path: Path) -> None:
    script = ENVIRONMENT.replace("EXTRAS", str(plugins / "extras"))
    assert run(plugins, tmp_path, script).strip() == "replied"


def add_objective(package: Path) -> None:
    _, name, row = blocks("An objective")
    specs = package / "objective_specs.py"
    replace(specs, "ObjectiveName = Literal[\n", f"ObjectiveName = Literal[\n{name}")
    table = "BUILT_IN_OBJECTIVES: Mapping[ObjectiveName, ObjectiveSpec] = {\n"
    replace(specs, table, table + row)


def add_command(package: Path) -> None:
    module, row = blocks("A command")
    (package / "cli" / "stages.py").write_text(module)
    app = package / "cli" / "app.py"
    table = "COMMANDS: tuple[tuple[str, str, str, str, str], ...] = (\n"
    replace(app, table, table + row)


def add_stage(package: Path) -> None:
    _, section, loop, row = blocks("A stage")
    union = "Stage = Annotated[\n    Sft | "
    replace(package / "recipe" / "schema" / "stages.py", union, f"{section}\n\nStage = Annotated[\n    Shrink | Sft | ")
    (package / "training" / "stages" / "shrink.py").write_text(loop)
    table = package / "training" / "stages" / "table.py"
    rows = "STAGES: Mapping[type[StageBase], StageType] = StageTable(\n    {\n"
    imports = "from oncurve.recipe.schema.stages import Shrink\nfrom oncurve.training.stages.shrink import ShrinkLoop\n\n"
    replace(table, rows, imports + rows + row)


def add_sampling_parameter(package: Path) -> None:
    key, condition, formula = blocks("A sampling parameter")
    sections = package / "recipe" / "schema" / "sections.py"
    replace(sections, "    max_new_tokens: PositiveInt = 256\n", f"{key}    max_new_tokens: PositiveInt = 256\n")
    replace(sections, "        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0\n", condition)
    place = "    dropped_SV[:, 0] = False\n"
    replace(package / "engines" / "token_sampling.py", place, formula + place)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of Oncurve with the page's changes."""
    folder = tmp_path_factory.mktemp("changed")
    package = folder / "oncurve"
    shutil.copytree(ROOT / "oncurve", package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    for change in (add_objective, add_command, add_stage, add_sampling_parameter):
        change(package)
    return folder


TRAIN_CHANGED = """
import pathlib
import torch
from safetensors.torch import load_file
import oncurve
from oncurve.cli.app import main
from oncurve.engines.token_sampling import truncate
from oncurve.recipe.schema.sections import Sampling
pathlib.Path("recipe.toml").write_text('''
name = "changed"
[model]
source = "tiny"
[task]
type = "arithmetic"
digits = 1
heldout = 4
[[rewards]]
type = "answer"
[[stages]]
type = "grpo"
objective = "clipped_sum"
steps = 2
prompts_per_step = 2
group_size = 4
sampling.max_new_tokens = 8
sampling.top_a = 1.0
[[stages]]
type = "shrink"
steps = 3
factor = 0.5
''')
recipe = oncurve.load_recipe("recipe.toml")
run = oncurve.train(recipe, out="runs/changed", quiet=True)
last = [load_file(f"runs/changed/{folder}/model.safetensors") for folder in ("checkpoints/grpo-000002", "model")]
assert all(torch.equal(last[1][name], weight / 8) for name, weight in last[0].items())
logp_SV = torch.tensor([[0.7, 0.2, 0.1]]).log()
assert truncate(logp_SV, Sampling(top_a=0.4)).isinf().tolist() == [[False, False, True]]  # 0.4 · 0.7² = 0.196
assert main(["stages", "changed"]) == 0
assert main(["show", "changed"]) == 0
assert main(["verify", "changed"]) == 0
assert main(["plan", "recipe.toml"]) == 0
assert main(["recipe", "explain", "grpo.objective"]) == 0
"""


def test_the_changes_fit_the_code(changed: Path, tmp_path: Path) -> None:
    script = "import oncurve.cli.app, oncurve.training.stages.table as t; print(*(c.__name__ for c in t.STAGES))"
    assert "Shrink" in run(changed, tmp_path, script).split()


@pytest.mark.slow
def test_a_changed_copy_trains(changed: Path, tmp_path: Path) -> None:
    output = run(changed, tmp_path, TRAIN_CHANGED)
    assert "grpo: 2 steps\nshrink: 3 steps" in output
    assert "clipped_sum" in output


def test_every_metric_that_the_studio_draws_is_explained() -> None:
    charts = (ROOT / "web" / "src" / "runs" / "charts.ts").read_text(encoding="utf-8")
    table = charts[charts.index("export const CHARTS") : charts.index("];", charts.index("export const CHARTS"))]
    names = [name for group in re.findall(r"metrics: \[(.*?)\]", table) for name in re.findall(r'"(.*?)"', group)]
    assert len(names) > 15
    assert [name for name in names if find(name if not name.endswith("/") else f"{name}x") is None] == []
    assert blocks("A metric and its chart", "ts")[0].strip() in table


def test_files_of_the_table_are_named_in_their_section() -> None:
    rows = re.findall(r"^\| \[(.*?)\]\(#(.*?)\) \| (.*?) \|", PAGE, re.M)
    assert {anchor for _, anchor, _ in rows} == {title.lower().replace(" ", "-") for title in SECTIONS} - {"plug-ins"}
    for title, anchor, files in rows:
        section = next(text for name, text in SECTIONS.items() if name.lower().replace(" ", "-") == anchor)
        for file in re.findall(r"`(.*?)`", files):
            assert file in section, f"{title}: {file}"
