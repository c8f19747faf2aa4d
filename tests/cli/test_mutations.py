"""What users get wrong, by the hundred: mutated recipes through everything that `oncurve train` checks before the first step,
odd calls of the Python API, and every command with wrong arguments. Each works or is one message with a fix, and leaves nothing
behind. Every error of the validators and loaders must be caused by some mutation: one that none causes is not tested.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import oncurve as package
from oncurve.cli.app import COMMANDS, LazyCommand, main
from oncurve.errors import OncurveError
from oncurve.recipe.keys import RecipeKey, recipe_keys
from oncurve.recipe.load import load_recipe
from oncurve.recipe.schema.recipe import Recipe
from oncurve.rewards.registry import REWARDS
from oncurve.tasks.registry import TASKS
from oncurve.training.trainer import Trainer
from tests.cli.conftest import write_recipe
from tests.faults.error_sites import record_errors, unreached

pytestmark = pytest.mark.slow

MUTATIONS = 300
STAGES = {
    "grpo": 'type = "grpo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 4\nsampling = { max_new_tokens = 16 }\n',
    "ppo": 'type = "ppo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 2\nsampling = { max_new_tokens = 16 }\n',
    "trpo": 'type = "trpo"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 2\nsampling = { max_new_tokens = 16 }\n',
    "distil": 'type = "distil"\nsteps = 2\nprompts_per_step = 2\ngroup_size = 2\nsampling = { max_new_tokens = 16 }\n'
    'teacher = { model = "self", context = "Carry the one." }\n',
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
    ["task={type='file',path='hf://rows.jsonl'}"],
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
    ["ppo.critic.loss_weight=0.1"],
    ["dpo.margin=0.2"],
    ["grpo.kl.on_cpu=true"],
    ["grpo.kl.estimator=k1"],
    ["trpo.optimiser.learning_rate=1e-3"],
    ["grpo.advantage={k=2}"],
    ["grpo.objective=pass_at_k", "grpo.advantage={k=9}"],
    ["grpo.advantage={scale='per_reward',baseline='leave_one_out'}"],
    ["grpo.advantage={scale='per_reward'}", "grpo.kl={beta=0.1,where='reward'}"],
    ["grpo.dro_tau=0.5"],
    ["grpo.correction=tis", "grpo.importance_cap=2.0"],
    ["grpo.curriculum={}", "scale.max_staleness=1", "scale.samplers=1"],
    ["model.dtype=float16", "scale.shard=full", "scale.ranks=2"],
    ["model.dtype=float16", "ppo.critic.trunk=shared"],
    ["grpo.routing_replay=true", "scale.samplers=2"],
    ["grpo.carry_over=2"],
    ["grpo.carry_over=1", "grpo.minibatches=2"],
    ["grpo.carry_over=1", "grpo.curriculum={}"],
    ["task={type='file',path='@rows.jsonl',chat=true,history='template'}", "rejection_sample.steps=2"],
    ["task.numbers=3"],
    ["grpo.curriculum={first_samples=9}"],
    ["grpo.curriculum={first_samples=2,max_group_size=2}"],
    ["grpo.curriculum={first_samples=2}", "grpo.no_signal=resample"],
    ["grpo.curriculum={first_samples=2}", "grpo.objective=pass_at_k"],
    ["rewards=[{type='answer',task='gone'}]"],
    ["task={type='mix',mix=[{type='arithmetic'},{type='guess'}]}", "rewards=[{type='answer',task='arithmetic'}]"],
    ["task={type='mix',mix=[{type='mix'}]}"],
    ["task={type='mix',mix=[{type='guess'},{type='guess'}]}"],
    ["task={type='mix',mix=[{type='guess',name='a b'}]}"],
    ["stages=[{type='grpo',name='a'},{type='grpo',name='a'}]"],
    ["engine.draft=group", "scale.engine=vllm"],
    ["engine.kv_dtype=fp8", "scale.engine=vllm"],
    ["engine.draft=own", "task={type='file',path='@rows.jsonl',chat=true,history='template'}"],
    ["stages=[{type='training_free',model='m',sampling={top_k=4}}]"],
    ["stages=[{type='training_free',model='m',mask_cut=true}]"],
    ["grpo.kl={beta=0.1,refresh_mix=0.5}"],
    ["grpo.kl={beta=0.1,refresh_mix=0.5,refresh_every=1}", "model.lora={rank=2,dora=true}"],
    ["grpo.entropy.kl_cov=0.1"],
    ["grpo.entropy.target=0.2", "grpo.entropy_bonus=5"],
    ["dpo.pairs=PAIRS", "dpo.loss=kto", "dpo.label_column=score", "dpo.completion=chosen"],
    ["grpo.group_size"],
    ["grpo=3"],
    ["name.low=3"],
    ["grpo.objective=gmpo", "grpo.clip={low=0.4,high=0.4,dual=3.0}"],
    ["task={type='agent',path='@rows.jsonl',command='true'}", "scale.engine=vllm"],
    ["task={type='agent',path='@rows.jsonl',command='true'}", "scale.samplers=2"],
    ["task={type='agent',path='@rows.jsonl',command='true'}", "rejection_sample.steps=2"],
    ["task={type='agent',path='@rows.jsonl',command='true'}", "grpo.curriculum={first_samples=2}"],
    ["distil.teachers=[{model='self',context='a'},{model='self',context='b'}]", "distil.teacher_column=level"],
    ["distil.teachers=[{model='self',context='a',name='a'}]"],
    ["distil.teach_by=advantage", "distil.divergence=jsd"],
    ["distil.iterate={every=1}"],
    ["distil.no_signal=resample"],
    ["distil.updates_per_step=2"],
    ["distil.jsd_beta=0.3"],
    ["distil.kl={beta=0.1,where='reward'}"],
    ["distil.clip={low=0.1,high=0.1}"],
    ["grpo.objective=maxrl", "grpo.overlong={buffer=4}"],
    ["grpo.objective=maxrl", "grpo.kl={beta=0.1,where='reward'}"],
    ["task={type='file',path='@rows.jsonl',max_turns=3}"],
    ["task={type='file',path='@rows.jsonl',environment='@own.py:Lacks',environment_options={gone=1}}"],
    ["task={type='file',path='@rows.jsonl',environment='calculator',tools=['@own.py:add']}"],
    ["task={type='file',path='@rows.jsonl',tools=['@own.py:add']}"],
    ["task={type='file'}"],
    ["task={type='file',path='@odd.jsonl'}"],
    ["rewards=[{type='judge',model='m',key_env='GONE_KEY'}]"],
    ["rewards.gone.weight=3"],
    ["gone.key=3"],
    ["stages.grpo.steps=3"],
    ["task={type='file',path='@rows.jsonl',system='Be brief.'}"],
    ["task={type='file',path='@rows.jsonl',answer='gone'}"],
    ["task={type='file',path='@rows.jsonl',prompt_template='{a.b}'}"],
    ["task={type='file',path='@rows.jsonl',environment='gone'}"],
    ["task={type='file',path='@rows.jsonl',environment='@own.py:Needs'}"],
    ["task={type='file',path='@rows.jsonl',environment='@own.py:Lacks'}"],
    *(
        [f"task={{type='file',path='@{name}'}}"]
        for name in (
            "twice.csv",
            "short.csv",
            "semicolons.csv",
            "nul.csv",
            "latin.csv",
            "list.jsonl",
            "half.jsonl",
            "torn.jsonl",
            "latin.jsonl",
            "bad.json",
            "no.gz.jsonl.gz",
            "no.csv.gz",
            "no.parquet",
            "rows.xml",
            "empty.jsonl",
        )
    ),
    ["sft.data=@rows.jsonl"],
    ["sft.data=@number.jsonl"],
    ["task={type='gsm8k',path='@empty.jsonl'}"],
    ["dpo.pairs=@equal.jsonl"],
    ["dpo.pairs=@numbers.jsonl"],
    ["dpo.pairs=@PAIRS", "dpo.prompt=gone"],
    ["reward_model.heldout_share=0.99", "reward_model.data=@one.jsonl"],
    ["reward_model.data=@margins.jsonl", "reward_model.margin=margin"],
    ["reward_model.data=@texts.jsonl", "reward_model.margin=margin"],
    ["reward_model.kind=ratings", "reward_model.completion=chosen"],
    ["reward_model.kind=steps", "reward_model.data=@steps.jsonl"],
    ["task={type='arithmetic',digits=1,heldout=5000}"],
    ["task={type='arithmetic',digits=2,min_digits=3}"],
    ["task={type='arithmetic',digits=2,weights=[1]}"],
    ["task={type='countdown',numbers=3,max_number=2,heldout=4000}"],
    ["task={type='reasoning_gym',families=['chain_sum'],settings={chain_sum={gone=1}}}"],
    ["task={type='agent',path='@rows.jsonl'}"],
    ["task={type='agent',path='@rows.jsonl',function='json:loads',sandbox=true}"],
    ["task={type='agent',path='@rows.jsonl',command='gone-program'}"],
    ["task={type='agent',path='@rows.jsonl',command=\"python 'x\"}"],
    ["rewards=[{type='format',pattern='('}]"],
    ["rewards=[{type='json',rules={type='gone'}}]"],
    ["rewards=[{type='json',schema_file='@gone.json'}]"],
    ["rewards=[{type='json',schema_file='@bad.json'}]"],
    ["rewards=[{type='json',schema_file='@list.json'}]"],
    ["rewards=[{type='language',language='English'}]"],
    ["rewards=[{type='judge',model='m',base_url='gone'}]"],
    ["rewards=[{type='judge',model='m',base_url='http://127.0.0.1:9/v1',template='{a.b}'}]"],
    ["rewards=[{type='process',source='python'}]"],
    ["rewards=[{type='process',source='python',function='@own.py:Lacks',splitter='@gone.py:f'}]"],
    ["model.device=cuda"],
    ["model.template_options={gone=1}"],
    ["model.source=@rows.jsonl"],
    ["model.quantise=nf4", "model.lora={rank=2,dora=true}"],
    ["grpo.patience=1", "task={type='file',path='@rows.jsonl',heldout=0,heldout_share=0.0}"],
    ["task={type='file',path='@long.jsonl'}"],
]
"""Combinations that no change of a single key makes: at least one for each error of the validators and loaders. `@` stands for
the folder of FILES."""
PAIR: dict[str, Any] = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
FILES: dict[str, bytes] = {
    "rows.jsonl": b"".join(b'{"prompt": "%d+1=", "answer": "%d"}\n' % (n, n + 1) for n in range(9)),
    "more.jsonl": b"".join(b'{"prompt": "%d+2=", "answer": "%d"}\n' % (n, n + 2) for n in range(9)),
    "long.jsonl": b"".join(b'{"prompt": "%s", "answer": "%d"}\n' % (b"1+" * 200, n) for n in range(9)),
    "twice.csv": b"prompt,prompt\na,b\n",
    "semicolons.csv": b"question;answer\n1+1=;2\n",
    "short.csv": b"prompt,answer\na\n",
    "nul.csv": b'prompt,answer\n"a\0,b\n',
    "latin.csv": b"prompt,answer\n\xff,b\n",
    "list.jsonl": b"[1]\n",
    "half.jsonl": b'{"prompt": "\\ud83d"}\n',
    "torn.jsonl": b'{"prompt": \n',
    "latin.jsonl": b'{"prompt": "\xff"}\n',
    "bad.json": b"[{]",
    "list.json": b"[]",
    "no.gz.jsonl.gz": b"not gzip",
    "no.csv.gz": b"not gzip",
    "no.parquet": b"not parquet",
    "rows.xml": b"<rows/>",
    "empty.jsonl": b"",
    "odd.jsonl": b'{"prompt": 3}\n',
    "number.jsonl": b'{"prompt": "a", "completion": 3}\n',
    "own.py": b"class Needs:\n    def __init__(self, x): ...\nclass Lacks: ...\n"
    b"def short(completion):\n    return float(len(completion) < 6)\n"
    b"def add(a: int, b: int) -> int:\n    '''\n    Adds.\n\n"
    b"    Args:\n        a: One.\n        b: Two.\n    '''\n    return a + b\n",
    **{
        name: "".join(json.dumps(row) + "\n" for row in rows).encode()
        for name, rows in {
            "one.jsonl": [PAIR],
            "equal.jsonl": [PAIR | {"rejected": "2"}],
            "numbers.jsonl": [PAIR | {"chosen": 2}],
            "margins.jsonl": [PAIR | {"margin": -1}],
            "texts.jsonl": [PAIR | {"margin": "wide"}],
            "steps.jsonl": [PAIR | {"completions": ["a"], "labels": []}],
        }.items()
    },
}

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
        "".join(json.dumps({"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0", "score": n}) + "\n" for n in range(8))
    )
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    files = {}
    for name, stage in STAGES.items():
        files[name] = folder / f"{name}.toml"
        files[name].write_text(f"{HEAD}\n[[stages]]\n{stage}".replace("PAIRS", str(folder / "pairs.jsonl")))
    return files


WATCHED = ("recipe/validate.py", "recipe/load.py", "tasks/**/*.py", "rewards/style/*.py", "rewards/models/*.py")
"""Validators and loaders of recipes, data and rewards. Those of models have tests/faults/test_broken_files.py."""
NOT_BY_A_MUTATION = {
    "is not installed": "the tests' environment has every optional package",
    "check its permissions": "tests may run as root, who may read everything",
    "check the file's permissions": "the same",
    "'a YAML file'": "tests/cli/test_bad_input.py",
    "'not text'": "tests/cli/test_bad_input.py",
    "'no such file'": "tests/cli/test_bad_input.py",
    "'a folder'": "tests/cli/test_bad_input.py",
    "{line}:{column}": "a line that is no TOML: tests/faults/test_fuzz.py",
    "nested too deeply": "tests/faults/test_fuzz.py",
    "'not a file'": "tests/faults/test_damaged_runs.py",
    "can't be downloaded": "tests/tasks/data/test_file_task.py",
    "environment_factory has": "an argument of oncurve.train: tests/agents",
    "'no training prompts'": "lists from Python: the odd calls below; a recipe without them is refused by its stage",
    "FROM_PYTHON": "a run made from Python: tests/cli/test_look.py",
    "task.port": "a port that is taken",
    "solved": "a file of pass rates: tests/training/stages/test_grpo.py",
    "not a trained reward model": "tests/rewards/models/test_reward_model.py",
    "the model's heads are": "the same",
    "hub id that transformers": "the same",
    "has trained a reward model in this run yet": "tests/training/stages/test_iterative_grpo.py",
    "_MAX_TRIES": "a task whose problems run out: tests/tasks/puzzles/test_countdown.py",
    "self._heldout_size": "a family with few problems: tests/rewards/verifiers/test_reasoning_gym.py",
    "COLUMN": "a row with the column that a mix writes: tests/tasks",
}
"""Errors that no recipe causes on its own, by a part of their source, and what tests them."""


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
def test_mutated_recipes_work_or_are_refused_with_a_fix(recipes: dict[str, Path], tmp_path: Path) -> None:
    with record_errors() as reached:
        train_mutated(recipes, tmp_path / "runs")
    assert unreached(WATCHED, reached, NOT_BY_A_MUTATION) == [], "no mutation causes these errors"


def train_mutated(recipes: dict[str, Path], runs: Path) -> None:
    folder = recipes["grpo"].parent
    generated = key_mutations()
    chosen = random.Random(0).sample(generated, MUTATIONS)
    counts = {0: 0, 2: 0}
    for stage, change in chosen:
        code, _ = attempt(["train", str(recipes[stage]), "--runs", str(runs), "--set", change])
        counts[code] += 1
        assert code == 0 or not runs.exists() or len(list(runs.iterdir())) == counts[0], (change, "a refused run left a folder")
    for changes in TARGETED:
        stage = next((name for name in STAGES for change in changes if change.startswith(f"{name}.")), "grpo")
        places = [
            change.replace("@PAIRS", "PAIRS").replace("PAIRS", "@pairs.jsonl").replace("EMPTY", "@empty.jsonl")
            for change in changes
        ]
        places = [change.replace("@", f"{folder}/") for change in places]
        sets = [word for change in places for word in ("--set", change)]
        code, text = attempt(["train", str(recipes[stage]), "--runs", str(runs), *sets])
        assert code == 2, (changes, text)
        assert not runs.exists() or len(list(runs.iterdir())) == counts[0], (changes, "a refused run left a folder")
    assert counts[2] > MUTATIONS // 2, counts
    print(f"{MUTATIONS} changed keys: {counts[2]} refused, {counts[0]} trained; {len(TARGETED)} combinations refused")


FOLLOWED: list[tuple[list[str], str, list[str]]] = [
    (["grpo.name=task"], "choose another name", ["grpo.name=reason"]),
    (["grpo.name=a.b"], "letters, digits, - and _", ["grpo.name=a-b_1"]),
    (["rewards=[{type='answer'},{type='answer'}]"], 'name = "answer_2"',
     ["rewards=[{type='answer'},{type='answer',name='answer_2'}]"]),
    (["rewards=[]"], 'type = "answer"', ["rewards=[{type='answer'}]"]),
    (["rewards=[{type='answer',weight=0.0}]"], "--set rewards.answer.weight=1",
     ["rewards=[{type='answer',weight=0.0}]", "rewards.answer.weight=1"]),
    (["grpo.sampling.max_new_tokens=128"], "raise model.tiny.context",
     ["grpo.sampling.max_new_tokens=128", "model.tiny.context=256"]),
    (["evaluation.max_new_tokens=500"], "less than 128", ["evaluation.max_new_tokens=64"]),
    (["grpo.optimiser.warmup_steps=50"], "--set grpo.optimiser.warmup_steps=2", ["grpo.optimiser.warmup_steps=2"]),
    (["grpo.patience=2"], "set eval_every", ["grpo.patience=2", "grpo.eval_every=1"]),
    (["grpo.group_size=1"], 'objective = "reinforce"', ["grpo.group_size=1", "grpo.objective=reinforce"]),
    (["grpo.group_size=1", "grpo.objective=reinforce", "grpo.no_signal=resample"], '"keep"',
     ["grpo.group_size=1", "grpo.objective=reinforce", "grpo.no_signal=keep"]),
    (["grpo.group_size=1", "grpo.advantage={baseline='none',scale='group'}"], 'advantage.scale = "batch"',
     ["grpo.group_size=1", "grpo.advantage={baseline='none',scale='batch'}"]),
    (["grpo.sampling.temperature=0"], "use 1", ["grpo.sampling.temperature=1"]),
    (["grpo.overlong={buffer=16}"], "less than 16", ["grpo.overlong={buffer=15}"]),
    (["grpo.kl.where=reward"], "set kl.beta (0.04", ["grpo.kl.where=reward", "grpo.kl.beta=0.04"]),
    (["grpo.kl={beta=0.1,where='reward',ratio_weighted=true}"], 'kl.where = "loss"',
     ["grpo.kl={beta=0.1,where='loss',ratio_weighted=true}"]),
    (["grpo.minibatches=3"], "use 2 or less", ["grpo.minibatches=2"]),
    (["grpo.objective=sapo", "grpo.clip={low=0.1,high=0.1}"], "use grpo, dapo or gspo",
     ["grpo.objective=gspo", "grpo.clip={low=0.1,high=0.1}"]),
    (["grpo.clip={low=0.2,high=0.2,dual=1.0}"], "more than 1.2 (3 is usual)", ["grpo.clip={low=0.2,high=0.2,dual=3.0}"]),
    (["grpo.objective=rloo", "grpo.advantage.baseline=mean"], 'objective = "grpo_sequence"',
     ["grpo.objective=grpo_sequence", "grpo.advantage.baseline=mean"]),
    (["grpo.length_budget=100"], 'objective = "dr_grpo"', ["grpo.length_budget=100", "grpo.objective=dr_grpo"]),
    (["sft.patience=1"], "set heldout_share (0.1 is usual) and eval_every",
     ["sft.patience=1", "sft.heldout_share=0.1", "sft.eval_every=1"]),
    (["model.lora={rank=4,targets=['nothing']}"], "k_proj", ["model.lora={rank=4,targets=['k_proj']}"]),
    (["model.quantise=nf4"], "remove it", []),
    (["model.device=cuda"], "'cpu'", ["model.device=cpu"]),
    (["model.template_options={gone=1}"], "remove it", []),
    (["task={type='file',path='gone.jsonl'}"], "--set task.path=FILE",
     ["task={type='file',path='gone.jsonl'}", "task.path=@rows.jsonl"]),
    (["task={type='file',path='@rows.jsonl',prompt='gone'}"], "name the right columns",
     ["task={type='file',path='@rows.jsonl',prompt='prompt'}"]),
    (["task={type='file',heldout_path='@rows.jsonl'}"], "set task.path",
     ["task={type='file',heldout_path='@rows.jsonl'}", "task.path=@more.jsonl"]),
    (["task={type='file',path='@rows.jsonl',answer='gone'}"], "remove task.answer", ["task={type='file',path='@rows.jsonl'}"]),
    (["task={type='file',path='@rows.jsonl',prompt_template='{a.b}'}"], "{column}",
     ["task={type='file',path='@rows.jsonl',prompt_template='{{x}} {prompt}'}"]),
    (["task={type='file',path='@rows.jsonl',environment='gone'}"], "name one of them",
     ["task={type='file',path='@rows.jsonl',environment='calculator'}"]),
    (["task={type='arithmetic',digits=1,heldout=5000}"], "hold out fewer", ["task={type='arithmetic',digits=1,heldout=5}"]),
    (["task={type='arithmetic',digits=2,min_digits=3}"], "use 2 or less", ["task={type='arithmetic',digits=2,min_digits=2}"]),
    (["task={type='arithmetic',digits=2,weights=[1]}"], "give 2 numbers", ["task={type='arithmetic',digits=2,weights=[1,2]}"]),
    (["rewards=[{type='python',function='@own.py:gone'}]"], "name a function that it defines",
     ["rewards=[{type='python',function='@own.py:short'}]"]),
    (["rewards=[{type='python',function='gone.py:short'}]"], "correct the path",
     ["rewards=[{type='python',function='@own.py:short'}]"]),
    (["rewards=[{type='language',language='English'}]"], '"en"', ["rewards=[{type='language',language='en'}]"]),
    (["rewards=[{type='judge',model='m',base_url='gone'}]"], "http://127.0.0.1:8000/v1",
     ["rewards=[{type='judge',model='m',base_url='http://127.0.0.1:8000/v1'}]"]),
    (["rewards=[{type='format',pattern='('}]"], "correct the pattern", ["rewards=[{type='format',pattern='()'}]"]),
    (["sinks=[{type='gone'}]"], "name one of them", ["sinks=[{type='tensorboard'}]"]),
    (["grpo.keep_best=gone"], "use heldout_accuracy, reward", ["grpo.keep_best=reward"]),
    (["ppo.critic.warmup_steps=2"], "less than 2", ["ppo.critic.warmup_steps=1"]),
    (["dpo.margin=0.2"], 'loss = "simpo"', ["dpo.margin=0.2", "dpo.loss=simpo"]),
    (["ppo.critic.loss_weight=0.1"], 'trunk = "shared"', ["ppo.critic={loss_weight=0.1,trunk='shared'}"]),
    (["dpo.chosen=gone"], "name the right column", ["dpo.chosen=chosen"]),
    (["reward_model.kind=ratings", "reward_model.completion=chosen"], "reward_model.aspects",
     ["reward_model.kind=ratings", "reward_model.completion=chosen", "reward_model.aspects=['score']"]),
    (["stages.grpo.steps=3"], "--set grpo.steps=", ["grpo.steps=3"]),
    (["grpo.advantage={k=2}"], 'objective = "pass_at_k"', ["grpo.advantage={k=2}", "grpo.objective=pass_at_k"]),
    (["grpo.curriculum={first_samples=9}"], "use 2", ["grpo.curriculum={first_samples=2}"]),
]  # fmt: skip
"""(a wrong recipe, a part of the fix that is printed, the recipe with that fix)."""


@pytest.mark.usefixtures("untrained")
@pytest.mark.parametrize(("wrong", "fix", "fixed"), FOLLOWED, ids=[wrong[0].replace(" ", "_") for wrong, _, _ in FOLLOWED])
def test_a_fix_works_when_followed(
    wrong: list[str], fix: str, fixed: list[str], recipes: dict[str, Path], tmp_path: Path
) -> None:
    stage = next((name for name in STAGES for change in wrong if change.startswith(f"{name}.")), "grpo")

    def train(changes: list[str]) -> tuple[int, str]:
        sets = [word for change in changes for word in ("--set", change.replace("@", f"{recipes['grpo'].parent}/"))]
        return attempt(["train", str(recipes[stage]), "--runs", str(tmp_path / "runs"), *sets])

    code, text = train(wrong)
    assert code == 2
    assert fix in " ".join(text.partition("fix ")[2].split()), text
    assert train(fixed)[0] == 0, train(fixed)[1]


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
