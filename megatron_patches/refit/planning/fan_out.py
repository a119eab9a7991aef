"""Who serves a version to whom: whoever has committed it serves it too, so that receivers double from wave to wave.

Pure. Time is in *units*: in one unit, a receiver that takes as much as it can has a whole version. Receivers are alike,
and who has committed sends as fast as it received. The trainer serves ``copies`` receivers at full speed at a time.

[Note: the least time] With ``c`` copies of the trainer and ``n`` receivers, let ``w`` be the largest number with
``c (2^w - 1) <= n``, and ``x`` the rest, ``n - c (2^w - 1)``. Then no schedule takes less than::

    w + 2 x / (c 2^w + x)

units, nor less than one. For let ``s(t)`` receivers have committed at time ``t``, ``J(t)`` be the integral of ``s`` up
to ``t``, and ``B(t) <= c t + J(t)`` what all have received. Nobody receives more than one version a unit: who commits
at ``T`` has received at least ``1 - (T - t)`` at ``t``; over all receivers, ``B(t) >= J(t + 1) - J(t)``. Hence
``J(t + 1) <= c t + 2 J(t)``, which gives ``J(w) <= c (2^w - 1 - w)`` for whole ``w``. If all have committed at
``T = w + f``, the integral of ``s`` from ``w`` to ``w + 1`` is ``J(T) - J(w) + (1 - f) n``, and ``n <= c T + J(T)``.
Together: ``n (2 - f) <= c f + 2 c (2^w - 1)``, which is the formula. Where ``c`` is less than 1, nobody commits before
``1 / c``, and ``J`` as it is ``1 / c - 1`` units later is subject to what it is with one copy: nothing takes less than
that and these units.

:func:`assign` reaches the least time but for rounding: all waves are full except the last two. In the wave before the
last, ``x / 2`` receivers have a server each and the others share what is left, so that all of these end together.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Somebody who has the version.

    Attributes:
        name: of a receiver that has committed, or of the trainer.
        copies: how many receivers it serves at full speed at a time; of a receiver that has committed, 1.
        host: its machine; empty where it has several.

    Raises:
        ValueError: if it serves nobody.
    """

    name: str
    copies: Fraction = Fraction(1)
    host: str = ""

    def __post_init__(self) -> None:
        if self.copies <= 0:
            raise ValueError(f"{self.name} serves {self.copies} receivers at a time; it must be more than none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Somebody who wants the version.

    Attributes:
        name: unique among all.
        missing: part of the version that it lacks.
        host: its machine; empty where it has several.

    Raises:
        ValueError: if it lacks nothing, or more than all.
    """

    name: str
    missing: Fraction = Fraction(1)
    host: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.missing <= 1:
            raise ValueError(f"{self.name} lacks {self.missing} of a version; it must be more than 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a receiver takes from one server.

    Attributes:
        server: name.
        receiver: name.
        speed: part of the receiver's full speed.
    """

    server: str
    receiver: str
    speed: Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """A time in which nobody's servers change.

    Attributes:
        begin: units since the version was there.
        end: likewise.
        shares: who takes how much from whom.
        committed: receivers that have the version at its end, and serve from then on.
    """

    begin: Fraction
    end: Fraction
    shares: tuple[Share, ...]
    committed: tuple[str, ...]


def assign(servers: Sequence[Server], receivers: Sequence[Waiting]) -> tuple[Share, ...]:
    """Hands out servers until the next receiver commits; call again then, or when somebody comes or goes.

    Args:
        servers: all who have the version.
        receivers: all who want it; who comes first is served first.

    Returns:
        Shares, of which those of a receiver add up to at most 1 and those of a server to at most its ``copies``.
        Servers on a receiver's own machine are taken first.

    Raises:
        ValueError: if a name is there twice, or nobody has the version.
    """
    names = [*(server.name for server in servers), *(receiver.name for receiver in receivers)]
    if len(set(names)) != len(names):
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} has the version or wants it twice")
    if receivers and not servers:
        raise ValueError(f"nobody has the version that {receivers[0].name} wants")
    return tuple(_pour(servers, _speeds(sum((server.copies for server in servers), Fraction()), receivers)))


