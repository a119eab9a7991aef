"""Moves a model from trainer ranks to engine workers on one machine, over every transport and by gather and broadcast.

    python -m benchmarks.refit [--model qwen3-8b|qwen3-moe|tiny|config.json] [--from etp=2] [--to tp=2] [--device cuda]

Each rank of both sides is a process, on a GPU of its own with ``--device cuda``; their layouts come from the model's
configuration, their weights are random. Neither Megatron nor vLLM is needed. In one run: what the links can do (plain
sends between pairs of ranks), then the usual way (every tensor gathered on the trainer, broadcast whole, and cut by
each worker), then each transport. Every version is checked, element by element, once after the repetitions.

With ``--weight-format fp8_block`` each push quantizes the linear layers first, and takes half the bytes.

Columns: ``plan`` seconds to exchange manifests, plan and prove, once; ``link`` seconds of the first push beyond the
others, once; medians over ``--repeats`` of ``push`` (until all workers have verified), of its parts on the slowest
worker ``move`` (pack, wire, unpack) and ``verify``, of ``commit`` (into the memory that serves) and ``pause`` (how
long serving stands still); GB/s into each worker while moving, and what share of the link that is; memory beyond the
weights, on the trainer and on a worker.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command_line import checked, positive, positive_seconds, require_gpus, writable_file
from benchmarks.refit_ranks import Outcome, Task, run_rank
from benchmarks.spawned import run_ranks
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.models.config_traits import family_from_config, read_config
from megatron_patches.refit.simulation.cluster import engine_mesh, trainer_mesh
from megatron_patches.refit.transports.base import TransportName

QWEN3_8B: Mapping[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 36,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
QWEN3_MOE: Mapping[str, object] = {  # Qwen3-30B-A3B with 14 of its 48 layers: 18.7 GB
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 14,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "moe_intermediate_size": 768,
}
QWEN3_32B: Mapping[str, object] = {  # Qwen3-32B with 40 of its 64 layers: 42.1 GB
    **QWEN3_8B,
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
}
QWEN3_SMALL: Mapping[str, object] = {  # Qwen3-0.6B with 8 of its 28 layers: 0.56 GB
    **QWEN3_8B,
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
TINY: Mapping[str, object] = {
    **QWEN3_8B,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}
TINY_MOE: Mapping[str, object] = {
    **QWEN3_MOE,
    **{name: TINY[name] for name in ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")},
    **{name: TINY[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")},
    "num_experts": 8,
    # All of them: of random experts the second best is often nearly tied with the third, and two implementations in
    # bfloat16 choose differently for some tokens, whose probabilities then differ by a factor of 5.
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}
MODELS = {
    "qwen3-8b": (QWEN3_8B, "etp=2"),
    "qwen3-0.6b-8l": (QWEN3_SMALL, "etp=2"),
    "qwen3-32b": (QWEN3_32B, "etp=2"),
    "qwen3-moe": (QWEN3_MOE, "ep=2,dp=2"),
    "tiny": (TINY, "etp=2"),
    "tiny-moe": (TINY_MOE, "ep=2,dp=2"),
}
TRANSPORTS = {"cuda": ("c10d", "cuda_ipc", "nixl", "shm"), "cpu": ("shm", "tcp", "nixl")}


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
        "--from", dest="trainer", type=checked(trainer_mesh), help="mesh of the trainer, as `plan --from` takes it"
    )
    parser.add_argument(
        "--to",
        dest="engine",
        type=checked(engine_mesh),
        default="tp=2",
        help="mesh of the engine, as `plan --to` takes it",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--transports",
        nargs="*",
        choices=[name.value for name in TransportName],
        help="default: all that the device has",
    )
    parser.add_argument(
        "--weight-format",
        choices=[name.value for name in WeightFormat],
        default=WeightFormat.TRAINED.value,
        help="in a quantized format, gather and broadcast are left out",
    )
    parser.add_argument("--repeats", type=positive, default=10)
    parser.add_argument("--staging-mib", type=positive, default=256)
    parser.add_argument("--timeout", type=positive_seconds, default=300.0, help="seconds that one run may stand still")
    parser.add_argument(
        "--limit", type=positive_seconds, default=1800.0, help="seconds that all ways together may take"
    )
    parser.add_argument("--json", type=writable_file, help="write all numbers here")
    options = parser.parse_args(arguments)
    if options.device == "cuda":
        require_gpus(parser.error, sum(make_task(options).sizes))
    return options


def _model(path: str) -> None:
    family_from_config(read_config(Path(path)))


def make_task(options: argparse.Namespace) -> Task:
    """The settings that every rank gets, from the command line."""
    if options.model in MODELS:
        config, trainer = MODELS[options.model]
    else:
        config, trainer = json.loads(Path(options.model).read_text(encoding="utf-8")), "etp=2"
    return Task(
        config=dict(config),
        trainer=options.trainer or trainer,
        engine=options.engine,
        device=options.device,
        transports=tuple(TRANSPORTS[options.device] if options.transports is None else options.transports),
        weight_format=options.weight_format,
        repeats=options.repeats,
        staging_bytes=options.staging_mib << 20,
        timeout_s=options.timeout,
    )


HEADINGS = ("way", "plan", "link", "push", "move", "verify", "commit", "pause", "GB/s", "of link", "trainer", "worker")


def line(found: Outcome) -> str:
    """One row of the table."""
    if found.failure:
        return f"{found.way:20} {found.failure}"
    cells = [f"{value:8.3f}" for value in (found.plan_s, found.link_s)]
    medians: dict[str, float] = {part: statistics.median(values) for part, values in found.seconds.items()}
    cells += [f"{medians.get(part, 0.0):8.3f}" for part in ("push", "move", "verify", "commit", "pause")]
    cells += [f"{found.gb_per_s:8.2f}", f"{found.share_of_link:7.1%}"]
    cells += [f"{nbytes / 2**20:7.0f}M" for nbytes in (found.trainer_bytes, found.worker_bytes)]
    return f"{found.way:20} {' '.join(cells)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 1 where a way failed."""
    options = parse(arguments)
    # Ended from outside, it ends its processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"{HEADINGS[0]:20} {' '.join(f'{heading:>8}' for heading in HEADINGS[1:])}", flush=True)
    task = make_task(options)
    found: list[Outcome] = []

    def take(item: Outcome) -> None:
        """Prints and writes an outcome at once, so that it is kept whatever becomes of the next way."""
        found.append(item)
        print(line(item), flush=True)
        if options.json is not None:
            content: dict[str, Any] = {"options": {key: str(value) for key, value in vars(options).items()}}
            content["outcomes"] = [asdict(item) for item in found]
            options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")

    try:
        run_ranks(run_rank, sum(task.sizes), task, take, options.limit)
    except RuntimeError as error:
        take(Outcome("the rest", failure=str(error)))
    return int(any(item.failure for item in found))


if __name__ == "__main__":
    sys.exit(main())
