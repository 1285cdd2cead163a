"""What mkdocs does to a page that a code host does not: links into the code become its paths, and marks are shown."""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((\.\./[^)]+)\)")
MARK = re.compile(r"^<!-- (needs: [^\n]*|run by: [^\n]*) -->\n", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """The page as the site shows it: the code is not part of the site."""
    shown = OUTSIDE.sub(lambda link: f"{link[1]}" if "/" in link[1] else f"{link[1]} (`{link[2][3:]}`)", markdown)
    return MARK.sub(lambda mark: f"<small>{mark[1]}</small>\n\n", shown)
