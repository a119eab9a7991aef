"""Pushes a model from trainers of several meshes into engines of several meshes, and compares log-probabilities.

::

    python -m benchmarks.refit_meshes --table cpu --json meshes.json
    python -m benchmarks.refit_meshes --table gpus --json meshes.json
    python -m benchmarks.refit_meshes --model qwen3-8b --from tp=2 etp=2 --to tp=2 --json meshes.json

``--table`` pushes the models of ``docs/agreement.md`` between the meshes there: tiny ones on the CPU, and shapes of
Qwen3 on 2 GPUs. ``--model``, ``--from`` and ``--to`` choose others.

One engine is started for each mesh of ``--to``, and takes the weights of every trainer of ``--from``, one after the
other (meshes as ``plan --from`` and ``--to`` take them). After each push the engine draws tokens, and the trainer
computes their log-probabilities. They agree if the KL of generation is at most ``--most-kl`` and ten times lower than
with the weights of another version. On GPUs, trainers use the first ones and engines the last ones; where there are not
enough for both, they share some. With ``--weight-format fp8_block`` the engines' model is in block FP8; what that loses
takes a larger ``--most-kl``.
"""

from __future__ import annotations

import argparse
import math
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.command_line import checked, positive_seconds, require_gpus, writable_file
from benchmarks.refit import MODELS
from benchmarks.refit_vllm import add_weight_format, write_model
from benchmarks.refit_vllm_trainer import Outcome, Task, run_rank
from benchmarks.spawned import run_ranks
from benchmarks.vllm_server import ServerError, VllmServer, serve
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from megatron_patches.refit.simulation.cluster import engine_mesh, trainer_mesh
from megatron_patches.refit.target.vllm_layout import EngineMesh
from megatron_patches.refit.transports.base import TransportName

_REPEATS = 1  # after the first push, which makes links
_VERSIONS = 1 + _REPEATS + 1  # and one that is compared with and not pushed
_STAGING_BYTES = 256 << 20
_TELLS = 10.0
_AGREES, _DIFFERS = "agrees", "differs"

TABLES: Mapping[str, Sequence[tuple[str, Sequence[str], Sequence[str]]]] = {
    "cpu": (
        ("tiny", ("dp=2", "tp=2", "pp=2", "etp=2", "tp=2,etp=2", "pp=2,etp=2"), ("tp=1",)),
        ("tiny", ("etp=2", "tp=2,etp=2", "pp=2,etp=2"), ("tp=2",)),
        (
            "tiny-moe",
            ("tp=2,etp=2,ep=2,expert_etp=2", "pp=2,ep=2,dp=2", "etp=2,ep=2", "tp=2,ep=2", "ep=2,dp=2"),
            ("tp=1",),
        ),
    ),
    "gpus": (
        ("qwen3-8b", ("etp=2", "pp=2"), ("tp=1",)),
        ("qwen3-moe", ("etp=2,expert_etp=2", "ep=2,dp=2", "etp=2,ep=2", "tp=2,ep=2", "etp=2"), ("tp=1",)),
    ),
}
"""What ``--table`` pushes: models, each with meshes of trainers and of engines."""


@dataclass(frozen=True)
class Row:
    """One push.

    Attributes:
        model: what was pushed.
        trainer: mesh of the trainer.
        engine: mesh of the engine.
        seconds: of a push whose links are made.
        kl: generation KL, in nats a token (k3 estimator of KL(engine, trainer)).
        largest: largest absolute difference of log-probabilities.
        other_kl: KL against weights of another version.
        verdict: "agrees", "differs", or why there was nothing to compare.
        weights: format of the engine's weights, and of what was sent.
    """

    model: str
    trainer: str
    engine: str
    seconds: float
    kl: float
    largest: float
    other_kl: float
    verdict: str
    weights: WeightFormat = WeightFormat.TRAINED


