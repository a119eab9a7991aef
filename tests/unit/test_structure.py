"""docs/structure.md lists every source file, and nothing that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.structure import BEGIN, DOCUMENT, END, listed_files, render, source_files, summary

RENEW = "run `python -m tests.support.structure` from the repository's root"


def test_every_source_file_is_listed_and_no_other() -> None:
    listed, there = set(listed_files(DOCUMENT.read_text(encoding="utf-8"))), set(source_files())
    assert sorted(there - listed) == [], f"files that docs/structure.md does not list; {RENEW}"
    assert sorted(listed - there) == [], f"docs/structure.md lists files that are gone; {RENEW}"


def test_every_line_of_the_list_is_a_sentence() -> None:
    for path, line in listed_files(DOCUMENT.read_text(encoding="utf-8")).items():
        assert len(line.split()) >= 3, path


def test_list_is_read_as_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "examples" / "deep").mkdir(parents=True)
    (tmp_path / "setup.py").write_text('"""Builds it."""\n')
    (tmp_path / "examples" / "a.py").write_text('"""Shows :func:`~etp.wrap.shard_module`\nat work. And more."""\n')
    (tmp_path / "examples" / "deep" / "b.py").write_text('"""Runs::\n\n    python b.py\n"""\n')
    (tmp_path / "examples" / "deep" / "__init__.py").write_text("")
    files = source_files(tmp_path)
    assert files == ["examples/a.py", "examples/deep/b.py", "setup.py"]
    document = f"# Title\n- `x.py`: not in the list\n{BEGIN}\n{render(files, tmp_path)}\n{END}\n- `y.py`: nor this\n"
    assert listed_files(document) == {
        "setup.py": "Builds it.",
        "examples/a.py": "Shows `etp.wrap.shard_module` at work.",
        "examples/deep/b.py": "Runs",
    }


def test_a_file_without_a_docstring_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"bare\.py has no docstring"):
        summary(tmp_path / "bare.py")