def fan_out(servers: Sequence[Server], receivers: Sequence[Waiting]) -> tuple[Wave, ...]:
    """All waves until every receiver has committed; arguments and errors as in :func:`assign`."""
    waves: list[Wave] = []
    now, having, wanting = Fraction(), list(servers), list(receivers)
    while wanting:
        shares = assign(having, wanting)
        speeds: dict[str, Fraction] = defaultdict(Fraction)
        for share in shares:
            speeds[share.receiver] += share.speed
        lasts = min(item.missing / speeds[item.name] for item in wanting if speeds[item.name])
        left = [(item, item.missing - lasts * speeds[item.name]) for item in wanting]
        done = [item for item, missing in left if missing == 0]
        wanting = [replace(item, missing=missing) for item, missing in left if missing]
        having += [Server(name=item.name, host=item.host) for item in done]
        waves.append(Wave(begin=now, end=now + lasts, shares=shares, committed=tuple(item.name for item in done)))
        now += lasts
    return tuple(waves)


def least_units(copies: Fraction, receivers: int) -> Fraction:
    """A time that no schedule can be shorter than; see [Note: the least time].

    Args:
        copies: how many receivers the trainer serves at full speed at a time.
        receivers: how many want the version.
    """
    if receivers == 0:
        return Fraction()
    if copies < 1:
        return max(_least(copies, receivers), 1 / copies - 1 + _least(Fraction(1), receivers))
    return _least(copies, receivers)


def _least(copies: Fraction, receivers: int) -> Fraction:
    waves = 0
    while copies * ((2 << waves) - 1) <= receivers:
        waves += 1
    rest = receivers - copies * ((1 << waves) - 1)
    return max(Fraction(1), waves + 2 * rest / (rest + copies * (1 << waves)))


def _speeds(copies: Fraction, receivers: Sequence[Waiting]) -> list[tuple[Waiting, Fraction]]:
    """How fast each receiver takes, as part of its full speed; together at most ``copies``."""
    missing = sum((item.missing for item in receivers), Fraction())
    if missing <= copies:  # all end together
        lasts = max([missing / copies, *(item.missing for item in receivers)]) if receivers else Fraction(1)
        return [(item, item.missing / lasts) for item in receivers]
    first, rest = sorted(receivers, key=lambda item: item.missing), missing - copies
    if rest > 2 * copies:  # more waves than the next one follow: as many as can commit soon
        return [(item, max(Fraction(), min(Fraction(1), copies - index))) for index, item in enumerate(first)]
    full = _served_alone(copies, rest, len(first))
    shared = min(Fraction(1), (copies - full) / (len(first) - full))
    return [(item, Fraction(1) if index < full else shared) for index, item in enumerate(first)]


def _served_alone(copies: Fraction, rest: Fraction, receivers: int) -> int:
    """How many receivers take at full speed in the wave before the last, which moves ``rest`` versions."""

    def last_wave(full: int) -> Fraction:
        return max(rest / (copies + full), 1 - (copies - full) / (receivers - full))

    most = math.floor(copies)
    return min((min(most, math.floor(rest / 2)), min(most, math.ceil(rest / 2))), key=last_wave)


def _pour(servers: Sequence[Server], speeds: Iterable[tuple[Waiting, Fraction]]) -> Iterator[Share]:
    """Spreads speeds over servers, in order; those of the same machine first."""
    left = {server.name: server.copies for server in servers}
    hosts: dict[str, list[str]] = defaultdict(list)
    for server in servers:
        if server.host:
            hosts[server.host].append(server.name)
    needed: list[tuple[str, Fraction]] = []
    for receiver, speed in speeds:
        need = speed
        for name in hosts.get(receiver.host, ()):
            taken = min(need, left[name])
            if taken:
                left[name], need = left[name] - taken, need - taken
                yield Share(server=name, receiver=receiver.name, speed=taken)
        needed.append((receiver.name, need))
    free = deque(name for name, copies in left.items() if copies)
    for receiver_name, need in needed:
        lacks = need
        while lacks:
            name = free[0]
            taken = min(lacks, left[name])
            left[name], lacks = left[name] - taken, lacks - taken
            yield Share(server=name, receiver=receiver_name, speed=taken)
            if not left[name]:
                free.popleft()
