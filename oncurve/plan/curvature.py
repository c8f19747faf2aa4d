"""What a natural gradient (the stage `trpo`) keeps beside the model, and how large a model leaves room for it."""

from __future__ import annotations

from math import ceil

VECTOR_BYTES = 44
"""Per trained parameter: gradient, the five vectors of conjugate gradient, start and step of the search, two derivatives and
one on its way, each in float32."""
TABLES = 8
"""Float32 tables of [tokens, vocabulary] that a second derivative keeps."""


def table_bytes(tokens: int, vocabulary: int, fisher_share: float) -> int:
    """Every token's distribution before the step, and the second derivative's tables of the tokens that it is measured on."""
    return 4 * vocabulary * (tokens + TABLES * ceil(fisher_share * tokens))


def parameters_with_room(memory: int, tables: int) -> int:
    """How many trained parameters so much memory has room for, beside the model itself."""
    return max(0, (memory - tables) // VECTOR_BYTES)
