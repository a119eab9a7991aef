"""Keeps the list of files in docs/structure.md, one line each, taken from the first sentence of their docstrings.

::

    python -m tests.support.structure        # from the repository's root: rewrites the list

To change a line, change the docstring.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "structure.md"
FOLDERS = ("etp", "megatron_patches", "examples", "benchmarks", "tests/support")
BEGIN, END = "<!-- files: begin -->", "<!-- files: end -->"
ENTRY = re.compile(r"^- `(?P<name>[^`]+)`: (?P<summary>.+)$")


def source_files(root: Path = ROOT) -> list[str]:
    """Every Python file that the document has to list, as paths from the root. Tests are listed by folder only."""
    files = [file for folder in FOLDERS for file in (root / folder).rglob("*.py")]
    return [*sorted(file.relative_to(root).as_posix() for file in files if file.stat().st_size), "setup.py"]


def listed_files(document: str) -> dict[str, str]:
    """Path and line of every file that the document lists."""
    listed = {}
    folder = ""
    for line in document.partition(BEGIN)[2].partition(END)[0].splitlines():
        if line.startswith("### "):
            folder = line.removeprefix("### ").strip("` ").removesuffix("/")
        elif (entry := ENTRY.match(line)) is not None:
            listed[f"{folder}/{entry['name']}".removeprefix("./")] = entry["summary"]
    return listed


def summary(file: Path) -> str:
    """First sentence of a file's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        raise ValueError(f"{file} has no docstring to describe it")
    paragraph = " ".join(docstring.split("\n\n")[0].split()).replace("``", "`")
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", paragraph)
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", plain)[0].removesuffix("::").removesuffix(":")


def render(files: Iterable[str], root: Path = ROOT) -> str:
    """The list, grouped by folder."""
    lines: list[str] = []
    current = None
    for path in sorted(files, key=lambda path: (path.rpartition("/")[0], path)):
        folder, _, name = path.rpartition("/")
        if folder != current:
            lines += ["", f"### `{folder or '.'}/`", ""]
            current = folder
        lines.append(f"- `{name}`: {summary(root / path)}")
    return "\n".join(lines).strip("\n")


def main() -> None:
    """Rewrite the list in the document."""
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOCUMENT.write_text(f"{before}{BEGIN}\n\n{render(source_files())}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
