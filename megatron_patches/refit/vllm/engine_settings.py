"""An operator's settings of an engine, in ``--additional-config '{"etp": {...}}'``.

They say what trainers may do, and which NICs the engine uses. vLLM's ``--weight-transfer-config`` accepts no additional
fields.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import msgspec

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.transports.nics import AUTO_NICS, parse_nics

SECTION = "etp"
UNGUARDED = f'{{"{SECTION}": {{"unguarded": true}}}}'
"""Value of ``--additional-config`` for a server that accepts commands from any client that reaches it."""


class EngineSettings(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of one engine.

    Attributes:
        trainers: addresses to which workers may connect when a trainer asks them to: IP addresses, networks such as
            ``10.0.0.0/24``, or names as trainers give them (``--refit-host``), each with an optional ``:PORT``. None
            allows any trainer that has shown the secret.
        unguarded: whether workers join trainers although the server runs without
            :class:`megatron_patches.refit.vllm.guard.RefitGuard`, so that any client that reaches it can make them.
        nics: which network interfaces this engine's workers may use for the transport ``nixl``; see
            :func:`megatron_patches.refit.transports.nics.parse_nics`.
    """

    trainers: list[str] | None = None
    unguarded: bool = False
    nics: str = AUTO_NICS

    def check_trainer(self, host: str, port: int) -> None:
        """Refuses a trainer's address that is not allowed.

        Raises:
            RefitError: with the address.
        """
        if self.trainers is not None and not any(_allows(entry, host, port) for entry in self.trainers):
            raise RefitError(
                f"asked to connect to a trainer at {host}:{port}, which is not among those that this engine was "
                f"started with ({', '.join(self.trainers) or 'none'}); add it to the trainers in --additional-config "
                f'\'{{"{SECTION}": {{"trainers": [...]}}}}\''
            )


def settings_of(additional_config: Any) -> EngineSettings:
    """The settings in vLLM's ``additional_config``.

    Raises:
        RefitError: if the section is invalid.
    """
    section = additional_config.get(SECTION, {}) if isinstance(additional_config, dict) else {}
    try:
        settings = msgspec.convert(section, EngineSettings)
        for entry in settings.trainers or ():
            _parsed(entry)
        parse_nics(settings.nics)
    except (msgspec.ValidationError, ValueError) as error:
        raise RefitError(f"--additional-config: {SECTION}: {error}") from error
    return settings


def _allows(entry: str, host: str, port: int) -> bool:
    allowed, only_port = _parsed(entry)
    if only_port is not None and only_port != port:
        return False
    if isinstance(allowed, str):
        return allowed == host.lower()
    try:
        return ipaddress.ip_address(host) in allowed
    except ValueError:  # host is a name, which may resolve to any address
        return False


def _parsed(entry: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network | str, int | None]:
    """A network or a name, and the only port that is allowed, if one is given.

    Raises:
        ValueError: if the entry is neither.
    """
    host, port = entry, None
    if entry.startswith("[") and "]" in entry:  # [::1]:8000
        host, _, rest = entry[1:].partition("]")
        if rest:
            port = _port(entry, rest.removeprefix(":"))
    elif entry.count(":") == 1:
        host, _, text = entry.partition(":")
        port = _port(entry, text)
    if not host or host.isspace():
        raise ValueError(f"trainer {entry!r} must be like 10.0.0.5, 10.0.0.0/24, trainer-0 or 10.0.0.5:29600")
    try:
        return ipaddress.ip_network(host), port
    except ValueError:
        if "/" in host:
            raise
        return host.lower(), port


def _port(entry: str, text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 1 << 16:
        raise ValueError(f"trainer {entry!r} has no port but {text!r}")
    return int(text)
