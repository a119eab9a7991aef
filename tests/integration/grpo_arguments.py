"""Runs ``examples/grpo/train.py`` up to where it would train, and prints its arguments as JSON."""

from __future__ import annotations

import contextlib
import json
from argparse import Namespace
from typing import Any
from unittest import mock

from examples.grpo import train

CHECK = train.check


class ReadyError(Exception):
    """Everything is built that a training begins with."""


def main() -> None:
    """Ends as the script does where it refuses an argument."""
    told: dict[str, Any] = {}

    def check(args: Namespace) -> None:
        CHECK(args)
        told.update(vars(args))

    with (
        mock.patch.object(train, "check", check),
        mock.patch.object(train, "pretrain", side_effect=ReadyError),
        contextlib.suppress(ReadyError),
    ):
        train.main()
    print(json.dumps(told, default=str))  # noqa: T201


if __name__ == "__main__":
    main()
