"""The secret that an engine shares with its trainers: anyone who has it may replace weights.

It is the value of ``ETP_REFIT_SECRET``, or the content of the file that ``ETP_REFIT_SECRET_FILE`` names, or of a file
in the user's home directory. An engine creates this file if it is missing, readable only by its owner. So on one
machine, or with a shared home directory, both sides find the same secret without configuration.
"""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megatron_patches.refit.errors import RefitError

logger = logging.getLogger(__name__)

SECRET_HEADER = "x-refit-secret"  # noqa: S105 - a name, not a secret
"""Request header that carries the secret."""
GUARDED_HEADER = "x-refit-guarded"
"""Response header of a server that checks the secret."""
VALUE_VARIABLE = "ETP_REFIT_SECRET"
FILE_VARIABLE = "ETP_REFIT_SECRET_FILE"

_FORM = re.compile(r"[!-~]{16,512}")  # valid in a header
_FORM_IN_WORDS = "16 to 512 printable ASCII characters without blanks"
_MOST_BYTES = 1024
_READABLE_BY_OTHERS = 0o044


@dataclass(frozen=True)
class Secret:
    """A secret.

    Attributes:
        value: the secret; left out when the object is printed.
        origin: where it comes from, for messages: a variable or a file.
    """

    value: str = field(repr=False)
    origin: str

    def is_shown_by(self, value: bytes) -> bool:
        """Whether ``value``, which is untrusted, is this secret. Compares in constant time."""
        return hmac.compare_digest(value, self.value.encode())


def read_secret(path: Path | None = None) -> Secret | None:
    """The secret of this process.

    Args:
        path: a file to read instead of the one from the environment.

    Returns:
        None if no secret is configured and the user's home directory has none.

    Raises:
        RefitError: if a configured secret cannot be read or is invalid.
    """
    if path is None:
        value, named = os.environ.get(VALUE_VARIABLE), os.environ.get(FILE_VARIABLE)
        if value is not None and named is not None:
            raise RefitError(f"both {VALUE_VARIABLE} and {FILE_VARIABLE} are set; unset one of them")
        if value is not None:
            return _checked(value, f"the variable {VALUE_VARIABLE}")
        if named is None and not default_file().exists():
            return None
    return _read(path or _file())


def read_or_make_secret() -> Secret:
    """The secret of this process. If there is none, creates one in a file for the other side.

    Raises:
        RefitError: if it can be neither read nor written.
    """
    if VALUE_VARIABLE not in os.environ and not _file().exists():
        _make(_file())
    found = read_secret()
    if found is None:  # the file was deleted a moment ago
        raise RefitError(f"{_file()} has vanished; start again, or set {FILE_VARIABLE}")
    return found


def default_file() -> Path:
    """The file of the secret by default."""
    config = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(config).expanduser() / "megatron-etp" / "refit-secret"


def _file() -> Path:
    named = os.environ.get(FILE_VARIABLE)
    return default_file() if named is None else Path(named)


def _read(path: Path) -> Secret:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES)
            mode = os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise RefitError(f"cannot read the secret of refit: {error.strerror or error}: {path}") from error
    if mode & _READABLE_BY_OTHERS:
        logger.warning("refit: %s can be read by other users of this machine; chmod 600 it", path)
    return _checked(content.decode(errors="replace").strip(), str(path))


def _checked(value: str, origin: str) -> Secret:
    """Checks a secret's form. No message shows the value."""
    if not _FORM.fullmatch(value):
        raise RefitError(f"{origin} holds no secret, which is {_FORM_IN_WORDS}")
    return Secret(value, origin)


def _make(path: Path) -> None:
    """Writes a new secret. If several processes do, the first one wins."""
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
            with suppress(FileExistsError):
                os.link(draft, path)  # readers never see an incomplete file
                logger.info("refit: wrote a new secret to %s", path)
        finally:
            draft.unlink()
    except OSError as error:
        raise RefitError(
            f"cannot write a secret for refit to {path} ({error.strerror or error}); set {FILE_VARIABLE} to a file "
            f"that can be written, or {VALUE_VARIABLE} to a secret"
        ) from error
