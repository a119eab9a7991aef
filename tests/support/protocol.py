"""What the launcher, its worker processes and their templates say to each other. Imports nothing heavy."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any


@dataclass(frozen=True)
class BodyReference:
    """A function, by file and name.

    pytest's importlib mode does not promise that a test module can be imported by its name, so workers load the
    file and register it under the name it has in the session; values of classes defined there can then be pickled
    both ways.
    """

    file: str
    module: str
    qualname: str

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> BodyReference:
        """Refer to ``fn``; ValueError for what another process cannot find by name."""
        qualname = getattr(fn, "__qualname__", None)
        file = inspect.getsourcefile(fn) if inspect.isfunction(fn) else None
        if qualname is None or file is None or "<" in qualname:
            raise ValueError(f"{fn!r} is no function at a module's level; a worker process could not find it")
        return cls(file, fn.__module__, qualname)

    def load(self) -> Callable[..., Any]:
        """The function, in this process."""
        if self.module not in sys.modules:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            if spec is None or spec.loader is None:
                raise ImportError(f"cannot load {self.file}")
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[self.module]
                raise
        return reduce(getattr, self.qualname.split("."), sys.modules[self.module])  # type: ignore[return-value]


@dataclass(frozen=True)
class Job:
    """One rank's part of a call.

    Attributes:
        body: the function.
        rank: this rank.
        world_size: number of ranks.
        backend: of the default process group; None for none.
        timeout_s: the whole call's limit.
        store: a file that the ranks of this call alone find each other through.
        arguments: pickled tuple; unpickled after the body's module is loaded, since it may hold its classes.
    """

    body: BodyReference
    rank: int
    world_size: int
    backend: str | None
    timeout_s: float
    store: str
    arguments: bytes


@dataclass(frozen=True)
class Done:
    """The body returned; ``value`` is pickled, to be read where its classes are known."""

    value: bytes


@dataclass(frozen=True)
class Failed:
    """The body raised.

    Attributes:
        kind: name of the exception's class.
        report: the traceback.
        at: when, by the machine's monotonic clock, before the rank took down its process group and so made others fail.
    """

    kind: str
    report: str
    at: float


@dataclass(frozen=True)
class Prepared:
    """A template has prepared itself.

    Attributes:
        error: why it cannot be copied; empty if it can.
    """

    error: str


@dataclass(frozen=True)
class Order:
    """What a copy of a template is to do.

    Attributes:
        function: what to run.
        arguments: its arguments, after the descriptors that come with the order.
        variables: all environment variables.
        path: where to import from.
        output: file for what it prints; empty for the template's own.
        leads_session: whether it starts a session.
    """

    function: BodyReference
    arguments: tuple[Any, ...]
    variables: dict[str, str]
    path: list[str]
    output: str
    leads_session: bool


@dataclass(frozen=True)
class Copied:
    """A template has made a copy."""

    pid: int
