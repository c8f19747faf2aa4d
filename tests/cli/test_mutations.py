"""What users get wrong, by the hundred: mutated recipes through everything that `oncurve train` checks before the first step,
odd calls of the Python API, and every command with wrong arguments. Each works or is one message with a fix, and leaves nothing
behind. Every check of a recipe must be reached by some mutation: one that none reaches is not tested.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oncurve as package
from oncurve.cli.app import COMMANDS, LazyCommand, main
from oncurve.errors import OncurveError, RecipeError
from oncurve.recipe import validate
from oncurve.recipe.keys import RecipeKey, recipe_keys
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.registry import REWARDS
from oncurve.tasks.registry import TASKS
from oncurve.training.trainer import Trainer
from tests.cli.conftest import write_recipe

pytestmark = pytest.mark.slow

MUTATIONS = 300
STAGES = {
    "grpo": 'type = "grpo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 4\nsampling = { max_new_tokens = 16 }\n',
    "ppo": 'type = "ppo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 2\nsampling = { max_new_tokens = 16 }\n',
    "trpo": 'type = "trpo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 2\nsampling = { max_new_tokens = 16 }\n',
    "sft": 'type = "sft"\nsteps = 2\nbatch_size = 4\n',
    "dpo": 'type = "dpo"\nsteps = 2\nbatch_size = 2\npairs = "PAIRS"\n',
    "reward_model": 'type = "reward_model"\nsteps = 2\nbatch_size = 2\ndata = "PAIRS"\n',
    "rejection_sample": 'type = "rejection_sample"\nsteps = 2\nprompts_per_step = 2\nsampling = { max_new_tokens = 16 }\n',
}
HEAD = """
name = "mutated"
threads = 1
model = { tiny = { layers = 1, width = 16, heads = 2, kv_heads = 1, head_size = 8, mlp_width = 16, context = 128 } }
task = { type = "arithmetic", digits = 2, heldout = 4 }
rewards = [{ type = "answer" }, { type = "format", weight = 0.1 }]
"""

TARGETED: list[list[str]] = [
    ["name=", "grpo.name=task"],
    ["grpo.name=a.b"],
    ["rewards=[{type='answer'},{type='answer'}]"],
    ["rewards=[{type='answer',name='a b'}]"],
    ["rewards=[]"],
    ["rewards=[{type='answer',weight=0.0}]"],
    ["grpo.sampling.max_new_tokens=128"],
    ["evaluation.max_new_tokens=500"],
    ["grpo.optimiser.warmup_steps=50"],
    ["grpo.patience=2"],
    ["grpo.group_size=1"],
    ["grpo.group_size=1", "grpo.objective=rloo"],
    ["grpo.group_size=1", "grpo.objective=reinforce", "grpo.no_signal=resample"],
    ["grpo.group_size=1", "grpo.advantage={baseline='none',scale='group'}"],
    ["scale.ranks=4"],
    ["grpo.sampling.temperature=0"],
    ["grpo.overlong={buffer=16}"],
    ["grpo.kl.where=reward"],
    ["grpo.kl.refresh_every=2"],
    ["grpo.kl={beta=0.1,where='reward',ratio_weighted=true}"],
    ["grpo.minibatches=3"],
    ["grpo.objective=sapo", "grpo.clip={low=0.1,high=0.1}"],
    ["grpo.clip={low=0.2,high=0.2,dual=1.0}"],
    ["grpo.objective=cispo", "grpo.clip={low=0.2,high=2.0,dual=5.0}"],
    ["grpo.objective=rloo", "grpo.advantage.baseline=mean"],
    ["grpo.length_budget=100"],
    ["grpo.iterate={every=1}"],
    ["rewards=[{type='model',model='stage:nothing'}]"],
    ["sft.data=stage:nothing"],
    ["sft.patience=1"],
    ["model.source=./gone"],
    ["model.source=gone.gguf"],
    ["model.source=/"],
    ["model.adapter=gone"],
    ["model.lora={rank=4,targets=['nothing']}"],
    ["model.quantise=nf4"],
    ["model.system_prompt=Be brief."],
    ["task={type='file',path='gone.jsonl'}"],
    ["task={type='file',path='/'}"],
    ["task={type='file',path='EMPTY'}"],
    ["task={type='file',path='PAIRS',prompt='gone'}"],
    ["task={type='file',heldout_path='PAIRS'}"],
    ["task={type='gsm8k',path='PAIRS'}"],
    ["task={type='python'}"],
    ["rewards=[{type='python',function='gone.py:f'}]"],
    ["rewards=[{type='python',function='nowhere:f'}]"],
    ["rewards=[{type='python',function='json:gone'}]"],
    ["rewards=[{type='python',function='json'}]"],
    ["rewards=[{type='judge'}]"],
    ["rewards=[{type='model',model='./gone'}]"],
    ["sinks=[{type='gone'}]"],
    ["sinks=[{type='wandb',options={a=1}}]"],
    ["grpo.keep_best=gone"],
    ["dpo.pairs=gone.jsonl"],
    ["dpo.chosen=gone"],
    ["reward_model.data=gone.jsonl"],
    ["ppo.critic.warmup_steps=2"],
    ["trpo.optimiser.learning_rate=1e-3"],
]
"""Combinations that no change of a single key makes: at least one for each check."""

WRONG: dict[str, list[Any]] = {
    "integer": [-1, 0, 1.5, "many", True],
    "number": [-1.0, "nan", "much", [1]],
    "true": ["yes", 1],
    "text": [3, "", "gone", "\x1b[31m", "a\x00b"],
    "one": ["gone", 3],
    "list": ["gone", 3, [{}], [[]]],
    "table": [3, "gone", {"gone": 1}],
    "section": [3, "gone", {"gone": 1}, []],
}


def values_for(key: RecipeKey) -> list[Any]:
    kind = next((name for name in WRONG if key.kind.startswith(name)), "text")
    return WRONG[kind]


def key_mutations() -> list[tuple[str, str]]:
    """(stage, change): every key of every stage and of the recipe, with every wrong value of its kind."""
    options = {f"task.{name}": TASKS[name].options for name in TASKS} | {
        f"rewards.{name}": REWARDS[name].options for name in REWARDS
    }
    changes: list[tuple[str, str]] = []
    for key in recipe_keys(options):
        first, _, rest = key.key.partition(".")
        if first in ("task", "rewards") and rest.partition(".")[0] in (TASKS if first == "task" else REWARDS) and "." in rest:
            kind, _, option = rest.partition(".")
            for value in values_for(key):
                table = f"{{type='{kind}',{option}={json.dumps(value)}}}"
                changes.append(("grpo", f"{first}={table if first == 'task' else f'[{table}]'}"))
        elif first in STAGES or (first in Recipe.model_fields and first not in ("stages", "rewards")):
            stage = first if first in STAGES else "grpo"
            changes += [(stage, f"{key.key}={json.dumps(value)}") for value in values_for(key)]
    return changes


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the steps: a run that would start ends at once."""
    monkeypatch.setattr(Trainer, "train", lambda self, resume=False: None)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small recipe with each stage."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"}) + "\n" for n in range(8))
    )
    (folder / "empty.jsonl").write_text("")
    files = {}
    for name, stage in STAGES.items():
        files[name] = folder / f"{name}.toml"
        files[name].write_text(f"{HEAD}\n[[stages]]\n{stage}".replace("PAIRS", str(folder / "pairs.jsonl")))
    return files


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the checks of a recipe that found a problem."""
    names: set[str] = set()

    def watched(check: Callable[..., Iterator[RecipeError]]) -> Callable[..., Iterator[RecipeError]]:
        def run(*arguments: Any) -> Iterator[RecipeError]:
            for problem in check(*arguments):
                names.add(check.__name__)
                yield problem

        return run

    monkeypatch.setattr(validate, "RECIPE_CHECKS", tuple(map(watched, validate.RECIPE_CHECKS)))
    checks = {section: tuple(map(watched, of)) for section, of in validate.STAGE_CHECKS.items()}
    monkeypatch.setattr(validate, "STAGE_CHECKS", checks)
    return names


def attempt(words: list[str]) -> tuple[int, str]:
    """(exit code, what was printed). A bug is raised through it."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    text = out.getvalue() + err.getvalue()
    assert code in (0, 2), (words, code, text)
    assert "Traceback" not in text, (words, text)
    assert "\x1b" not in text, (words, "a raw escape sequence reached the terminal")
    if code == 2 and "error " in err.getvalue():
        assert err.getvalue().count("because ") == 1, (words, text)
        assert "fix " in err.getvalue(), (words, text)
    else:
        assert code == 0 or text.strip(), words
    return code, text


