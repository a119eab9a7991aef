"""Fixtures and checks that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.launch import session_pool

# A busy machine is no failure.
settings.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any-machine")


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
