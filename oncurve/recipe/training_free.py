"""The stage `training_free`: GRPO without gradients, by words in the prompt."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from oncurve.recipe.sampled import Sampled
from oncurve.recipe.sections import Count


class TrainingFree(Sampled):
    """Training-Free GRPO (Cai et al. 2025): no weight moves. Groups are sampled through an OpenAI-compatible endpoint and
    rewarded; what set the better answers of a group apart from the worse is put into words, and these experiences go into the
    prompt.

    The library of experiences lies in `experience/NAME.md` of the run, to be read, edited and used elsewhere.
    """

    type: Literal["training_free"] = "training_free"
    """The stage's type."""
    model: str
    """The model's name at its endpoint."""
    base_url: str | None = None
    """An OpenAI-compatible endpoint, such as that of `oncurve serve`: `http://localhost:8000/v1`; unset: OpenAI's own."""
    key_env: str = "OPENAI_API_KEY"
    """Environment variable of the key. The key itself is never written in a recipe, and never logged."""
    teacher: str | None = None
    """The model that puts experiences into words, at the same endpoint; unset: the same."""
    library: str | None = None
    """Begin with the experiences of this file; unset: with none."""
    most: PositiveInt = 24
    """Experiences kept at most: one more takes the place of the oldest."""
    measure: bool = True
    """Ask the held-out problems with and without the library, at the end and every `eval_every` steps."""
    reply_tokens: PositiveInt = 512
    """Length limit of what the teacher says."""
    request_seconds: PositiveFloat = 120.0
    """Time limit of a request."""
    retries: Count = 4
    """Tries after a failed request, each after a longer wait."""
    at_once: Annotated[int, Field(ge=1)] = 16
    """Requests under way at the same time."""

    @property
    def uses_policy(self) -> bool:
        return False

    @property
    def moves_policy(self) -> bool:
        return False