@pytest.mark.usefixtures("untrained")
def test_mutated_recipes_work_or_are_refused_with_a_fix(recipes: dict[str, Path], reached: set[str], tmp_path: Path) -> None:
    folder = recipes["grpo"].parent
    generated = key_mutations()
    chosen = random.Random(0).sample(generated, MUTATIONS)
    runs = tmp_path / "runs"
    counts = {0: 0, 2: 0}
    for stage, change in chosen:
        code, _ = attempt(["train", str(recipes[stage]), "--runs", str(runs), "--set", change])
        counts[code] += 1
        assert code == 0 or not runs.exists() or len(list(runs.iterdir())) == counts[0], (change, "a refused run left a folder")
    for changes in TARGETED:
        stage = next((name for name in STAGES for change in changes if change.startswith(f"{name}.")), "grpo")
        places = [
            change.replace("PAIRS", str(folder / "pairs.jsonl")).replace("EMPTY", str(folder / "empty.jsonl"))
            for change in changes
        ]
        sets = [word for change in places for word in ("--set", change)]
        code, text = attempt(["train", str(recipes[stage]), "--runs", str(runs), *sets])
        assert code == 2, (changes, text)
        assert not runs.exists() or len(list(runs.iterdir())) == counts[0], (changes, "a refused run left a folder")
    assert counts[2] > MUTATIONS // 2, counts
    checks = [*validate.RECIPE_CHECKS, *itertools.chain(*validate.STAGE_CHECKS.values())]
    known = {check.__closure__[0].cell_contents.__name__ for check in checks if check.__closure__}
    assert reached <= known
    assert known - reached == set(), "no mutation reaches these checks"


