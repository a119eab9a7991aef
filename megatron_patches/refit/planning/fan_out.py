"""Which server sends a version to which receiver: committed receivers serve it too, so servers double every wave.

Pure. Time is in *units*: one unit is what a receiver at full speed takes for a whole version. Receivers are alike. A
receiver that has committed sends as fast as it received. The trainer serves ``copies`` receivers at full speed at once.

[Note: the least time] With ``c`` copies of the trainer and ``n`` receivers, let ``w`` be the largest number with
``c (2^w - 1) <= n``, and ``x`` the rest, ``n - c (2^w - 1)``. Then no schedule takes less than::

    w + 2 x / (c 2^w + x)

units, nor less than one. Proof: Let ``s(t)`` be the number of receivers that have committed at time ``t``, ``J(t)`` the
integral of ``s`` up to ``t``, and ``B(t) <= c t + J(t)`` the number of versions that all have received. A receiver
takes at most one version per unit, so one that commits at ``T`` has at least ``1 - (T - t)`` at ``t``. Summed over all
receivers, ``B(t) >= J(t + 1) - J(t)``. Hence ``J(t + 1) <= c t + 2 J(t)``, and ``J(w) <= c (2^w - 1 - w)`` for whole
``w``. If all have committed at ``T = w + f``, the integral of ``s`` from ``w`` to ``w + 1`` is
``J(T) - J(w) + (1 - f) n``, and ``n <= c T + J(T)``. Together, ``n (2 - f) <= c f + 2 c (2^w - 1)``, which is the
formula. If ``c`` is less than 1, no receiver commits before ``1 / c``, and ``J``, shifted by ``1 / c - 1`` units, obeys
the bounds for one copy. So any schedule takes at least ``1 / c - 1`` units plus the bound for one copy.

:func:`assign` reaches the least time except for rounding: all waves are full except the last two. In the wave before
the last, ``x / 2`` receivers have a server each. The others share the remaining servers, so that all end together.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The trainer or a receiver that has the version.

    Attributes:
        name: of a receiver that has committed, or of the trainer.
        copies: how many receivers it serves at full speed at a time; 1 for a receiver that has committed.

    Raises:
        ValueError: if ``copies`` is not positive.
    """

    name: str
    copies: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        if self.copies <= 0:
            raise ValueError(f"{self.name} serves {self.copies} receivers at a time; it must be more than none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A receiver that wants the version.

    Attributes:
        name: unique among all.
        missing: part of the version that it lacks.

    Raises:
        ValueError: if ``missing`` is not greater than 0 and at most 1.
    """

    name: str
    missing: Fraction = Fraction(1)

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
    """A period in which every receiver keeps its servers.

    Attributes:
        begin: its begin, in units since the version became available.
        end: its end, in units since the version became available.
        shares: what each receiver takes from each server.
        committed: receivers that have the version at the end of the wave, and serve from then on.
    """

    begin: Fraction
    end: Fraction
    shares: tuple[Share, ...]
    committed: tuple[str, ...]


def assign(servers: Sequence[Server], receivers: Sequence[Waiting]) -> tuple[Share, ...]:
    """Assigns servers until the next receiver commits. Call again then, or when a server or receiver comes or goes.

    Args:
        servers: all that have the version.
        receivers: all that want it; earlier ones are served first.

    Returns:
        The shares. Those of a receiver add up to at most 1, those of a server to at most its ``copies``.

    Raises:
        ValueError: if a name occurs twice, or no server has the version.
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
        having += [Server(name=item.name) for item in done]
        waves.append(Wave(begin=now, end=now + lasts, shares=shares, committed=tuple(item.name for item in done)))
        now += lasts
    return tuple(waves)


def least_units(copies: Fraction, receivers: int) -> Fraction:
    """Lower bound on the time of any schedule, in units; see [Note: the least time].

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
    """Each receiver's speed, as part of its full speed. The speeds add up to at most ``copies``."""
    missing = sum((item.missing for item in receivers), Fraction())
    if missing <= copies:  # all end together
        lasts = max([missing / copies, *(item.missing for item in receivers)]) if receivers else Fraction(1)
        return [(item, item.missing / lasts) for item in receivers]
    first, rest = sorted(receivers, key=lambda item: item.missing), missing - copies
    if rest > 2 * copies:  # two or more waves follow the next one: let as many as possible commit soon
        return [(item, max(Fraction(), min(Fraction(1), copies - index))) for index, item in enumerate(first)]
    full = _served_alone(copies, rest, len(first))
    shared = min(Fraction(1), (copies - full) / (len(first) - full))
    return [(item, Fraction(1) if index < full else shared) for index, item in enumerate(first)]


def _served_alone(copies: Fraction, rest: Fraction, receivers: int) -> int:
    """How many receivers take at full speed in the wave before the last, if the last wave moves ``rest`` versions."""

    def last_wave(full: int) -> Fraction:
        return max(rest / (copies + full), 1 - (copies - full) / (receivers - full))

    most = math.floor(copies)
    return min((min(most, math.floor(rest / 2)), min(most, math.ceil(rest / 2))), key=last_wave)


def _pour(servers: Sequence[Server], speeds: Iterable[tuple[Waiting, Fraction]]) -> Iterator[Share]:
    """Spreads the speeds over servers in order."""
    left = deque((server.name, server.copies) for server in servers)
    for receiver, speed in speeds:
        lacks = speed
        while lacks:
            name, copies = left.popleft()
            taken = min(lacks, copies)
            lacks -= taken
            yield Share(server=name, receiver=receiver.name, speed=taken)
            if copies > taken:
                left.appendleft((name, copies - taken))
