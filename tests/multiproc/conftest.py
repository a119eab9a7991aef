"""What several files of these tests need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.plain_engine import running


@pytest.fixture
def engine_folder(tmp_path: Path) -> Iterator[str]:
    """Where the engine of :func:`tests.multiproc.bodies_publish.engine_of` listens."""
    with running("engine", tmp_path):
        yield str(tmp_path)
