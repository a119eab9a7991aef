"""Fixtures and checks that every test shares."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from etp.te import te_available
from megatron_patches.refit.control.secret import VALUE_VARIABLE
from tests.support import quick
from tests.support.at_once import report_at_once
from tests.support.launch import (
    DEVICE_VARIABLE,
    RANKS_PER_GPU_VARIABLE,
    TRANSPORT_VARIABLE,
    on_gpus,
    session_pool,
)
from tests.support.prepared import ENGINE_PYTHON_VARIABLE

# A busy machine is no failure.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the command line say which devices bodies run on."""
    parser.addoption(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="run the bodies of several processes over gloo on the CPU, or over NCCL on GPUs (default: cpu)",
    )
    parser.addoption(
        "--transport",
        choices=("auto", "c10d", "copy_engine"),
        default="auto",
        help="the transport of bodies that name none (default: auto, which is copy_engine on the GPUs of one host)",
    )
    parser.addoption(
        "--ranks-per-gpu",
        type=int,
        default=1,
        help="let GPUs take so many ranks in tests that need more GPUs than there are (default: 1, such are skipped)",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out tests that are marked slow, and draw fewer random examples, as `make test` does",
    )
    parser.addoption(
        "--engine-python",
        help="run the engines of live tests with another environment's interpreter (default: with this one)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Pass the options on to the launcher; on GPUs, where time is short, report at once."""
    os.environ[DEVICE_VARIABLE] = config.getoption("--device")
    os.environ[TRANSPORT_VARIABLE] = config.getoption("--transport")
    os.environ[RANKS_PER_GPU_VARIABLE] = str(config.getoption("--ranks-per-gpu"))
    quick.configure(config)
    if config.getoption("--engine-python"):
        os.environ[ENGINE_PYTHON_VARIABLE] = str(Path(config.getoption("--engine-python")).absolute())
    os.environ[VALUE_VARIABLE] = secrets.token_hex(16)  # of servers and trainers that tests start
    if on_gpus():
        report_at_once(config)


@pytest.hookimpl(tryfirst=True)  # pytest leaves out what is not chosen by a marker after that
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow, skip what is not true with ``--device cuda``, and choose what pytest-xdist keeps together."""
    if torch.cuda.is_available() and not on_gpus() and any(item.path.parent.name == "gpu" for item in items):
        raise pytest.UsageError("tests/gpu runs with --device cuda")  # its bodies expect what is true on GPUs
    for item in items:
        quick.mark(item)
        if not on_gpus():
            _keep_together(item)
        if item.get_closest_marker("plain_layers") is not None and on_gpus() and te_available():
            item.add_marker(pytest.mark.skip(reason="Transformer Engine's own layers: tests/gpu/test_te.py"))
        marker = item.get_closest_marker("cpu_only")
        if marker is not None and on_gpus():
            item.add_marker(pytest.mark.skip(reason=marker.args[0]))


def _keep_together(item: pytest.Item) -> None:
    """Let one worker of pytest-xdist run what shares fixtures that take long: a file, or all of ``tests/packaging``."""
    if item.get_closest_marker("xdist_group") is None:
        folder = item.path.parent.name
        item.add_marker(pytest.mark.xdist_group(folder if folder == "packaging" else item.path.stem))


@pytest.fixture(scope="session", autouse=True)
def _worker_processes() -> Iterator[None]:
    """End the launcher's worker processes with the session."""
    yield
    session_pool().close()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Leave the environment as it was: Megatron sets variables that its next model in another process trips over."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _log_handlers() -> Iterator[None]:
    """Leave our logger as it was: vLLM's plugin gives it the handlers of vLLM's, and pytest adds its own to those."""
    ours = logging.getLogger("megatron_patches")
    before = ours.handlers[:], ours.level
    yield
    ours.handlers[:], ours.level = before
