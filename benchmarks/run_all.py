"""Runs the whole training benchmark on this machine's GPUs within a time limit, despite failures of single systems.

::

    python -m benchmarks.run_all --gpus 4 --out bench-out --seconds 480
    python -m benchmarks.run_all --gpus 2 --jobs moe --systems none,etp_copy_engine --profile
    python -m benchmarks.run_all --gpus 2 --jobs ours,theirs --precisions bf16,fp8_block,fp8_tensor

The benchmark is a few jobs, the most important one first, each a `torchrun` of :mod:`benchmarks.train_step`. A job that
dies or hangs loses the system that it was measuring: the report has the reason, and the job goes on without the system
as long as there is time. Results, logs, table and plot lie in the folder that ``--out`` names.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.command_line import positive, positive_seconds, writable_folder
from benchmarks.train_report import load, plot, table
from benchmarks.train_shapes import PRECISIONS, SHAPES, SYSTEMS, obstacle

# Time for importing everything on all ranks, and for the first collectives.
_START_S = 25.0
# Time for processes to end by themselves once everything is measured and written.
_END_S = 10.0
# Less time than this is not worth a start.
_SHORTEST_S = 45.0
_KINDS = ("ours", "theirs", "moe", "small", "big")
_OURS = ("none", "etp_copy_engine", "etp_c10d", "none_graph", "etp_copy_engine_graph", "etp_c10d_graph")
_THEIRS = ("none", "dp", "upstream_gtp", "tp", "fsdp2", "megatron_fsdp")
_EXPERTS_OURS = ("none", "ep", "etp_copy_engine", "etp_c10d", "etp_copy_engine_ep2", "etp_c10d_ep2")
_EXPERTS_THEIRS = ("none", "dp", "upstream_gtp", "megatron_fsdp")
# One after the other: two of them do not fit side by side.
_BIG = ("etp_copy_engine", "upstream_gtp", "tp", "fsdp2", "etp_c10d", "megatron_fsdp", "none")
_PROBE = "import torch, transformer_engine, megatron.core; print(torch.cuda.device_count())"


@dataclass(frozen=True)
class Job:
    """Systems that are measured together.

    Attributes:
        name: of its files.
        kind: what ``--jobs`` calls it.
        systems: what it measures.
        limit_s: seconds after which it is ended; and its weight where there is less time than all jobs may take.
        arguments: for :mod:`benchmarks.train_step`.
    """

    name: str
    kind: str
    systems: tuple[str, ...]
    limit_s: float
    arguments: tuple[str, ...] = field(default=())


def jobs(kinds: Sequence[str], precisions: Sequence[str] = ("bf16",)) -> list[Job]:
    """All jobs of the given kinds, the most important one first; each in all precisions, one after the other."""
    model, small = ("--shape", "llama8b-8l"), ("--shape", "small", "--steps", "20", "--longest", "0.5")
    experts = ("--shape", "qwen3-30b-a3b-6l", "--microbatches", "1", "--steps", "3", "--longest", "4")
    # A step takes seconds: few of them.
    big = ("--shape", "llama70b-40l", "--steps", "1", "--rounds", "2", "--warm-up", "0")
    every = [
        Job("ours", "ours", _OURS, 240.0, model),
        Job("theirs", "theirs", _THEIRS, 240.0, model),
        Job("moe-ours", "moe", _EXPERTS_OURS, 240.0, experts),
        Job("moe-theirs", "moe", _EXPERTS_THEIRS, 240.0, experts),
        Job("small-ours", "small", _OURS, 120.0, small),
        Job("small-theirs", "small", _THEIRS, 120.0, small),
        *(Job(f"big-{system}", "big", (system,), 150.0, big) for system in _BIG),
    ]
    return [_in(precision, job) for job in every if job.kind in kinds for precision in precisions]


def _in(precision: str, job: Job) -> Job:
    if precision == "bf16":
        return job
    return replace(job, name=f"{job.name}-{precision}", arguments=(*job.arguments, "--precision", precision))


def possible(every: Sequence[Job], gpus: int, systems: Sequence[str] = tuple(SYSTEMS)) -> list[Job]:
    """The jobs, each with only the systems that are wanted and can run on these GPUs; jobs without any are left out."""
    left = [
        replace(
            job, systems=tuple(s for s in job.systems if s in systems and not obstacle(s, SHAPES[_shape(job)], gpus))
        )
        for job in every
    ]
    return [job for job in left if job.systems]


@dataclass(frozen=True)
class Ended:
    """How a process ended; ``code`` is None if it was ended because its time was up."""

    code: int | None
    tail: str


@dataclass(frozen=True)
class Time:
    """What a process may take.

    Attributes:
        wanted_s: it should be through by then, and leaves out repetitions for that.
        limit_s: it is ended then.
    """

    wanted_s: float
    limit_s: float


type Runner = Callable[[Job, Path, Time], Ended]


def run_jobs(chosen: Sequence[Job], out: Path, deadline: float, start: Runner) -> None:
    """Run jobs one after the other; each should leave the later ones their share of the time.

    Args:
        chosen: what to run.
        out: folder for reports.
        deadline: in the clock of `time.monotonic`.
        start: runs one process: the job, its report, its time.
    """
    begun = time.monotonic()
    for index, job in enumerate(chosen):
        print(f"{time.monotonic() - begun:.0f} s: {job.name}", flush=True)
        share = job.limit_s / sum(later.limit_s for later in chosen[index:])
        run_job(job, out, deadline, start, wanted_by=time.monotonic() + share * (deadline - time.monotonic()))


def run_job(job: Job, out: Path, deadline: float, start: Runner, *, wanted_by: float) -> None:
    """Run a job until it is through or the time is up. If it dies, run it again without what failed.

    Args:
        job: what to run.
        out: folder for its reports: ``<name>.json``, and ``<name>-2.json`` and so on of later attempts.
        deadline: in the clock of `time.monotonic`.
        start: runs one process.
        wanted_by: when the job should be through, in the same clock.
    """
    for former in _reports(job, out):
        former.unlink()
    attempt, left = 1, job.systems
    while left:
        path = out / (f"{job.name}.json" if attempt == 1 else f"{job.name}-{attempt}.json")
        remaining = min(job.limit_s, deadline - time.monotonic())
        if remaining < _SHORTEST_S:
            _record(path, dict.fromkeys(left, "not run: the time was up"), job)
            return
        wanted = min(job.limit_s, wanted_by - time.monotonic()) - _START_S - _END_S
        ended = start(replace(job, systems=left), path, Time(max(wanted, 1.0), remaining))
        report = _read(path)
        took = [f"{system} {seconds:.0f} s" for system, seconds in report.get("seconds", {}).items()]
        print(f"{path.stem}: {', '.join(took) or 'never began'}", flush=True)
        doing = report.get("doing", "start")
        if not doing:
            # All was done; how the processes ended does not matter any more.
            return
        culprit = doing.split(":")[0]
        reason = "took too long" if ended.code is None else f"the process ended with {ended.code}"
        text = f"{doing}: {reason}; {ended.tail}"
        if culprit not in left:
            _record(path, {system: text for system in left if system not in report.get("failures", {})}, job)
            return
        _record(path, {culprit: text}, job)
        left = _not_yet(left, report, culprit)
        attempt += 1


def _not_yet(systems: Sequence[str], report: dict[str, Any], culprit: str) -> tuple[str, ...]:
    """What another attempt should measure: "none" for the ratios, and all that has no result yet and did not fail."""
    measured = {result["system"] for result in report.get("results", []) if result["median"]}
    done = measured | set(report.get("failures", {})) | {culprit}
    left = [system for system in systems if system not in done]
    bases = [system for system in systems if system.startswith("none") and system in measured - {culprit}]
    return (*bases, *left) if left else ()


def _record(path: Path, failures: dict[str, str], job: Job) -> None:
    report = _read(path)
    if not report:
        report = {"shape_name": _shape(job), "gpus": 0, "device": "", "results": []}
    report["failures"] = report.get("failures", {}) | failures
    path.write_text(json.dumps(report, indent=1), encoding="utf-8")


def _shape(job: Job) -> str:
    return job.arguments[job.arguments.index("--shape") + 1]


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def torchrun(gpus: int, *, profile: bool = False) -> Runner:
    """A runner of real processes; with ``profile`` they also write ``profiles/<name>.json`` beside each report."""

    def start(job: Job, path: Path, time_: Time) -> Ended:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus),
            "--standalone", "--local-addr", "127.0.0.1", "-m", "benchmarks.train_step",
            "--systems", ",".join(job.systems), "--json", str(path),
            "--seconds", f"{time_.wanted_s:.0f}", *job.arguments,
        ]  # fmt: skip
        if profile:
            profiles = path.parent / "profiles"
            profiles.mkdir(exist_ok=True)
            command += ["--profile", str(profiles / path.name)]
        log = path.with_suffix(".log")
        with log.open("w") as sink:
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT)  # noqa: S603 - built above
            code = _wait(process, path, time_.limit_s)
            if code is None:
                _end(process)
        return Ended(code, what_went_wrong(log.read_text(encoding="utf-8", errors="replace")))

    return start


def _wait(process: subprocess.Popen[bytes], path: Path, limit_s: float) -> int | None:
    """Wait for a process, but not long once its report says that all is done; its code, or None if it still runs."""
    until = time.monotonic() + limit_s
    done = False
    while time.monotonic() < until:
        try:
            return process.wait(1.0)
        except subprocess.TimeoutExpired:
            if not done and _read(path).get("doing") == "":
                done, until = True, min(until, time.monotonic() + _END_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its workers."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(45.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def what_went_wrong(log: str) -> str:
    """The first line of a log that names an error, or the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b\w*(Error|Exception)\b:", line)]
    return ([*errors[:1], *lines[-1:]] or ["it wrote nothing"])[0][:300]


