"""A server that does not start: it is tried again where another process was at its port, and else says why."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from benchmarks import vllm_server
from examples import vllm_process
from examples.vllm_process import ServerError, new_process, starting_server

SERVER = """
import http.server, pathlib, sys
def main(tries, taken):
    port = int(sys.argv[sys.argv.index("--port") + 1])
    count = len(list(tries.iterdir()))
    (tries / str(count)).touch()
    if count < taken:
        print("RuntimeError: The server socket has failed to listen: EADDRINUSE, message: address already in use")
        sys.exit(1)
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200); self.end_headers()
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> tuple[Path, Path]:
    """What stands for an engine's interpreter, and the folder in which it leaves a file for each start."""
    tries, script = tmp_path / "tries", tmp_path / "python"
    tries.mkdir()
    return script, tries


def write(script: Path, last: str) -> None:
    script.write_text(f"#!{sys.executable}\n{SERVER}\n{last}\n")
    script.chmod(0o755)


def start(tmp_path: Path, script: Path) -> bool:
    launch = functools.partial(new_process, python=str(script))
    with starting_server(tmp_path, "model", "etp", (), {}, tmp_path / "log", launch) as server:
        server.wait()
        return server.process.poll() is None


def test_a_port_that_another_process_took_is_no_failure(tmp_path: Path, python: tuple[Path, Path]) -> None:
    script, tries = python
    write(script, f"main(pathlib.Path({str(tries)!r}), 2)")
    assert start(tmp_path, script)
    assert len(list(tries.iterdir())) == 3


def test_taken_ports_end_the_third_try(tmp_path: Path, python: tuple[Path, Path]) -> None:
    script, tries = python
    write(script, f"main(pathlib.Path({str(tries)!r}), 9)")
    with pytest.raises(ServerError, match=r"address already in use$"):
        start(tmp_path, script)
    assert len(list(tries.iterdir())) == 3


def test_the_first_error_is_the_last_line(tmp_path: Path, python: tuple[Path, Path]) -> None:
    script, _ = python
    said = (
        "(Server) WARNING 11-27 This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.",
        "(Engine) ValueError: no memory",
        "RuntimeError: Engine failed. See above",
    )
    write(script, f"print({chr(10).join(said)!r})\nsys.exit(1)")
    with pytest.raises(ServerError) as caught:
        start(tmp_path, script)
    assert str(caught.value).splitlines()[-1] == "vLLM did not start: (Engine) ValueError: no memory"


def test_a_server_that_does_not_answer_says_so(
    tmp_path: Path, python: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, _ = python
    write(script, "import time\ntime.sleep(60)")
    monkeypatch.setattr(vllm_process, "START_TIMEOUT_S", 1.0)
    with pytest.raises(ServerError, match=r"it did not answer within 1 s$"):
        start(tmp_path, script)


@pytest.mark.parametrize(("visible", "given"), [("", "1,2"), ("4,5,7,6", "5,7"), ("GPU-a,GPU-b,GPU-c", "GPU-b,GPU-c")])
def test_a_server_of_a_benchmark_gets_the_gpus_that_the_process_sees(
    visible: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables_of_server: dict[str, str] = {}

    @contextlib.contextmanager
    def stop(*arguments: object, **_: object) -> Iterator[None]:
        variables = arguments[4]
        assert isinstance(variables, Mapping)
        variables_of_server.update(variables)
        raise ServerError("far enough")
        yield

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(vllm_server, "starting_server", stop)
    with pytest.raises(ServerError), vllm_server.serve(tmp_path, "etp", (1, 2), (), tmp_path / "log"):
        pass
    assert variables_of_server["CUDA_VISIBLE_DEVICES"] == given
