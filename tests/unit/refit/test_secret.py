"""The secret of engines and trainers: found by both, readable by the user alone, shown in no message."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron_patches.refit.control.credentials import Credentials
from megatron_patches.refit.control.secret import (
    FILE_VARIABLE,
    SECRET_HEADER,
    VALUE_VARIABLE,
    default_file,
    read_or_make_secret,
    read_secret,
)
from megatron_patches.refit.errors import RefitError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a secret."""
    for name in (VALUE_VARIABLE, FILE_VARIABLE, "XDG_CONFIG_HOME", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_trainer_finds_what_an_engine_has_made(home: Path) -> None:
    assert read_secret() is None
    made = read_or_make_secret()
    assert made.origin == str(home / ".config" / "megatron-etp" / "refit-secret")
    assert len(made.value) == 64
    assert read_secret() == made
    assert Credentials().headers() == {SECRET_HEADER: made.value}
    assert read_or_make_secret() == made
    assert made.value not in repr(made)


def test_only_the_user_can_read_it(home: Path) -> None:
    before = os.umask(0)
    try:
        read_or_make_secret()
    finally:
        os.umask(before)
    file = default_file()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["refit-secret"]


def test_engines_that_start_at_once_have_one_secret(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(home / "shared" / "secret"))
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: read_or_make_secret().value, range(64)))
    assert len(set(found)) == 1


def test_whoever_is_told_takes_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_or_make_secret()
    (home / "mine").write_text("of-the-command-line\n")
    monkeypatch.setenv(VALUE_VARIABLE, "of-the-environment")
    assert read_or_make_secret().value == "of-the-environment"
    found = read_secret(home / "mine")
    assert found is not None
    assert found.value == "of-the-command-line"
    monkeypatch.setenv(FILE_VARIABLE, str(home / "mine"))
    with pytest.raises(RefitError, match="both ETP_REFIT_SECRET and ETP_REFIT_SECRET_FILE are set"):
        read_secret()


@pytest.mark.parametrize(
    "content", [b"", b"short", b"with a blank in it ...", b"line\r\nx-other: header", b"\xff" * 32]
)
def test_what_cannot_be_sent_is_no_secret_and_is_not_shown(content: bytes, home: Path) -> None:
    (home / "mine").write_bytes(content)
    with pytest.raises(RefitError, match="mine holds no secret, which is 16 to 512") as raised:
        read_secret(home / "mine")
    assert content.decode(errors="replace").strip() not in str(raised.value) or not content


def test_a_file_that_is_missing_or_cannot_be_written_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(home / "none"))
    with pytest.raises(RefitError, match=f"No such file or directory: {home}/none"):
        read_secret()
    (home / "file").write_text("")
    monkeypatch.setenv(FILE_VARIABLE, str(home / "file" / "secret"))
    with pytest.raises(RefitError, match=r"cannot write a secret for refit to .*/file/secret .*set ETP_REFIT_SECRET"):
        read_or_make_secret()


def test_a_file_that_others_can_read_is_complained_about(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    read_or_make_secret()
    default_file().chmod(0o644)
    with caplog.at_level(logging.WARNING):
        read_secret()
    assert "can be read by other users of this machine; chmod 600 it" in caplog.text


def test_headers_of_a_proxy_and_the_key_of_vllm(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = home / "headers"
    file.write_text("# of our proxy\nX-Route: trainer 7\n\nX-Colon: a:b\n")
    credentials = Credentials(headers_file=file)
    assert credentials.headers() == {"X-Route": "trainer 7", "X-Colon": "a:b"}
    monkeypatch.setenv("VLLM_API_KEY", "key")
    assert credentials.headers()["Authorization"] == "Bearer key"
    file.write_text("authorization: Basic abc\n")
    assert credentials.headers() == {"authorization": "Basic abc"}


@pytest.mark.parametrize("key", ["hunter2\n", "hunter2\r\nX-Other: 1", "hunter2ä"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", key)
    with pytest.raises(RefitError, match="the variable VLLM_API_KEY cannot be sent in a header") as raised:
        Credentials().headers()
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a password", "line 1: a header is like"),
        ("X Y: z", "line 1: a header is like"),
        ("X-Y: a\x00b", "line 1: a header is like"),
        ("Host: elsewhere", "line 1: the header Host is set by refit itself"),
        ("X-Refit-Secret: mine", "line 1: the header X-Refit-Secret is set by refit itself"),
    ],
)
def test_what_is_no_header_is_refused_and_not_shown(line: str, message: str, home: Path) -> None:
    (home / "headers").write_text(f"{line}\n")
    with pytest.raises(RefitError, match=message) as raised:
        Credentials(headers_file=home / "headers").headers()
    assert line not in str(raised.value)
