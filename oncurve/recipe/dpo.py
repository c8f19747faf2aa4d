"""The stage `dpo`: learning from preference pairs, without sampling and without rewards."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from oncurve.recipe.sections import NonNegative, StageBase


class Dpo(StageBase):
    """Direct preference optimisation (Rafailov et al. 2023) on pairs from a file, offline; IPO and SimPO as its variants."""

    type: Literal["dpo"] = "dpo"
    """The stage's type."""
    pairs: str
    """The file of pairs: `.jsonl`, `.json` (either with `.gz`) or `.parquet`, a row for each."""
    prompt: str = "prompt"
    """Column of the prompt: a text or a list of messages. Pairs without it may be whole dialogues that differ in the last
    answer, as messages or as `Human: … Assistant: …`."""
    chosen: str = "chosen"
    """Column of the better completion: a text, or one message."""
    rejected: str = "rejected"
    """Column of the worse completion: a text, or one message."""
    chat: bool = False
    """Send text prompts as a user's message through the model's chat template, not as they are."""
    steps: PositiveInt = 200
    """Optimiser updates."""
    batch_size: PositiveInt = 32
    """Pairs in an update. Drawn in epochs, each shuffled by (seed, epoch)."""
    loss: Literal["dpo", "ipo", "simpo"] = "dpo"
    """`dpo`; `ipo`, whose squared loss stops at a margin of 1/(2β) instead of pushing on; or `simpo`, without a reference."""
    beta: PositiveFloat = 0.1
    """How dear it is to leave the reference: small moves further. simpo's is 2 or more."""
    margin: NonNegative = 0.5
    """γ, of simpo alone: how much better per token the chosen one must be, in units of 1/β."""
