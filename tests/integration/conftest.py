"""Worker processes for tests that run Megatron."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.megatron_run import MegatronPool


@pytest.fixture(scope="session")
def megatron() -> Iterator[MegatronPool]:
    """Processes that Megatron and torch are patched in; apart from those of the other tests for that reason."""
    pool = MegatronPool()
    yield pool
    pool.close()
