"""Generates problems of reasoning-gym in a worker process (`python -m oncurve.tasks.reasoning_gym_worker`).

Five of its families iterate over sets of strings, whose order differs between processes; a worker's hash seed is fixed. It also
keeps the package's imports out of the trainer.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from oncurve.workers.child import serve

CHECKED_FIELDS = ("numbers", "target", "letters", "factors", "simplified_numerator", "simplified_denominator")
"""The fields of a problem's metadata that our own checks of answers need."""


@lru_cache(maxsize=512)
def dataset(family: str, seed: int, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(family, seed=seed, **json.loads(settings))


def answer(job: dict[str, Any]) -> Any:
    """The names of all families if the job names none, else one problem."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    if "family" not in job:
        return sorted(DATASETS)
    data = dataset(job["family"], job["seed"], job["settings"])
    entry = data[job["index"]]
    columns = {name: entry["metadata"][name] for name in CHECKED_FIELDS if name in entry["metadata"]}
    scorer = type(data).score_answer is not ProceduralDataset.score_answer
    if entry["answer"] is not None:  # None in a few families with many right answers
        columns["answer"] = str(entry["answer"])
    return {"question": str(entry["question"]), "columns": columns, "scorer": scorer}


if __name__ == "__main__":
    import reasoning_gym  # noqa: F401

    serve(answer)
