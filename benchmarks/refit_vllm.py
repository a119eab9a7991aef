"""Pushes a Megatron model's weights into a running vLLM server on the same machine, and times what a user waits for.

    python -m benchmarks.refit_vllm --model qwen3-8b --from etp=2 --trainer-gpus 0 1 --engine-gpus 2 3

A server is started with weights that mean nothing (``--load-format dummy``), with CUDA graphs. Trainer ranks hold the
model of ``--from`` with random weights, change them, and push, ``--repeats`` times for each of ``--ways``: a
transport, with ``+in_place`` for an engine that has no room for a second copy; ``nccl``, vLLM's own engine, and
``checkpoint_engine``, the package of that name, each with a server of its own, gather whole tensors on the trainer and
end in ``load_weights`` (:mod:`benchmarks.refit_vllm_peers`). The two sides may share GPUs, and must for
``checkpoint_engine``. Without GPUs it runs on ``--device cpu`` with a tiny model, as a test of itself.

After the last push of each way the server draws tokens, and the trainer computes their log-probabilities: the KL is
that of generation, k3 estimator, in nats a token; ``KL before`` is the same against weights of one version later, which
shows what a missed push looks like.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.refit import MODELS
from benchmarks.refit_vllm_peers import PEERS
from benchmarks.refit_vllm_trainer import Outcome, Task, run_rank, way_of
from benchmarks.spawned import free_port, run_ranks
from benchmarks.vllm_server import ALPHABET, ServerError, serve
from examples.serving import write_byte_tokenizer
from megatron_patches.refit.cluster import trainer_mesh
from megatron_patches.refit.hf_config import build_config
from megatron_patches.refit.source.config_traits import family_from_config, read_config

_PATHS = ("folder", "json")
PARTS = ("prepare", "push", "send", "look_up", "move", "verify", "commit", "paused")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="qwen3-8b", help=f"{', '.join(MODELS)}, or a config.json")
    parser.add_argument("--from", dest="trainer", default="tp=1", help="mesh of the trainer, as `plan --from` takes it")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--trainer-gpus", type=int, nargs="+", default=[0], help="one for each rank of the trainer")
    parser.add_argument("--engine-gpus", type=int, nargs="+", default=[1], help="one for each worker of the engine")
    parser.add_argument("--ways", nargs="+", default=["cuda_ipc", "c10d", "cuda_ipc+in_place", "nccl"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--staging-mib", type=int, default=256)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds that one step may take")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that all ways of one server may take")
    parser.add_argument("--engine-arguments", default="", help="further arguments of vLLM's server")
    parser.add_argument("--folder", type=Path, help="keep the model's folder and the servers' logs here")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    return parser.parse_args(arguments)


def write_model(config: Any, folder: Path) -> dict[str, Any]:
    """Writes what a server needs of a model that has no weights yet, and gives its configuration."""
    written = dict(build_config(family_from_config(config), "bfloat16"))
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
    """Writes what there is so far."""
    given = {key: str(value) for key, value in vars(options).items() if key not in _PATHS}
    content: dict[str, Any] = {"options": given, "outcomes": [asdict(item) for item in found]}
    options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 where a way failed."""
    options = parse(arguments)
    # Ended from outside, it still ends its server, which runs in a session of its own.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    config = MODELS[options.model][0] if options.model in MODELS else read_config(Path(options.model))
    mesh = trainer_mesh(options.trainer)
    on_gpu = options.device == "cuda"
    if on_gpu and len(options.trainer_gpus) != mesh.size:
        raise SystemExit(f"--trainer-gpus names {len(options.trainer_gpus)} GPUs; --from has {mesh.size} ranks")
    ours = tuple(name for name in options.ways if name not in PEERS)
    for name in options.ways:  # refused before a server starts
        if name in ours:
            way_of(name)
        elif not on_gpu or (PEERS[name].shares_gpus and options.trainer_gpus != options.engine_gpus):
            raise SystemExit(f"{name} needs GPUs, --trainer-gpus and --engine-gpus the same where it shares them")
    servers: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = [("etp", "etp", (), ours)] if ours else []
    servers += [(name, PEERS[name].backend, PEERS[name].arguments, (name,)) for name in options.ways if name in PEERS]
    engine_gpus = tuple(options.engine_gpus) if on_gpu else ()
    print(f"{HEADINGS[0]:17} {' '.join(f'{heading:>9}' for heading in HEADINGS[1:])}", flush=True)
    found: list[Outcome] = []

    def take(item: Outcome) -> None:
        """At once, so that it is kept whatever becomes of the next way."""
        found.append(item)
        print(line(item), flush=True)
        if options.json is not None:
            write_report(options, found)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        written = write_model(config, folder / "model")
        for log, backend, further, ways in servers:
            given = [*options.engine_arguments.split(), *further]
            try:
                with serve(folder / "model", backend, engine_gpus, given, folder / f"{log}.log") as server:
                    task = Task(
                        config=written,
                        mesh=mesh,
                        gpus=tuple(options.trainer_gpus) if on_gpu else (),
                        engine_gpus=engine_gpus,
                        server_port=int(server.url.rpartition(":")[2]),
                        port=free_port(),
                        ways=ways,
                        repeats=options.repeats,
                        staging_bytes=options.staging_mib << 20,
                        timeout_s=options.timeout,
                    )
                    run_ranks(run_rank, mesh.size, task, take, options.limit)
            except (ServerError, RuntimeError) as error:  # the other servers are measured all the same
                take(Outcome(log, failure=str(error)))
    return int(any(item.failure for item in found))


if __name__ == "__main__":
    sys.exit(main())
