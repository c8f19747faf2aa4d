"""Other libraries' progress bars would tear the display apart."""

from __future__ import annotations


def hush() -> None:
    """Silences transformers' and its hub's bars and advice; their errors still come through as exceptions."""
    from logging import CRITICAL

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity(CRITICAL)
