"""Templates: copies have what was imported and nothing of each other, and say how they ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.template import Template

LIMIT_S = 60.0
MARK = "tests.unit.test_template.mark"


def prepare() -> None:
    """Leave a mark that only copies can have."""
    sys.modules[MARK] = sys


def prepare_badly() -> None:
    raise ImportError("nothing to be found")


def prepare_with_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(LIMIT_S,), daemon=True).start()


def prepare_with_a_device() -> None:
    vars(sys.modules["__main__"])["CUDA_DEVICES"] = "/dev/zero"
    os.open("/dev/zero", os.O_RDONLY)


def tell(said: str) -> None:
    """What this copy is like, and a change that no other one may see."""
    is_changed, is_leader = "CHANGED" in os.environ, os.getsid(0) == os.getpid()
    sys.stdout.write(f"{said} {MARK in sys.modules} {os.environ.get('OF_THE_COPY')} {is_changed} {is_leader}\n")
    os.environ["CHANGED"] = "yes"


def write(descriptor: int, said: str) -> None:
    os.write(descriptor, said.encode())


def end(how: str) -> None:
    if how == "exit":
        sys.exit(7)
    if how == "raise":
        raise ValueError("as it was told to")
    os.kill(os.getpid(), signal.SIGKILL)


def sleep() -> None:
    time.sleep(LIMIT_S)


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    template = Template(prepare, {})
    yield template
    template.close()


def test_copies_begin_alike_whatever_another_has_done(template: Template, tmp_path: Path) -> None:
    for number in range(2):
        output = tmp_path / str(number)
        copy = template.start(tell, ("hello",), variables={"OF_THE_COPY": str(number)}, output=output)
        assert copy.wait(LIMIT_S) == 0
        assert output.read_text() == f"hello True {number} False False\n"
    assert MARK not in sys.modules


def test_a_copy_can_lead_a_session(template: Template, tmp_path: Path) -> None:
    copy = template.start(tell, ("",), output=tmp_path / "output", leads_session=True)
    assert copy.wait(LIMIT_S) == 0
    assert (tmp_path / "output").read_text().split()[-1] == "True"


def test_open_files_are_passed_on(template: Template) -> None:
    reader, writer = os.pipe()
    copy = template.start(write, ("through a pipe",), descriptors=[writer])
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "through a pipe"  # to its end, which comes when no process has the other end open
    assert copy.wait(LIMIT_S) == 0


@pytest.mark.parametrize(("how", "code"), [("exit", 7), ("raise", 1), ("kill", -signal.SIGKILL)])
def test_it_is_known_how_a_copy_ended(template: Template, tmp_path: Path, how: str, code: int) -> None:
    copy = template.start(end, (how,), output=tmp_path / "output")
    assert copy.wait(LIMIT_S) == code == copy.returncode == copy.poll()
    assert ("ValueError: as it was told to" in (tmp_path / "output").read_text()) == (how == "raise")


def test_a_copy_that_runs_can_be_killed(template: Template) -> None:
    copy = template.start(sleep, ())
    assert copy.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        copy.wait(0.01)
    copy.kill()
    assert copy.wait(LIMIT_S) == -signal.SIGKILL
    copy.kill()


@pytest.mark.parametrize(
    ("preparation", "message"),
    [
        (prepare_badly, "ImportError: nothing to be found"),
        (prepare_with_a_thread, "it has 2 threads"),
        (prepare_with_a_device, "it has opened /dev/zero"),
    ],
)
def test_what_cannot_be_copied_is_refused(preparation: object, message: str) -> None:
    template = Template(preparation, {})  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message):
        template.start(sleep, ())
    template.close()


def test_a_template_that_died_is_noticed() -> None:
    template = Template(prepare, {})
    copy = template.start(sleep, ())
    os.kill(template.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match="has ended"):
        template.start(sleep, ())
    os.kill(copy.pid, signal.SIGKILL)
    assert copy.wait(LIMIT_S) == 255
    template.close()
