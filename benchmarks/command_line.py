"""Checks of the benchmarks' command lines, which report a mistake before any work starts."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def positive(text: str) -> int:
    """An argument type: an integer above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def not_negative(text: str) -> int:
    """An argument type: an integer from 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def positive_seconds(text: str) -> float:
    """An argument type: a number above 0."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0")
    return value


def writable_file(text: str) -> Path:
    """An argument type: the path of a file that can be written, in a folder that is there."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text} cannot be written: name a file in a folder that is there")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written: permission denied; name another file")
    return path


def writable_folder(text: str) -> Path:
    """An argument type: the path of a folder in which files can be written, and which is there or can be made."""
    path = Path(text)
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is a file; name another folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise argparse.ArgumentTypeError(f"{there} cannot be written: permission denied; name another folder")
    return path


def existing_file(text: str) -> Path:
    """An argument type: the path of a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return Path(text)


def checked(check: Callable[[str], object], *names: str) -> Callable[[str], str]:
    """An argument type: text as it was given, if it is one of ``names`` or ``check`` does not raise for it."""

    def text_itself(text: str) -> str:
        if text not in names:
            try:
                check(text)
            except (RuntimeError, ValueError) as error:
                raise argparse.ArgumentTypeError(str(error)) from error
        return text

    return text_itself


def require_gpus(fail: Callable[[str], NoReturn], count: int = 1) -> None:
    """End the process through ``fail``, such as a parser's ``error``, if PyTorch sees fewer than ``count`` GPUs."""
    import torch  # here: tables are made where there may be none

    found = torch.cuda.device_count()
    if not found:
        fail("this measures GPUs, and there is none")
    if found < count:
        fail(f"this needs {count} GPUs, and there are {found}")


def require_torchrun(fail: Callable[[str], NoReturn], module: str) -> None:
    """End the process through ``fail`` unless torchrun has started it."""
    if "LOCAL_RANK" not in os.environ:
        fail(f"start it with torchrun: torchrun --nproc-per-node 4 -m {module}")


def require_matplotlib(fail: Callable[[str], NoReturn], plot: Path | None) -> None:
    """End the process through ``fail`` if a plot is asked for and matplotlib is missing."""
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        fail("--plot needs matplotlib: pip install matplotlib")
