"""Other libraries' progress bars would tear the display apart."""

from __future__ import annotations


def hush() -> None:
    """Silences transformers' bars and advice; its errors still come through as exceptions."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
