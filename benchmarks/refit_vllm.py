"""Pushes a Megatron model's weights into a running vLLM server on the same machine, and times what users wait for.

    python -m benchmarks.refit_vllm --model qwen3-8b --from etp=2 --trainer-gpus 0 1 --engine-gpus 2 3 \
        --engine-arguments "--gpu-memory-utilization 0.6"

A server is started with dummy weights (``--load-format dummy``) and CUDA graphs, and needs room for a second copy.
Trainer ranks hold the model with random weights, distributed as ``--from`` says. They change the weights and push them,
``--repeats`` times for each of ``--ways``. A way is a transport, followed by ``+in_place`` for an engine without room
for a second copy; or ``nccl``, vLLM's own engine; or ``checkpoint_engine``, the package of that name. The last two have
a server of their own, gather full tensors on the trainer and end in ``load_weights``
(:mod:`benchmarks.refit_vllm_peers`). Trainer and engine may share GPUs, and must for ``checkpoint_engine``. With
``--weight-format fp8_block``, the server's model is in block FP8, and the trainer quantizes what it sends. ``--device
cpu`` with a tiny model tests the benchmark itself. With ``--timeline``, :mod:`benchmarks.refit_timeline` then shows
where the time of a push went.

With ``--adapter-rank 16``, the trainer is a model of transformers with an adapter of PEFT instead, on one rank. It
pushes its weights with the adapter merged into them, its weights alone, and the adapter alone, over the transport that
it chooses.

After the last push of each way, the server samples tokens and the trainer computes their log-probabilities. The KL is
that of generation, k3 estimator, in nats per token. ``KL before`` is measured against weights of one version later, and
shows what a missed push looks like.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import refit_vllm_adapters
from benchmarks.command_line import checked, positive, positive_seconds, require_gpus, writable_file, writable_folder
from benchmarks.refit import MODELS
from benchmarks.refit_timeline import watch
from benchmarks.refit_vllm_peers import PEERS
from benchmarks.refit_vllm_trainer import Outcome, Task, run_rank, way_of
from benchmarks.spawned import run_ranks
from benchmarks.vllm_server import ALPHABET, ServerError, serve
from examples.serving import write_byte_tokenizer
from megatron_patches.refit.layout.weight_format import WeightFormat, quantization_config
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from megatron_patches.refit.models.family import build_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.simulation.cluster import trainer_mesh

_PATHS = ("folder", "json", "timeline")
PARTS = ("prepare", "push", "merge", "send", "look_up", "move", "verify", "commit", "paused")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        type=checked(_model, *MODELS),
        default="qwen3-8b",
        help=f"{', '.join(MODELS)}, or a config.json",
    )
    parser.add_argument(
        "--from",
        dest="trainer",
        type=checked(trainer_mesh),
        default="tp=1",
        help="mesh of the trainer, as `plan --from` takes it",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--trainer-gpus", type=int, nargs="+", default=[0], help="one for each rank of the trainer")
    parser.add_argument("--engine-gpus", type=int, nargs="+", default=[1], help="one for each worker of the engine")
    parser.add_argument(
        "--ways", nargs="+", type=checked(way_of, *PEERS), default=["cuda_ipc", "c10d", "cuda_ipc+in_place", "nccl"]
    )
    parser.add_argument("--adapter-rank", type=positive, help="push merged weights, all weights and an adapter")
    add_weight_format(parser)
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--staging-mib", type=positive, default=256)
    parser.add_argument("--timeout", type=positive_seconds, default=120.0, help="seconds that one step may take")
    parser.add_argument("--limit", type=positive_seconds, default=1800.0, help="seconds for all ways of one server")
    parser.add_argument("--engine-arguments", default="", help="further arguments of vLLM's server")
    parser.add_argument("--folder", type=writable_folder, help="keep the model's folder and the servers' logs here")
    parser.add_argument("--json", type=writable_file, help="write all numbers here")
    parser.add_argument("--timeline", type=writable_folder, help="note here when each step of a push began and ended")
    return parser.parse_args(arguments)


def add_weight_format(parser: argparse.ArgumentParser) -> None:
    """Add ``--weight-format``."""
    parser.add_argument(
        "--weight-format",
        type=WeightFormat,
        choices=list(WeightFormat),
        default=WeightFormat.TRAINED,
        help="format of the engine's weights, and of what is sent",
    )


def _model(path: str) -> None:
    family_from_config(read_config(Path(path)))


@dataclass(frozen=True)
class Served:
    """One server, and the ways to push to it.

    Attributes:
        name: of its log.
        backend: vLLM's weight-transfer backend.
        arguments: further arguments of the server.
        ways: names of ways.
    """

    name: str
    backend: str
    arguments: tuple[str, ...]
    ways: tuple[str, ...]


def servers(options: argparse.Namespace, ranks: int) -> list[Served]:
    """The servers that the command line needs: one for all ways of this project, one for each other way.

    Raises:
        SystemExit: if the number of GPUs does not match ``ranks``, or a way cannot run on these devices or send this
            format.
        ValueError: for an unknown way.
    """
    on_gpu = options.device == "cuda"
    if on_gpu and len(options.trainer_gpus) != ranks:
        raise SystemExit(f"--trainer-gpus names {len(options.trainer_gpus)} GPUs; --from has {ranks} ranks")
    if options.adapter_rank is not None:
        if ranks > 1 or options.weight_format.is_quantized:
            raise SystemExit("--adapter-rank needs --from tp=1, and no --weight-format")
        rank = str(options.adapter_rank)
        return [Served("etp", "etp", ("--enable-lora", "--max-lora-rank", rank), refit_vllm_adapters.WAYS)]
    ours = tuple(name for name in options.ways if name not in PEERS)
    for name in ours:
        way_of(name)
    peers = [name for name in options.ways if name in PEERS]
    if peers and options.weight_format.is_quantized:
        raise SystemExit(
            f"{', '.join(peers)} sends weights as they are trained, not in {options.weight_format}; name other --ways"
        )
    for name in peers:
        if not on_gpu or (PEERS[name].shares_gpus and options.trainer_gpus != options.engine_gpus):
            raise SystemExit(f"{name} needs GPUs, --trainer-gpus and --engine-gpus the same where it shares them")
    found = [Served("etp", "etp", (), ours)] if ours else []
    return [*found, *(Served(name, PEERS[name].backend, PEERS[name].arguments, (name,)) for name in peers)]


def write_model(config: Any, folder: Path, weight_format: WeightFormat = WeightFormat.TRAINED) -> dict[str, Any]:
    """Write the files that a server needs for a model without weights. Returns its Hugging Face configuration."""
    family = family_from_config(config)
    written = dict(build_config(family, "bfloat16"))
    if weight_format.is_quantized:
        written["quantization_config"] = quantization_config(family.shapes())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(written, indent=1), encoding="utf-8")
    write_byte_tokenizer(folder, ALPHABET - 1)
    return written


HEADINGS = ("way", *PARTS, "GB/s", "trainer", "engine", "beside", "KL", "KL before")


def line(found: Outcome) -> str:
    """One row of the table; seconds are medians."""
    if found.failure:
        return f"{found.way:17} {found.failure}"
    medians = {part: statistics.median(values) for part, values in found.seconds.items()} | {"prepare": found.prepare_s}
    cells = [f"{medians[part]:9.3f}" if part in medians else f"{'':9}" for part in PARTS]
    moved = medians.get("move", medians.get("push", 0.0))
    cells.append(f"{found.nbytes / moved / 1e9 if moved else 0.0:9.1f}")
    memory = (found.trainer_bytes, found.engine_bytes, found.made_bytes.get("beside"))
    cells += [f"{'':9}" if nbytes is None else f"{nbytes / 2**20:8.0f}M" for nbytes in memory]
    cells += [f"{value:9.2e}" for value in (found.kl, found.untouched_kl)]
    return f"{found.way:17} {' '.join(cells)}"


def write_report(options: argparse.Namespace, found: Sequence[Outcome]) -> None:
    """Write the results so far."""
    given = {key: str(value) for key, value in vars(options).items() if key not in _PATHS}
    content: dict[str, Any] = {"options": given, "outcomes": [asdict(item) for item in found]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def measure(
    options: argparse.Namespace,
    mesh: TrainerMesh,
    config: Mapping[str, object],
    folder: Path,
    take: Callable[[Outcome], None],
) -> None:
    """Start each server in turn, and push to it in all its ways.

    Args:
        options: the command line.
        mesh: parallel sizes of the trainer.
        config: configuration of the model, of any form that ``family_from_config`` takes.
        folder: for the model's files and the servers' logs.
        take: called with each outcome as soon as there is one; the failure of a server is an outcome, too.
    """
    on_gpu = options.device == "cuda"
    engine_gpus = tuple(options.engine_gpus) if on_gpu else ()
    written = write_model(config, folder / "model", options.weight_format)
    for served in servers(options, mesh.size):
        given = [*options.engine_arguments.split(), *served.arguments]
        try:
            with serve(folder / "model", served.backend, engine_gpus, given, folder / f"{served.name}.log") as server:
                task = Task(
                    config=written,
                    mesh=mesh,
                    gpus=tuple(options.trainer_gpus) if on_gpu else (),
                    engine_gpus=engine_gpus,
                    server_port=int(server.url.rpartition(":")[2]),
                    ways=served.ways,
                    repeats=options.repeats,
                    staging_bytes=options.staging_mib << 20,
                    timeout_s=options.timeout,
                    weight_format=options.weight_format,
                    adapter_rank=options.adapter_rank or 0,
                )
                run = run_rank if options.adapter_rank is None else refit_vllm_adapters.run_rank
                run_ranks(run, mesh.size, task, take, options.limit)
        except (ServerError, RuntimeError) as error:  # the other servers are still measured
            take(Outcome(served.name, failure=str(error)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; returns 1 if a way failed."""
    options = parse(arguments)
    # When terminated, still end the server, which runs in its own session.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    config = MODELS[options.model][0] if options.model in MODELS else read_config(Path(options.model))
    mesh = trainer_mesh(options.trainer)
    servers(options, mesh.size)  # refuse mistakes before the table begins
    if options.device == "cuda":
        require_gpus(sys.exit, 1 + max(*options.trainer_gpus, *options.engine_gpus))
    if options.timeline is not None:
        os.environ.update(watch(options.timeline))
    print(f"{HEADINGS[0]:17} {' '.join(f'{heading:>9}' for heading in HEADINGS[1:])}", flush=True)
    found: list[Outcome] = []

    def take(item: Outcome) -> None:
        found.append(item)
        print(line(item), flush=True)
        if options.json is not None:
            write_report(options, found)

    with tempfile.TemporaryDirectory() as temporary:
        measure(options, mesh, config, options.folder or Path(temporary), take)
    return int(any(item.failure for item in found))


if __name__ == "__main__":
    sys.exit(main())
