"""A run that is started from Python: prompts, a reward and options of the stage as `oncurve.train` takes them."""

from __future__ import annotations

import oncurve


def starts_right(completion: str, answer: str) -> float:
    return float(completion.startswith(answer)) + 0.1 * completion[:1].isdigit()


rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
run = oncurve.train(
    model="tiny",
    prompts=rows,
    rewards=[starts_right],
    heldout=rows[:2],
    group_size=4,
    steps=2,
    threads=1,
    out="runs/from_python",
    quiet=True,
    prompts_per_step=2,
    sampling={"max_new_tokens": 4},
    optimiser={"learning_rate": 1e-3},
)
print(run.name, run.accuracy, run.metrics("reward"))
