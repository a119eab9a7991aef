"""The error classes are one family, and each can be caught as what it is."""

from __future__ import annotations

import pytest

import etp
from etp import errors


@pytest.mark.parametrize("name", ["EtpStateError", "StaleWeightError", "EtpCommunicationError", "PeerMismatchError"])
def test_every_error_is_an_etp_error_and_a_runtime_error(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, errors.EtpError)
    assert issubclass(kind, RuntimeError)
    assert getattr(etp, name) is kind


def test_one_kind_is_not_another() -> None:
    assert not issubclass(errors.StaleWeightError, errors.EtpStateError)
    assert not issubclass(errors.EtpCommunicationError, errors.EtpStateError)
