"""TRL's GRPO step on the model and work of step.py, as its own trainer does it; prints a line `RESULT {…}` for each β.

One process measures all β, because vLLM's start takes longer than the steps. The trainer is created with the first β, which
must be the largest (if it is above 0 the reference is loaded); the β is changed after its steps. Each β has a warm-up step.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from importlib import metadata
from statistics import median
from typing import Any

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--size", default="0.6b")
for name, value in (("prompts", 32), ("group", 8), ("prompt", 128), ("new", 256), ("steps", 3), ("micro", 16)):
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--betas", default="0.04,0", help="KL weights, largest first")
parser.add_argument("--vllm", action="store_true")
parser.add_argument("--memory-share", type=float, default=0.25, help="fraction of GPU memory for vLLM")
args = parser.parse_args()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if args.vllm:  # set before vLLM is imported: one process, no launcher
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from random_models import make_model, make_tokenizer, random_reward, shape_of, texts  # noqa: E402
from transformers import TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

ON_GPU = torch.cuda.is_available()
BETAS = [float(beta) for beta in args.betas.split(",")]
ROWS = args.prompts * args.group
MICRO = min(args.micro, ROWS)
EACH = args.steps + 1


def now() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


class StepClock(TrainerCallback):  # type: ignore[misc]
    """Sets the β of each step, times it, and prints the result of a β as soon as its steps are done."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.began = 0.0
        self.steps: list[float] = []
        self.sampled: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.steps:
            self.trainer.beta = BETAS.pop(0)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
        self.began = now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.steps.append(now() - self.began)
        if len(self.steps) == EACH:
            self._tell()
            self.steps, self.sampled = [], []

    def _tell(self) -> None:
        steps, sampled = self.steps[1:], self.sampled[1:]
        report = {
            "beta": self.trainer.beta, "steps_s": [round(s, 3) for s in steps], "step_s": round(median(steps), 3),
            "gen_s": round(median(sampled), 3), "micro": MICRO,
            "versions": {name: metadata.version(name) for name in ("trl", "vllm")[: 1 + args.vllm]},
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if ON_GPU else None,
        }  # fmt: skip
        print("RESULT", json.dumps(report), flush=True)


def config(folder: str) -> GRPOConfig:
    exact = {"ignore_eos": True} if args.vllm else {"min_new_tokens": args.new}
    return GRPOConfig(
        output_dir=f"{folder}/out", per_device_train_batch_size=MICRO, gradient_accumulation_steps=ROWS // MICRO,
        num_generations=args.group, max_completion_length=args.new, max_steps=EACH * len(BETAS), beta=BETAS[0],
        learning_rate=1e-6, logging_steps=1, report_to=[], save_strategy="no", bf16=ON_GPU, use_cpu=not ON_GPU,
        gradient_checkpointing=False, use_vllm=args.vllm, vllm_mode="colocate", vllm_gpu_memory_utilization=args.memory_share,
        temperature=1.0, model_init_kwargs={"dtype": "bfloat16" if ON_GPU else "float32"}, generation_kwargs=exact,
        disable_tqdm=True,
    )  # fmt: skip


def main() -> None:
    words = shape_of(args.size)["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda" if ON_GPU else "cpu")
        make_model(args.size, device, torch.bfloat16 if ON_GPU else torch.float32).save_pretrained(folder)
        tokenizer = make_tokenizer(words)
        tokenizer.save_pretrained(folder)
        rows = [{"prompt": text} for text in texts(args.prompts * (EACH * len(BETAS) + 1), args.prompt, words)]
        clock = StepClock()
        trainer = GRPOTrainer(
            model=folder, reward_funcs=random_reward, args=config(folder), train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer, callbacks=[clock],
        )  # fmt: skip
        clock.trainer, generate = trainer, trainer._generate

        def timed(*given: Any, **named: Any) -> Any:
            start = now()
            out = generate(*given, **named)
            clock.sampled.append(now() - start)
            return out

        trainer._generate = timed
        trainer.train()


main()
