"""Other libraries' progress bars would tear the display apart."""

from __future__ import annotations


def hush() -> None:
    """Silences the bars and advice of transformers, its hub and bitsandbytes; their errors still come through as exceptions."""
    from logging import CRITICAL, ERROR, getLogger

    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    hub.set_verbosity(CRITICAL)
    getLogger("bitsandbytes").setLevel(ERROR)