def short(completion: str) -> float:
    return float(len(completion) < 6)


def raising(completion: str) -> float:
    raise KeyboardInterrupt


class Odd:
    name = "odd"


ODD_CALLS: list[dict[str, Any]] = [
    {"prompts": "3+4="},
    {"prompts": {"prompt": "3+4="}},
    {"prompts": [3]},
    {"prompts": [None]},
    {"prompts": [[]]},
    {"prompts": [{"role": "user", "content": "x"}]},
    {"prompts": [[{"role": "user"}]]},
    {"prompts": [{"prompt": 3}]},
    {"prompts": [""]},
    {"prompts": ["3+4=", "\ud83d"]},
    {"prompts": np.array([1, 2])},
    {"prompts": iter(())},
    {"prompts": range(3)},
    {"prompts": object()},
    {"heldout": "1+1="},
    {"heldout": 7},
    {"heldout": ["3+4=", "5+6="], "prompts": ["3+4="]},
    {"rewards": None},
    {"rewards": []},
    {"rewards": {}},
    {"rewards": 3},
    {"rewards": [None]},
    {"rewards": "gone"},
    {"rewards": [("answer", "much")]},
    {"rewards": [(short, float("nan"))]},
    {"rewards": [Odd()]},
    {"rewards": [{"type": 3}]},
    {"rewards": [{"type": "answer", "gone": 1}]},
    {"rewards": [short, short, {"type": "answer", "name": "short"}]},
    {"model": "gone/../gone/x"},
    {"model": 3},
    {"model": ("a", "b", "c")},
    {"model": None, "recipe": "arithmetic"},
    {"recipe": {"name": "x"}},
    {"lora": 8, "model": "tiny"},
    {"lora": {"rank": 0}, "model": "tiny"},
    {"dtype": 16, "model": "tiny"},
    {"device": "tpu", "model": "tiny"},
    {"sinks": [3], "model": "tiny"},
    {"sinks": 3, "model": "tiny"},
    {"evaluation": {"samples": 0}, "model": "tiny"},
    {"evaluation": 3, "model": "tiny"},
    {"group_size": "8", "model": "tiny"},
    {"steps": -1, "model": "tiny"},
    {"seed": -1, "model": "tiny"},
    {"threads": 0, "model": "tiny"},
    {"name": 3, "model": "tiny"},
    {"optimiser": 1e-3, "model": "tiny"},
    {"learning_rate": 1e-3},
    {"resume": "gone"},
    {"resume": 3},
    {"system_prompt": 3, "model": "tiny"},
]


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize("change", ODD_CALLS, ids=[f"{i}-{'-'.join(change)}" for i, change in enumerate(ODD_CALLS)])
def test_odd_calls_raise_the_error_that_a_user_is_shown(tmp_path: Path, change: dict[str, Any]) -> None:
    call: dict[str, Any] = {
        "model": "tiny", "prompts": ["3+4=", "5+6="], "rewards": [short], "quiet": True, "threads": 1,
        "runs_dir": tmp_path / "runs",
    }  # fmt: skip
    with pytest.raises(OncurveError) as raised:
        package.train(**(call | change))
    assert raised.value.because
    assert raised.value.fix
    assert not (tmp_path / "runs").exists()


