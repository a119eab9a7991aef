"""Processes of a benchmark: what one found is kept whatever becomes of the others, and none outlives the call."""

from __future__ import annotations

import os
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks import spawned
from benchmarks.spawned import run_ranks


def body(rank: int, task: tuple[Path, str], meeting: str, results: Connection) -> None:
    """Rank 0 finds two things; the last rank then does what the task says."""
    assert meeting.startswith("file:")  # which no other process can take, unlike a port
    folder, then = task
    (folder / str(rank)).write_text(str(os.getpid()), encoding="utf-8")
    if rank == 0:
        results.send("one")
        results.send("other")
    if then == "lingers" and rank == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()
    if then in {"fails", "lingers"} and rank == 1:
        raise ValueError("as it was told")
    if then != "ends":
        time.sleep(60)


def ended(folder: Path) -> bool:
    return not any(Path(f"/proc/{file.read_text(encoding='utf-8')}").exists() for file in folder.iterdir())


def test_what_is_found_is_taken_as_it_comes(tmp_path: Path) -> None:
    found: list[str] = []
    run_ranks(body, 2, (tmp_path, "ends"), found.append, 60.0)
    assert found == ["one", "other"]
    assert ended(tmp_path)


@pytest.mark.parametrize("then", ["fails", "lingers"])  # in the latter, its process does not end
def test_a_rank_that_fails_ends_the_others_and_nothing_is_lost(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawned, "_OTHERS_END_S", 0.5)
    found: list[str] = []
    reason = r"^rank 1 ended with ValueError: as it was told, ranks \[0\] were still busy 0.5 s later$"
    with pytest.raises(RuntimeError, match=reason):
        run_ranks(body, 2, (tmp_path, then), found.append, 60.0)
    assert found == ["one", "other"]
    assert ended(tmp_path)


@pytest.mark.slow
def test_no_rank_outlives_the_time(tmp_path: Path) -> None:
    found: list[str] = []
    with pytest.raises(RuntimeError, match=r"^ranks \[0, 1\] were still busy after 5 s$"):
        run_ranks(body, 2, (tmp_path, "sleeps"), found.append, 5.0)
    assert found == ["one", "other"]
    assert ended(tmp_path)


def test_no_rank_outlives_an_interruption(tmp_path: Path) -> None:
    def take(item: str) -> None:
        raise SystemExit(item)

    with pytest.raises(SystemExit, match="one"):
        run_ranks(body, 2, (tmp_path, "sleeps"), take, 60.0)
    assert ended(tmp_path)