def row(options: argparse.Namespace, trainer: str, engine: str, found: Outcome) -> Row:
    """The row for an outcome, with its verdict."""
    agrees = found.kl <= options.most_kl and _TELLS * found.kl <= found.untouched_kl
    seconds = statistics.median(found.seconds.get("push", [math.nan]))
    verdict = found.failure or (_AGREES if agrees else _DIFFERS)
    figures = seconds, found.kl, found.largest_error, found.untouched_kl
    return Row(options.model, trainer, engine, *figures, verdict, options.weight_format)


def table(rows: Sequence[Row]) -> Table:
    """All pushes, as Markdown."""
    found = Table(box=box.MARKDOWN)
    for column in ("model", "trainer", "engine"):
        found.add_column(column, overflow="fold")
    for column in ("push, s", "KL", "largest", "other KL"):
        found.add_column(column, justify="right", no_wrap=True)
    found.add_column("verdict", overflow="fold")
    for one in rows:
        figures = [f"{one.seconds:.2f}", f"{one.kl:.1e}", f"{one.largest:.3f}", f"{one.other_kl:.2g}"]
        model = f"{one.model} {one.weights}" if one.weights.is_quantized else one.model
        found.add_row(model, one.trainer, one.engine, *figures, one.verdict)
    return found


def engine_arguments(mesh: EngineMesh, *, on_gpu: bool) -> list[str]:
    """VLLM's command line for a mesh."""
    sizes = {"--tensor-parallel-size": mesh.tp, "--pipeline-parallel-size": mesh.pp, "--data-parallel-size": mesh.dp}
    found = [word for flag, size in sizes.items() for word in (flag, str(size))]
    if mesh.expert_parallel:
        found.append("--enable-expert-parallel")
    found += ["--enforce-eager", "--max-model-len", "256"]
    # On a GPU, the rest is for the new weights beside the old ones and for a trainer on the same one.
    return [*found, *(("--gpu-memory-utilization", "0.4") if on_gpu else ("--block-size", "32"))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--table", choices=list(TABLES), help="all pushes of the documentation's table, on the CPU or on 2 GPUs"
    )
    parser.add_argument(
        "--model", type=checked(_model, *MODELS), default="tiny", help=f"{', '.join(MODELS)}, or a file"
    )
    parser.add_argument("--from", dest="trainers", type=checked(trainer_mesh), nargs="+")
    parser.add_argument("--to", dest="engines", type=checked(engine_mesh), nargs="+")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    add_weight_format(parser)
    parser.add_argument("--transport", choices=list(TransportName), help="cuda_ipc by default; shm on CPUs")
    parser.add_argument("--most-kl", type=float, default=1e-2, metavar="NATS", help="with which two sides agree")
    parser.add_argument("--timeout", type=positive_seconds, default=120.0, help="seconds that one step may take")
    parser.add_argument("--limit", type=positive_seconds, default=600.0, help="seconds of one trainer")
    parser.add_argument(
        "--json",
        type=writable_file,
        help="write all figures here; comparisons that it has are kept, and not made again",
    )
    return parser


