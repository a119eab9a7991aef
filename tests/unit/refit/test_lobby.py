"""Those that know the key hear of each newcomer, and nobody else does."""

from __future__ import annotations

import queue
from contextlib import closing
from dataclasses import replace

import pytest

from megatron_patches.refit.control.messages import Invitation
from megatron_patches.refit.errors import PartyFailedError
from megatron_patches.refit.trainer import lobby
from megatron_patches.refit.trainer.lobby import Announcer, Listener
from megatron_patches.refit.trainer.push_orders import Newcomer


def newcomer(number: int) -> Newcomer:
    return Newcomer(number, f"http://10.0.0.{number}:8000", Invitation("10.0.0.1", 4000, "ab" * 32, 20.0), 1 << 20)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_all_that_listen_hear_of_each_in_order(host: str) -> None:
    heard = [queue.Queue[Newcomer]() for _ in range(3)]
    with closing(Announcer(host, 3)) as announcer:
        listeners = [Listener(announcer.invitation, each.put) for each in heard]
        announcer.wait_for_all()
        for number in range(3):
            announcer.tell(newcomer(number))
        for each in heard:
            assert [each.get(timeout=10.0) for _ in range(3)] == [newcomer(number) for number in range(3)]
        for listener in listeners:
            listener.close()
    announcer.tell(newcomer(3))  # after its end, nothing


def test_whoever_has_another_key_hears_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lobby, "_LISTENING_S", 0.5)
    heard, other = queue.Queue[Newcomer](), queue.Queue[Newcomer]()
    with closing(Announcer("127.0.0.1", 2)) as announcer, closing(Announcer("127.0.0.1", 0)) as of_others:
        stolen = replace(announcer.invitation, token=of_others.invitation.token)
        listeners = Listener(announcer.invitation, heard.put), Listener(stolen, other.put)
        announcer.wait_for_all()
        announcer.tell(newcomer(1))
        assert heard.get(timeout=10.0) == newcomer(1)
        assert other.empty()
        for listener in listeners:
            listener.close()
    assert "1 trainer ranks do not listen at 127.0.0.1 after 0.5 s" in caplog.text


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PartyFailedError, match=r"cannot listen on 192\.0\.2\.1 .*; host must be an address"):
        Announcer("192.0.2.1", 1)
