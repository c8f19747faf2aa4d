"""The section of a recipe that names where else a run's numbers go. The run's own database has everything in any case."""

from __future__ import annotations

from typing import Literal

from oncurve.recipe.sections import Section


class Sink(Section):
    """One more place for the curves, for those who live there already. A sink that fails never stops a run."""

    type: Literal["tensorboard", "wandb", "trackio"]
    """`tensorboard` writes RUN/tensorboard; `wandb` (Weights & Biases) and `trackio` go to their own projects. Each needs its
    package: `pip install 'oncurve[TYPE]'`."""
    project: str = "oncurve"
    """The project of wandb or trackio; the run is called there as it is here."""
    offline: bool = False
    """With wandb: keep everything in RUN/wandb, for `wandb sync` later. trackio and tensorboard are local anyway."""