def commands() -> Iterator[tuple[list[str], Any]]:
    """Every command and command of a group, with its options."""
    for row in COMMANDS:
        command = LazyCommand(*row).load()
        inner = getattr(command, "commands", None)
        if inner:
            yield from (([row[1], name], each) for name, each in inner.items())
        else:
            yield [row[1]], command


ALL_COMMANDS = list(commands())


@pytest.mark.parametrize(("name", "command"), ALL_COMMANDS, ids=[" ".join(name) for name, _ in ALL_COMMANDS])
def test_every_command_refuses_wrong_arguments(
    name: list[str], command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    gone = ["gone/from/here"] * len(arguments)
    required = [word for p in command.params if p.required and p.param_type_name == "option" for word in (p.opts[-1], "1")]
    wrong = [
        [*name, *gone, *required, "--no-such-option"],
        [*name, *gone, *required, "one", "too", "many", "words"],
        *(
            [
                [*name],
                [*name, *gone, *required],
                [*name, *([""] * len(gone)), *required],
                [*name, *(["\x1b[31m"] * len(gone)), *required],
            ]
            if arguments
            else []
        ),
    ]
    for option in command.params:
        if option.param_type_name == "option" and not getattr(option, "is_flag", False):
            wrong += [[*name, *gone, *required, option.opts[-1]]]
            if arguments:
                wrong += [[*name, *gone, *required, option.opts[-1], value] for value in ("", "-1", "gone/x=", "\x1b[2J")]
            elif getattr(option, "type", None) is not None and "int" in str(option.type).lower():
                wrong += [[*name, option.opts[-1], "many"], [*name, option.opts[-1], "-1"]]
    for words in wrong:
        code, text = attempt(words)
        assert code == 2 or (name == ["recipe", "explain"] and words == name), (words, text)
    assert [path.name for path in tmp_path.iterdir()] == [], "nothing is half-written"


def test_the_base_recipes_are_good(recipes: dict[str, Path], tmp_path: Path) -> None:
    for file in [*recipes.values(), write_recipe(tmp_path)]:
        assert load_recipe(file).stages
