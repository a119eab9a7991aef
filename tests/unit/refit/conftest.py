"""Fixtures that tests of refit share."""

from __future__ import annotations

import pytest

from tests.support.live_models import compare_in_fresh_process


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest) -> dict[str, str]:
    """What is wrong with each of the module's ``CASES``; see :func:`compare_in_fresh_process`."""
    return compare_in_fresh_process(request.module.CASES)
