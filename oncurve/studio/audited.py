"""Signs that a reward is being gamed, as `oncurve rewards audit` finds them, over a sample of a run's steps."""

from __future__ import annotations

from typing import Any

from oncurve.rewards.audit import History, Seen, audit
from oncurve.runs.folder import RunFolder
from oncurve.studio.finding import finite, reading
from oncurve.studio.groups import EXCERPT, shown_text

MOST_STEPS = 24
MOST_COMPLETIONS = 4000
"""What is read at most: steps spread evenly over the stage, so that a page comes up at once however long the run was."""


def spread(last: int, most: int) -> list[int]:
    """At most so many of the steps 1 to ``last``, evenly, both ends among them."""
    if last <= most:
        return list(range(1, last + 1))
    return sorted({1 + round(place * (last - 1) / (most - 1)) for place in range(most)})


def audit_data(run: RunFolder) -> dict[str, Any]:
    """What is worth a look, with completions to look at; nothing where no stage has sampled groups."""
    with reading(run) as store:
        stage = store.last_sampled()
        if stage is None:
            return {"stage": None, "steps": 0, "signals": []}
        size = sum(group.completions for group in store.groups(stage.name, stage.done))
        chosen = spread(stage.done, max(6, min(MOST_STEPS, MOST_COMPLETIONS // max(1, size))))
        steps = [(step, store.step(stage.name, step).groups) for step in chosen]
        evals = store.evals(stage.name)
    signals = audit(History.of(steps, evals))
    told = [{"name": s.name, "what": s.what, "examples": [_example(seen) for seen in s.examples]} for s in signals]
    return {"stage": stage.name, "steps": len(steps), "signals": told}


def _example(seen: Seen) -> dict[str, Any]:
    words = {"prompt": shown_text(seen.prompt)[:EXCERPT], "text": shown_text(seen.text)[:EXCERPT]}
    return {"step": seen.step, "group": seen.group, "total": finite(seen.scored.total), **words}
