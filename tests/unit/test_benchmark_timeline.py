"""Where the time of a push went: functions are watched in processes that do not know it, and printed for one push."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.refit_timeline import PUSH, WATCHED, main, read, watch


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_watched_function_exists() -> None:
    for watched in WATCHED:
        module, _, name = watched.partition(":")
        assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module))), watched


def test_calls_are_noted_in_a_process_that_does_not_know_it(tmp_path: Path) -> None:
    code = """
import threading
from megatron_patches.refit.transports.pump import send_version
def fail():
    try:
        send_version(None, None, 0, None)
    except AttributeError:
        pass
one = threading.Thread(target=fail, name="a sender")
one.start()
one.join()
"""
    environment = {**os.environ, **watch(tmp_path / "there")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    (call,) = read(tmp_path / "there")
    assert call.name == "megatron_patches.refit.transports.pump:send_version"
    assert call.thread == "a_sender"
    assert 0 <= call.ended - call.began < 10


def test_a_push_is_printed_as_one_line_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "1.txt").write_text(f"5.0 5.1 MainThread {PUSH}\n6.0 6.3 MainThread {PUSH}\n", encoding="utf-8")
    (tmp_path / "2.txt").write_text(
        "5.02 5.03 one megatron_patches.refit.a:b\n"
        "5.04 5.06 one megatron_patches.refit.a:b\n"
        "5.2 5.3 one megatron_patches.refit.a:b\n",
        encoding="utf-8",
    )
    assert main([str(tmp_path), "--push", "0"]) == 0
    first, _, whole, part = capsys.readouterr().out.splitlines()
    assert first == "2 pushes of 100.0 300.0 ms"
    assert whole.split() == ["0.0", "100.0", "100.00", "1", "1", "MainThread", "trainer.session:RefitSession._push"]
    assert part.split() == ["20.0", "60.0", "30.00", "2", "2", "one", "a:b"]
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[:3] == ["0.0", "300.0", "300.00"]
    assert main([str(tmp_path), "--push", "2"]) == 1
    assert capsys.readouterr().err == f"{tmp_path} has 2 pushes\n"
