"""The documentation site has every page, and its links lead where those of the repository do."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HOST = "https://example.org/etp"


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    """docs/site_hooks.py, which mkdocs loads by its path too."""
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "docs" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_navigation_has_every_page_once(hooks: ModuleType) -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"[\w/]+\.md$", text.partition("\nnav:\n")[2], re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")]
    tables = {page for page in pages if page.startswith("performance/")} - {"performance/history.md"}
    assert sorted(listed) == sorted({*pages, *hooks.ROOT_PAGES.values()} - tables)


@pytest.mark.parametrize(
    ("page", "text", "expected"),
    [
        ("index.md", "[rl](docs/rl.md#trl)", "[rl](rl.md#trl)"),
        ("index.md", "![plot](docs/rl/grpo.png)", "![plot](rl/grpo.png)"),
        ("index.md", "[licence](LICENSE)", f"[licence]({HOST}/blob/main/LICENSE)"),
        ("rl.md", "[README](../README.md#install)", "[README](index.md#install)"),
        ("rl.md", "[two\nlines](../examples/grpo/train.py)", f"[two\nlines]({HOST}/blob/main/examples/grpo/train.py)"),
        ("performance/history.md", "[up](../performance.md)", "[up](../performance.md)"),
        ("performance.md", "[all](performance)", f"[all]({HOST}/tree/main/docs/performance)"),
        ("performance.md", "[`x`](#method) [y](https://a.b/c.md)", "[`x`](#method) [y](https://a.b/c.md)"),
        ("rl.md", "```\n[a](../b.py)\n```\n", "```\n[a](../b.py)\n```\n"),
    ],
)
def test_links_lead_to_pages_or_to_the_code_host(hooks: ModuleType, page: str, text: str, expected: str) -> None:
    assert hooks.for_site(text, page, HOST) == expected


def test_links_to_sources_are_plain_text_where_no_code_host_is_known(hooks: ModuleType) -> None:
    assert hooks.for_site("see [`a`](../setup.py) and [b](rl.md)", "x.md", "") == "see `a` and [b](rl.md)"


def test_badges_are_left_out(hooks: ModuleType) -> None:
    assert hooks.for_site("# T\n\n[![ci](../../a.svg)](../../a)\n\ntext\n", "index.md", HOST) == "# T\n\n\ntext\n"
