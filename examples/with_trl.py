"""Train with TRL's GRPOTrainer and with Oncurve, using the same reward function, the same data and the same initial weights.

Prints the mean reward by step of both runs, then a table of TRL options and the recipe keys that correspond to them.

    pip install trl==1.16.0 datasets
    python examples/with_trl.py
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from datasets import Dataset
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PrinterCallback
from transformers.utils import logging
from trl import GRPOConfig, GRPOTrainer

import oncurve
from oncurve.models.loading.load import load_policy
from oncurve.recipe.schema.model import Model
from oncurve.recipe.trl.options import TRL_OPTIONS

DATA = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)])
PROMPTS, GROUP, TOKENS, RATE = 8, 8, 4, 1e-3


def starts_right(completions: Sequence[str], answer: Sequence[str], **_: object) -> list[float]:
    """A reward in TRL's form: lists in, a list out. 1 for the right number, partial credit for its first digit or any digit."""
    return [_credit(completion.strip(), right) for completion, right in zip(completions, answer, strict=True)]


def _credit(text: str, right: str) -> float:
    if text.startswith(right):
        return 1.0
    return 0.5 if text[:1] == right[0] else 0.1 if text[:1].isdigit() else 0.0


def with_trl(model: Path, steps: int, folder: Path) -> list[float]:
    """Mean reward by step with TRL's trainer."""
    config = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=TOKENS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        use_cpu=True,
    )
    trainer = GRPOTrainer(str(model), starts_right, args=config, train_dataset=DATA)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry][:steps]


def with_oncurve(model: Path, steps: int, folder: Path) -> list[float]:
    """Mean reward by step with Oncurve."""
    run = oncurve.train(
        model=model,
        prompts=DATA,
        rewards=[starts_right],
        group_size=GROUP,
        steps=steps,
        prompts_per_step=PROMPTS,
        sampling={"max_new_tokens": TOKENS},
        optimiser={"learning_rate": RATE},
        out=folder,
        quiet=True,
    )
    return [reward for _, reward in run.metrics("reward")]


def options_table() -> Table:
    """TRL options and their recipe keys. `docs/from-trl.md` also lists the options without a counterpart."""
    table = Table(box=None, pad_edge=False)
    for head in ("TRL", "recipe"):
        table.add_column(head, no_wrap=True)
    table.add_column("what differs", overflow="fold")
    for name, option in TRL_OPTIONS.items():
        if option.key is not None:
            table.add_row(name, option.key, Text(option.remark))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        load_policy(Model(), alphabet="0123456789+= ", seed=0).save(folder / "model")
        theirs = with_trl(folder / "model", steps, folder / "trl")
        ours = with_oncurve(folder / "model", steps, folder / "oncurve")
    print("mean reward by step (same reward function and data, different random numbers)")
    for step, (trl, own) in enumerate(zip(theirs, ours, strict=True), 1):
        print(f"  step {step:2}   TRL {trl:.2f}   Oncurve {own:.2f}")
    print()
    Console(highlight=False).print(options_table())


if __name__ == "__main__":
    main()
