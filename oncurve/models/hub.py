"""Names on a hub: found out at once where they can't be had, for the hub's own library goes on trying for half a minute."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from oncurve.errors import ModelError


def check_reachable(source: str) -> None:
    """Refuses a name that is neither a folder nor cached, where the hub's address can't even be looked up.

    Behind a proxy it is the proxy that looks addresses up, so nothing is said there.
    """
    if Path(source).exists() or constants.HF_HUB_OFFLINE or getproxies() or _is_cached(source):
        return
    host = urlsplit(constants.ENDPOINT).hostname or ""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ModelError(
            source,
            "no such folder, and no model of that name in the hub's cache",
            because=f"it could only be fetched, and {host} can't be reached from here ({error.strerror or error})",
            fix="check the path, or see `oncurve models` for what is on this machine",
        ) from None


def _is_cached(source: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(source, "config.json"), str)
    except HFValidationError:  # no name that a hub could have: loading tells of it
        return True
