"""What the trainer sends to servers to authenticate: the shared secret, and headers for proxies in between."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from megatron_patches.refit.control.secret import (
    FILE_VARIABLE,
    SECRET_HEADER,
    VALUE_VARIABLE,
    default_file,
    read_secret,
)
from megatron_patches.refit.errors import RefitError

API_KEY_VARIABLE = "VLLM_API_KEY"

_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
_VALUE = re.compile(r"[ -~]+")
_OURS = frozenset({SECRET_HEADER, "host", "connection", "content-length", "content-type", "transfer-encoding"})


@dataclass(frozen=True)
class Credentials:
    """Where the trainer's first rank finds its credentials. Files are read at each call, so a new secret takes effect.

    Attributes:
        secret_file: file with the secret; None for what :mod:`megatron_patches.refit.control.secret` finds.
        headers_file: file with further headers, one ``Name: value`` per line; None for none.
    """

    secret_file: Path | None = None
    headers_file: Path | None = None

    def headers(self) -> dict[str, str]:
        """The headers of a request. They include the key in ``VLLM_API_KEY``, if set, unless the file has another.

        Raises:
            RefitError: if a file cannot be read or is malformed, or the key cannot be sent.
        """
        found = {} if self.headers_file is None else _read_headers(self.headers_file)
        key = os.environ.get(API_KEY_VARIABLE)
        if key and "authorization" not in {name.lower() for name in found}:
            if not _VALUE.fullmatch(key):  # the value is not shown
                raise RefitError(
                    f"the variable {API_KEY_VARIABLE} cannot be sent in a header; it must hold printable ASCII "
                    "characters only, and no line break at its end"
                )
            found["Authorization"] = f"Bearer {key}"
        secret = read_secret(self.secret_file)
        return found if secret is None else {**found, SECRET_HEADER: secret.value}

    def describe(self) -> str:
        """Which secret is sent, for the error message if a server has another one."""
        try:
            secret = read_secret(self.secret_file)
        except RefitError as error:
            return str(error)
        if secret is not None:
            return f"this process shows the secret of {secret.origin}"
        return f"this process has no secret: there is no {default_file()}"


HOW_TO_SHARE = (
    "the server's log says where its secret is; give the same to the trainer, as a file (--refit-secret-file, or "
    f"--secret-file of 'refit push', or {FILE_VARIABLE}) or as {VALUE_VARIABLE}"
)
"""What to do if a server has another secret."""


def _read_headers(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise RefitError(f"cannot read the headers for servers: {reason}: {path}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        name, value = name.strip(), value.strip()
        if not colon or not _NAME.fullmatch(name) or not _VALUE.fullmatch(value):
            raise RefitError(f"{path}, line {number}: a header is like 'X-Route: trainer-7'")  # the value may be secret
        if name.lower() in _OURS:
            raise RefitError(f"{path}, line {number}: the header {name} is set by refit itself; take it out")
        found[name] = value
    return found
