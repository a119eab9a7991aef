"""Prints where the time of one push into vLLM went, in the trainer, the server and its workers.

    python -m benchmarks.refit_vllm --timeline there ...
    python -m benchmarks.refit_timeline there

Each line is a function in one thread of one process: when its first call began and its last one ended, in milliseconds
from the beginning of the push, how long all its calls took, and how many there were. A GPU's work goes on after a call
that only starts it. Noting a call takes about 2 microseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_REFIT = "megatron_patches.refit."
PUSH = f"{_REFIT}trainer.session:RefitSession._push"
WATCHED = (
    PUSH,
    *(f"{_REFIT}trainer.session:RefitSession.{name}" for name in ("_take_orders", "_send")),
    *(f"{_REFIT}trainer.subscription:Subscription.{name}" for name in ("_push", "_serve")),
    *(f"{_REFIT}trainer.engines:HttpEngine.{name}" for name in ("call", "pause", "commit", "_empty_caches", "resume")),
    *(f"{_REFIT}control.lease:ServerLease.{name}" for name in ("take", "give_back")),
    f"{_REFIT}source.live:LiveMemory.look_up",
    *(f"{_REFIT}source.block_quantizer:BlockQuantizer.{name}" for name in ("measure", "cast", "check")),
    *(f"{_REFIT}transports.pump:{name}" for name in ("send_version", "receive_version")),
    *(f"{_REFIT}transports.cuda_ipc:{name}" for name in ("CudaIpcTransport.begin", "CudaIpcIncoming.fetch_direct")),
    f"{_REFIT}memory.sender:Sender.digest",
    *(f"{_REFIT}memory.unpacker:Unpacker.{name}" for name in ("begin", "accept", "verify")),
    *(f"{_REFIT}vllm.worker_session:WorkerSession.{name}" for name in ("receive", "_take", "commit")),
    f"{_REFIT}vllm.worker_session:check_scale_values",
    f"{_REFIT}vllm.worker_session:check_weight_values",
    f"{_REFIT}vllm.version_memory:VersionMemory.make",
    *(f"{_REFIT}vllm.reload:Replacement.{name}" for name in ("begin", "build", "apply", "forget")),
    f"{_REFIT}vllm.layers:Layers.as_loaded",
    f"{_REFIT}vllm.swap:Swap.__init__",
)
"""The functions that are watched."""


class Call(NamedTuple):
    """One call. Times are seconds of a clock that all processes of a machine share.

    Attributes:
        began: when it began.
        ended: when it ended.
        process: number of its process.
        thread: name of its thread.
        name: ``module:qualified.name`` of the function.
    """

    began: float
    ended: float
    process: str
    thread: str
    name: str


def watch(folder: Path) -> Mapping[str, str]:
    """Makes processes note the calls of :data:`WATCHED`.

    Args:
        folder: where they write; created if needed.

    Returns:
        The environment variables that these processes need.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "watched").write_text("\n".join(WATCHED), encoding="utf-8")
    paths = [str(Path(__file__).parent / "timeline"), os.environ.get("PYTHONPATH", "")]
    return {"REFIT_TIMELINE": str(folder.resolve()), "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def read(folder: Path) -> list[Call]:
    """All calls in a folder, in order of time."""
    found = []
    for file in folder.glob("*.txt"):
        for line in file.read_text(encoding="utf-8").splitlines():
            began, ended, thread, name = line.split()
            found.append(Call(float(began), float(ended), file.stem, thread, name))
    return sorted(found)


def timeline(calls: Sequence[Call], push: Call) -> list[str]:
    """The lines for one push."""
    parts: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in calls:
        if push.began <= call.began <= push.ended:
            parts[call.process, call.thread, call.name].append(call)
    lines = [f"{'from':>8} {'to':>8} {'ms':>8} {'calls':>5}  process thread, function"]
    for (process, thread, name), some in sorted(parts.items(), key=lambda part: part[1][0].began):
        begin, end = (1e3 * (at - push.began) for at in (some[0].began, max(call.ended for call in some)))
        taken = 1e3 * sum(call.ended - call.began for call in some)
        where = f"{process} {thread[:24]:24} {name.removeprefix(_REFIT)}"
        lines.append(f"{begin:8.1f} {end:8.1f} {taken:8.2f} {len(some):5}  {where}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the timeline of a push; returns 1 if there is none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="what `refit_vllm --timeline` was given")
    parser.add_argument("--push", type=int, help="number of the push, from 0; default: the one of median length")
    options = parser.parse_args(arguments)
    calls = read(options.folder)
    pushes = [call for call in calls if call.name == PUSH]
    lengths = [1e3 * (call.ended - call.began) for call in pushes]
    if not pushes or not -len(pushes) <= (options.push or 0) < len(pushes):
        print(f"{options.folder} has {len(pushes)} pushes", file=sys.stderr)
        return 1
    print(f"{len(pushes)} pushes of {' '.join(f'{length:.1f}' for length in lengths)} ms")
    number = (
        options.push
        if options.push is not None
        else sorted(range(len(pushes)), key=lengths.__getitem__)[len(pushes) // 2]
    )
    print("\n".join(timeline(calls, pushes[number])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
