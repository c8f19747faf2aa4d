"""Many agent programs at once: steps of a run whose rollouts are programs that call the policy's endpoint.

    python bench/agent_programs.py MODEL --questions data/gsm8k/train.jsonl --at-once 128     on a GPU
    python bench/agent_programs.py tiny --questions data/gsm8k/train.jsonl --steps 1          to check that the script works

Each agent is a process. It asks the question through OpenAI's client, asks for a second look, and returns its reward. The step
is that of a run with recording: agents, endpoint, sampler and update are on one machine. Prints and writes
bench/results/agent_programs.json: rates, tokens, turns, failures, and how much of the KV cache the second calls found.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from reporting import commit

import oncurve
from oncurve.recipe.load import parse_recipe

RESULTS = Path(__file__).resolve().parent / "results" / "agent_programs.json"
METRICS = ("tokens", "turns", "kv_reuse", "failure_share", "reward", "mismatch_max", "mismatch_kl", "tokens_per_s")
AGENT = """
import os
import re

from openai import OpenAI


def run(row):
    client, model = OpenAI(max_retries=0, timeout=600), os.environ["OPENAI_MODEL"]
    messages = [{"role": "user", "content": row["question"] + "\\n\\nThink step by step. End with the answer in \\\\boxed{}."}]
    for _ in range(2):
        reply = client.chat.completions.create(model=model, messages=messages, max_tokens=400).choices[0].message
        second = {"role": "user", "content": "Check each step, and write the final answer in \\\\boxed{} once more."}
        messages += [{"role": "assistant", "content": reply.content}, second]
    found = re.findall(r"boxed\\{([^{}]*)\\}", reply.content or "")
    return float(bool(found) and found[-1].replace(",", "").strip() == row["answer"].split("####")[-1].replace(",", "").strip())
"""


def recipe(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = {"tiny": {"chat": True}} if args.model == "tiny" else {"dtype": args.dtype}
    return {
        "name": "agent-programs",
        "model": {"source": args.model, **model},
        "task": {
            "type": "agent", "path": str(folder / "rows.jsonl"), "function": f"{folder / 'my_agent.py'}:run",
            "at_once": args.at_once, "timeout_s": 300, "heldout": 1,
        },
        "stages": [{
            "type": "grpo", "steps": args.steps, "prompts_per_step": args.prompts, "group_size": args.group, "eval_every": 0,
            "tokens_per_pack": 16_384, "optimiser": {"learning_rate": 1e-6}, "sampling": {"max_new_tokens": args.new},
        }],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new", type=int, default=1024, help="tokens of a conversation after its first messages")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "my_agent.py").write_text(AGENT)
        lines = args.questions.read_text(encoding="utf-8").splitlines()[: args.prompts * args.steps + 8]
        (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
        run = oncurve.train(parse_recipe(recipe(args, folder)), out=folder / "run", quiet=True)
        table = run.metrics()
        values = {metric: [value for _, value in curve] for metric, curve in table.items()}
    report: dict[str, Any] = {
        "commit": commit(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{key: str(value) for key, value in vars(args).items() if key in ("model", "dtype")},
        **{key: getattr(args, key) for key in ("at_once", "prompts", "group", "new", "steps")},
        "metrics": {key: [round(v, 6) for v in own] for key, own in values.items() if key in METRICS or key.endswith("_s")},
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for key, own in report["metrics"].items():
        print(f"{key:24} {median(own):12.4f}   {own}")


if __name__ == "__main__":
    main()
