"""The README as a package index shows it, which has none of the files that it links to.

Hatchling calls the hook when it builds a wheel or a source distribution. With ``base`` set beside
it in ``pyproject.toml``, links become addresses below that. Without, a link becomes its text and
the path in the source distribution, and a picture its description: nothing is left that is broken.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(
    r"(?P<picture>!?)\[(?P<text>[^\]]+)\]\((?![a-z]+:|#)(?P<path>[^)\s#]+)(?P<at>#[^)\s]+)?\)"
)


def for_an_index(text: str, base: str = "") -> str:
    """``text`` without links that go to a file beside it.

    Args:
        text: Markdown.
        base: The address of the folder that ``text`` is in, with a slash at its end; empty if the
            files are nowhere to be seen.
    """

    def replaced(link: re.Match[str]) -> str:
        if base:
            address = urljoin(base, link["path"]) + (link["at"] or "")
            return f"{link['picture']}[{link['text']}]({address})"
        return f"*{link['text']}*" if link["picture"] else f"{link['text']} (`{link['path']}`)"

    return LINK.sub(replaced, text)


class CustomMetadataHook(MetadataHookInterface):
    """What ``pyproject.toml`` names as dynamic: the readme."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the readme into ``metadata``."""
        text = Path(self.root, "README.md").read_text("utf-8")
        shown = for_an_index(text, self.config.get("base", ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": shown}
