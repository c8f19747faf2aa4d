"""The project's description on a package index: README.md without links into the repository, which an index can't follow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"!?\[([^\]]+)\]\((?![a-z]+://)[^)]*\)")


class DescriptionHook(MetadataHookInterface):
    """Sets `readme`, which pyproject.toml declares as dynamic."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": RELATIVE_LINK.sub(r"\1", text)}
