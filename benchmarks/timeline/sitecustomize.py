"""Notes when some functions begin and end, in any process that has this folder on ``PYTHONPATH``.

Python imports this module at the start of a process, so a server and all its workers are watched without knowing it.
``REFIT_TIMELINE`` names a folder whose file ``watched`` lists the functions, as ``module:qualified.name``. Each process
writes a file of its own there: begin and end in seconds of a clock that all processes of a machine share, thread, and
function. :mod:`benchmarks.refit_timeline` reads them.
"""

from __future__ import annotations

import atexit
import functools
import importlib.abc
import importlib.machinery
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_FLUSH_S = 0.2  # a server's processes may be killed


class _Notes:
    """What this process writes.

    Args:
        folder: where.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None

    def take(self, name: str, began: float, ended: float) -> None:
        """Notes one call."""
        thread = threading.current_thread().name.replace(" ", "_")
        with self._lock:
            self._lines.append(f"{began:.6f} {ended:.6f} {thread} {name}\n")
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_often, name="timeline", daemon=True)
                self._writer.start()
                atexit.register(self.write)

    def write(self) -> None:
        """Writes what was noted since the last time."""
        with self._lock:
            lines, self._lines = self._lines, []
        if lines:
            with (self._folder / f"{os.getpid()}.txt").open("a", encoding="utf-8") as file:
                file.writelines(lines)

    def _write_often(self) -> None:
        while True:
            time.sleep(_FLUSH_S)
            self.write()


class _Watching(importlib.abc.MetaPathFinder):
    """Wraps functions of modules as they are imported.

    Args:
        names: qualified names of functions, by module.
        notes: of their calls.
    """

    def __init__(self, names: Mapping[str, Sequence[str]], notes: _Notes) -> None:
        self._names, self._notes = names, notes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec of a watched module, whose execution ends with wrapping its functions."""
        if fullname not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_wrap(module: ModuleType) -> None:
                execute(module)
                for name in self._names[fullname]:
                    self._wrap(module, name)

            spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, module: ModuleType, name: str) -> None:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, module)
        function: Callable[..., Any] = getattr(owner, last)
        label = f"{module.__name__}:{name}"

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._notes.take(label, began, time.perf_counter())

        setattr(owner, last, watched)


def _watch(folder: Path) -> None:
    names: dict[str, list[str]] = {}
    for line in (folder / "watched").read_text(encoding="utf-8").split():
        module, _, name = line.partition(":")
        names.setdefault(module, []).append(name)
    sys.meta_path.insert(0, _Watching(names, _Notes(folder)))


if "REFIT_TIMELINE" in os.environ:
    _watch(Path(os.environ["REFIT_TIMELINE"]))
