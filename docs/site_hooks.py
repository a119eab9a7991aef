"""Hooks of the documentation site (mkdocs.yml): the pages in the repository's root, and links to source files.

The pages are written for a code host, where a link may lead to any file of the repository. On the site, a link to
another page leads there, and a link to a source file leads to the code host, or becomes plain text if none is known.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages outside docs/, and what they are on the site."""

_SOURCES = {page: source for source, page in ROOT_PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
_BADGES = re.compile(r"^\[!\[.*\n", re.MULTILINE)
_FENCED = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root."""
    from mkdocs.structure.files import File

    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point the links of a page at the site's pages, or at the code host."""
    return for_site(markdown, page.file.src_uri, config.repo_url or "")


def for_site(markdown: str, page: str, repository: str) -> str:
    """The text of a page as the site needs it.

    Args:
        markdown: the text as it is in the repository.
        page: the page's path on the site, such as ``performance/history.md``.
        repository: address of the repository; "" if it is not known.
    """
    source = _SOURCES.get(page, f"docs/{page}")

    def link(found: re.Match[str]) -> str:
        picture, text, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else "")
        if on_site and not (ROOT / path).is_dir():
            relative = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
            return f"{picture}[{text}]({relative}{anchor})"
        if not repository or picture:
            return text
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"[{text}]({repository.rstrip('/')}/{kind}/main/{path}{anchor})"

    # A block of code may show a link; it stays as it is.
    parts = _FENCED.split(_BADGES.sub("", markdown))
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)