def _model(path: str) -> None:
    family_from_config(read_config(Path(path)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns 1 unless all agree."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if bool(options.table) == bool(options.trainers or options.engines):
        parser.error("give either --table, or --from and --to")
    if options.table:
        options.device = "cpu" if options.table == "cpu" else "cuda"
    elif not (options.trainers and options.engines):
        parser.error("--from and --to go together")
    parts = TABLES[options.table] if options.table else [(options.model, options.trainers, options.engines)]
    meshes = [trainer_mesh(text) for _, trainers, _ in parts for text in trainers]
    if any(mesh.vpp > 1 for mesh in meshes):
        parser.error("--from: vpp is not covered here; leave it out")
    workers = [engine_mesh(text).size for _, _, engines in parts for text in engines]
    if options.device == "cuda":
        require_gpus(parser.error, max(*(mesh.size for mesh in meshes), *workers))
    # When terminated, still end the server, which runs in its own session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    rows = _known(options.json)
    with tempfile.TemporaryDirectory() as folder:
        for options.model, options.trainers, engine in ((model, of, to) for model, of, each in parts for to in each):
            for one in _pushes(options, engine, _done(options, rows), Path(folder)):
                rows.append(one)
                print(f"{one.model}: {one.trainer} -> {one.engine}: {one.verdict}", flush=True)
                if options.json is not None:
                    content = msgspec.json.encode({"rows": [asdict(item) for item in rows]})
                    options.json.write_bytes(msgspec.json.format(content, indent=1) + b"\n")
    Console(highlight=False).print(table(rows))
    return int(any(one.verdict != _AGREES for one in rows))


def load(path: Path) -> list[Row]:
    """The rows of a file that ``--json`` named."""
    rows = msgspec.json.decode(path.read_bytes())["rows"]
    # JSON has no NaN, which the figures of a failed push are, and null stands for it.
    found = [{name: math.nan if value is None else value for name, value in one.items()} for one in rows]
    return msgspec.convert(found, list[Row])


def _known(path: Path | None) -> list[Row]:
    """The comparisons of an earlier run; what failed is tried again."""
    rows = load(path) if path is not None and path.exists() else []
    return [one for one in rows if one.verdict in (_AGREES, _DIFFERS)]


def _done(options: argparse.Namespace, rows: Sequence[Row]) -> set[tuple[str, str]]:
    """Meshes of trainer and engine between which this model has been pushed in this format."""
    ours = options.model, options.weight_format
    return {(one.trainer, one.engine) for one in rows if (one.model, one.weights) == ours}


def _pushes(options: argparse.Namespace, engine: str, known: set[tuple[str, str]], folder: Path) -> Iterator[Row]:
    """Start an engine, unless all of its rows are known, and push from every trainer's mesh."""
    missing = [text for text in options.trainers if (text, engine) not in known]
    if not missing:
        return
    import torch  # after the command line has been checked

    on_gpu, mesh = options.device == "cuda", engine_mesh(engine)
    count = torch.cuda.device_count()
    gpus = tuple(range(count - mesh.size, count)) if on_gpu else ()
    config = MODELS[options.model][0] if options.model in MODELS else read_config(Path(options.model))
    written = write_model(config, folder / "model", options.weight_format)
    more, left = engine_arguments(mesh, on_gpu=on_gpu), missing.copy()
    try:
        with serve(folder / "model", "etp", gpus, more, folder / "server.log") as server:
            for number, trainer in enumerate(missing):
                found = _push(options, written, server, trainer, gpus, number * _VERSIONS)
                left.remove(trainer)
                yield row(options, trainer, engine, found)
    except ServerError as error:
        print(error, file=sys.stderr)  # with the end of its log; the last line says why
        failure = str(error).splitlines()[-1]
        for trainer in left:
            yield row(options, trainer, engine, Outcome(engine, failure=failure))


def _push(
    options: argparse.Namespace,
    config: dict[str, Any],
    server: VllmServer,
    trainer: str,
    engine_gpus: tuple[int, ...],
    served: int,
) -> Outcome:
    """Push from one mesh."""
    mesh = trainer_mesh(trainer)
    task = Task(
        config=config,
        mesh=mesh,
        gpus=tuple(range(mesh.size)) if engine_gpus else (),
        engine_gpus=engine_gpus,
        server_port=int(server.url.rpartition(":")[2]),
        ways=(options.transport or ("cuda_ipc" if engine_gpus else "shm"),),
        repeats=_REPEATS,
        staging_bytes=_STAGING_BYTES,
        timeout_s=options.timeout,
        weight_format=options.weight_format,
        served=served,
    )
    found: list[Outcome] = []
    try:
        run_ranks(run_rank, mesh.size, task, found.append, options.limit)
    except RuntimeError as error:
        return Outcome(trainer, failure=str(error))
    return found[0]


if __name__ == "__main__":
    sys.exit(main())
