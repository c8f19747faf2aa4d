"""Makes problems of reasoning-gym, inside a worker process (`python -m oncurve.tasks.reasoning_gym_worker`).

Five of its families go through sets of texts, whose order is another one in every process: a worker's is always the same. And
the trainer is spared what the package imports.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from oncurve.workers.child import serve

KEPT = ("numbers", "target", "letters", "factors", "simplified_numerator", "simplified_denominator")
"""What our own checks of answers need of a problem's data."""


@lru_cache(maxsize=512)
def dataset(family: str, seed: int, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=seed, **json.loads(settings))


def answer(job: dict[str, Any]) -> Any:
    """The names of all families, whether settings are sound, or one problem."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    if "family" not in job:
        return sorted(DATASETS)
    data = dataset(job["family"], job["seed"], job["settings"])
    entry = data[job["index"]]
    kept = {name: entry["metadata"][name] for name in KEPT if name in entry["metadata"]}
    scorer = type(data).score_answer is not ProceduralDataset.score_answer
    if entry["answer"] is not None:  # a few families have many answers, and give none
        kept["answer"] = str(entry["answer"])
    return {"question": str(entry["question"]), "kept": kept, "scorer": scorer}


if __name__ == "__main__":
    import reasoning_gym  # noqa: F401

    serve(answer)
