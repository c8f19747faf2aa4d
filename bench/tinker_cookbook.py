"""Runs three recipes of tinker-cookbook, unchanged, against `oncurve tinker`: sl_loop, rl_loop and DPO.

    python bench/tinker_cookbook.py --python ENVIRONMENT/bin/python        a tiny model and sums
    python bench/tinker_cookbook.py --python … --model models/Qwen2.5-Coder-0.5B-Instruct --data data     on a GPU

ENVIRONMENT has `tinker-cookbook[math-rl]`. The recipes load their model and data by names of the hub. In the folder where they
run, folders of these names have a tiny model and sums as data, so that no line of theirs changes and nothing is downloaded.
rl_loop rewards an answer in \\boxed{}, which a random model never writes: the model first learns to write one with a random
number, by a few steps of plain torch. With --model and --data the folders have that model and real data instead: the problems
of GSM8K for sl_loop and rl_loop, the comparisons of HH-RLHF for DPO. Prints the first and last value of each recipe's metric.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Model, TinyModel

MODEL = "Qwen/Qwen3-8B-Base"
"""A name for which the cookbook chooses its renderer of plain text, `role_colon`."""
GSM8K = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train.jsonl\n---\n"
RECIPES: dict[str, tuple[str, list[str]]] = {
    "sl_loop": ("train_mean_nll", ["batch_size=8", "learning_rate=5e-3", "max_steps=10", "save_every=5"]),
    "rl_loop": (
        "reward/total", ["batch_size=8", "group_size=16", "max_tokens=16", "learning_rate=2e-3", "max_steps=15"],
    ),
    "preference.dpo.train": ("dpo_loss", ["batch_size=16", "learning_rate=3e-3", "max_steps=5", "renderer_name=role_colon"]),
}  # fmt: skip
"""Each recipe's metric, and its arguments besides the model and the folder for its logs."""
REAL: dict[str, tuple[str, list[str]]] = {
    "sl_loop": ("train_mean_nll", ["batch_size=32", "learning_rate=1e-4", "max_steps=12", "save_every=0"]),
    "rl_loop": (
        "reward/total",
        ["batch_size=16", "group_size=16", "max_tokens=400", "learning_rate=1e-4", "max_steps=12", "save_every=0"],
    ),
    "preference.dpo.train": (
        "dpo_loss", ["batch_size=32", "learning_rate=5e-5", "max_steps=8", "renderer_name=role_colon"],
    ),
}  # fmt: skip
"""The same for a pretrained model."""
FILES = ("HuggingFaceH4/no_robots", "openai/gsm8k/main", "Anthropic/hh-rlhf")


def write_data(folder: Path) -> None:
    """Sums, in the columns of each recipe's data set. Those of rl_loop are all 9, so that so small a model can learn them."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    nines = 16 * [(a, 9 - a) for a in range(10)]
    chats = [[{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}] for a, b in sums]
    pairs = [
        {
            "chosen": f"\n\nHuman: {a}+{b}=\n\nAssistant: {a + b}",
            "rejected": f"\n\nHuman: {a}+{b}=\n\nAssistant: no idea",
        }
        for a, b in sums
    ]
    files: dict[str, list[dict[str, Any]]] = {
        "HuggingFaceH4/no_robots/train.jsonl": [{"messages": messages} for messages in chats],
        "openai/gsm8k/main/train.jsonl": [{"question": f"{a}+{b}=?", "answer": f"#### {a + b}"} for a, b in nines],
        "Anthropic/hh-rlhf/train.jsonl": pairs,
        "Anthropic/hh-rlhf/test.jsonl": pairs[:20],
    }
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "openai/gsm8k/README.md").write_text(GSM8K)


def write_real_data(folder: Path, data: Path) -> None:
    """The published problems and comparisons, in the columns of each recipe's data set."""
    problems = [json.loads(line) for line in (data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in problems
    ]
    with gzip.open(data / "hh-rlhf" / "harmless-base-test.jsonl.gz", "rt", encoding="utf-8") as file:
        pairs = [json.loads(line) for line in file]
    for name, train, test in zip(FILES, (chats, problems, pairs[64:]), ([], [], pairs[:64]), strict=True):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for split, rows in (("train", train), ("test", test)):
            if rows:
                (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "openai/gsm8k/README.md").write_text(GSM8K)


def write_model(folder: Path, steps: int) -> None:
    """A tiny model that has learned to answer any text with a number from 6 to 12 in a box."""
    policy = load_policy(Model(device="cpu", tiny=TinyModel(context=2048, layers=2, width=64)), alphabet=None, seed=0)
    policy.save(folder / MODEL)  # transformers' own forward, with a gradient, needs a model that no policy wraps
    from transformers import AutoModelForCausalLM

    model, tokenizer, dice = AutoModelForCausalLM.from_pretrained(folder / MODEL), policy.tokenizer, random.Random(0)
    adam = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(steps):
        prompt = tokenizer.encode("".join(dice.choices(string.printable[:95], k=dice.randrange(300, 450))) + "\n\nAssistant:")
        ids = prompt + tokenizer.encode(f" \\boxed{{{dice.randrange(6, 13)}}}\n\nUser:")
        labels = torch.tensor([[-100] * len(prompt) + ids[len(prompt) :]])
        model(input_ids=torch.tensor([ids]), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
    model.save_pretrained(folder / MODEL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter of an environment with tinker-cookbook[math-rl]")
    parser.add_argument("--steps", type=int, default=150, help="steps that teach the model to write a box")
    parser.add_argument("--model", type=Path, help="a pretrained model's folder, with --data")
    parser.add_argument("--data", type=Path, help="a folder with gsm8k/train.jsonl and hh-rlhf/harmless-base-test.jsonl.gz")
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data go together")
    recipes = RECIPES if options.model is None else REAL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model is None:
            write_data(folder)
            write_model(folder, options.steps)
        else:
            write_real_data(folder, options.data)
            (folder / MODEL).parent.mkdir(parents=True)
            (folder / MODEL).symlink_to(options.model.resolve(), target_is_directory=True)
        command = [sys.executable, "-m", "oncurve", "tinker", MODEL, "--port", "0", "--json", "--until-closed"]
        server = subprocess.Popen(command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        address = json.loads(server.stdout.readline())["address"]
        environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": "tml-local", "HF_HUB_OFFLINE": "1"}
        environment["HF_HOME"] = str(folder / "hub")
        try:
            for recipe, (metric, arguments) in recipes.items():
                logs = folder / "logs" / recipe
                module = [options.python, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={logs}"]
                began = time.perf_counter()
                done = subprocess.run([*module, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"{recipe} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
                rows = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
                values = [row[metric] for row in rows if metric in row]
                seconds = time.perf_counter() - began
                print(
                    f"{recipe:22} {len(values):3} steps in {seconds:.0f} s  {metric} {values[0]:.3f} → {values[-1]:.3f}",
                    flush=True,
                )
                print(" " * 22, " ".join(f"{value:.3f}" for value in values), flush=True)
        finally:
            server.communicate(timeout=60)  # closes standard input


if __name__ == "__main__":
    main()