def cannot_run(gpus: int) -> str:
    """Why the benchmark cannot run here; empty if it can."""
    try:
        probe = subprocess.run(  # noqa: S603 - a constant
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=False, timeout=300
        )
    except subprocess.TimeoutExpired:
        return "importing PyTorch, Transformer Engine and Megatron-core took more than 300 s"
    if probe.returncode != 0:
        reason = what_went_wrong(probe.stderr)
        return f"{sys.executable} cannot import PyTorch, Transformer Engine and Megatron-core ({reason})"
    found = int(probe.stdout.split()[-1])
    return "" if found >= gpus else f"it needs {gpus} GPUs and PyTorch sees {found}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the jobs, then make table and plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=positive, default=4)
    parser.add_argument("--out", type=writable_folder, default=Path("bench-out"), help="folder for all that is written")
    parser.add_argument("--seconds", type=positive_seconds, default=1800.0, help="time limit for everything")
    parser.add_argument("--jobs", default=",".join(_KINDS), help=f"comma-separated: {', '.join(_KINDS)}")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated; ratios need none")
    parser.add_argument("--precisions", default="bf16", help=f"comma-separated: {', '.join(PRECISIONS)}")
    parser.add_argument("--profile", action="store_true", help="write what a step costs, call by call, to OUT/profiles")
    options = parser.parse_args(arguments)
    for what, given, known in (
        ("job", options.jobs, _KINDS),
        ("system", options.systems, SYSTEMS),
        ("precision", options.precisions, PRECISIONS),
    ):
        unknown = [name for name in given.split(",") if name not in known]
        if unknown:
            parser.error(f"--{what}s {unknown[0]}: there is no such {what}; choose from {', '.join(known)}")
    begun = time.monotonic()
    reason = cannot_run(options.gpus)
    if reason:
        sys.exit(f"The training benchmark cannot run here: {reason}. It needs NVIDIA GPUs on one host and the "
                 "packages of `pip install '.[megatron,te]'`.")  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    every = jobs(options.jobs.split(","), options.precisions.split(","))
    chosen = possible(every, options.gpus, options.systems.split(","))
    run_jobs(chosen, options.out, begun + options.seconds, torchrun(options.gpus, profile=options.profile))
    summarise(options.out, chosen)


def summarise(out: Path, chosen: Sequence[Job]) -> None:
    """Write ``table.md`` of the jobs' reports, and plots of dense models and of experts; print the table.

    Raises:
        SystemExit: if nothing was measured.
    """
    reports = load([path for job in chosen for path in _reports(job, out)])
    text = table(reports)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    experts = [report for report in reports if report.get("shape", {}).get("experts")]
    dense = [report for report in reports if report not in experts]
    for name, title, shown in (("plot", "", dense), ("plot-moe", "Mixture of experts", experts)):
        if not shown:
            continue
        try:
            plot(shown, out / f"{name}.svg", title)
        except (SystemExit, ValueError) as error:
            print(f"no {name}: {error}")
    if not any(result["median"] for report in reports for result in report["results"]):
        sys.exit(f"Nothing was measured. The reasons are in {out / 'table.md'}.")


def _reports(job: Job, out: Path) -> list[Path]:
    """The reports of all attempts at a job."""
    found = (path for path in out.glob("*.json") if re.fullmatch(rf"{job.name}(-\d+)?", path.stem))
    return sorted(found, key=lambda path: path.stem)


if __name__ == "__main__":
    main()
