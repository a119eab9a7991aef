"""Runs examples/pretrain_gpt.py and records loss and memory of every step.

::

    torchrun ... -m megatron_patches benchmarks/long_run_training.py ... --record DIRECTORY

Rank r appends a line of JSON for each step to ``DIRECTORY/rank<r>.jsonl``; :class:`Step` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch


@dataclass(frozen=True)
class Step:
    """What one rank knows after one step.

    Attributes:
        step: number of the step in the whole training, from 0.
        loss: over all data; None where the pipeline stage has none.
        grad_norm: before clipping.
        seconds: that the step took.
        allocated: bytes of tensors on the device; 0 on a CPU.
        peak: most bytes of tensors on the device within this step or, the first time, before it; 0 on a CPU.
        reserved: bytes that PyTorch's allocator holds of the device; 0 on a CPU.
        symmetric: bytes of memory that peers map, which that allocator does not know.
        process: most bytes of main memory that the process ever had.
    """

    step: int
    loss: float | None
    grad_norm: float
    seconds: float
    allocated: int
    peak: int
    reserved: int
    symmetric: int
    process: int


def _symmetric_bytes(chunks: list[Any]) -> int:
    from etp.wrap import runtimes_of

    transports = {
        id(t): t for chunk in chunks for runtime in runtimes_of(chunk) for t in runtime.routes.transports.values()
    }
    return sum(sum(transport.nbytes().values()) for transport in transports.values())


class Recorder:
    """Writes a line for each step that Megatron takes.

    Args:
        file: open for writing text.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def watch(self, training: Any) -> None:
        """Note what ``train_step`` of the module ``megatron.training.training`` returns from now on."""
        train_step = training.train_step

        def recording_step(forward_step: Any, data: Any, model: list[Any], *args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            step = int(get_args().curr_iteration)
            begun = time.perf_counter()
            result = train_step(forward_step, data, model, *args, **kwargs)
            losses = [float(loss) for loss in result[0].values()]
            # Losses and norm have been read from the device: it has done the step, except the optimizer's updates.
            self._write(step, losses[0] if losses else None, float(result[5]), time.perf_counter() - begun, model)
            return result

        training.train_step = recording_step

    def _write(self, step: int, loss: float | None, grad_norm: float, seconds: float, model: list[Any]) -> None:
        cuda = torch.cuda.is_available()
        line = Step(
            step,
            loss,
            grad_norm,
            seconds,
            torch.cuda.memory_allocated() if cuda else 0,
            torch.cuda.max_memory_allocated() if cuda else 0,
            torch.cuda.memory_reserved() if cuda else 0,
            _symmetric_bytes(model),
            1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        )
        self._file.write(json.dumps(asdict(line)) + "\n")
        self._file.flush()
        if cuda:
            torch.cuda.reset_peak_memory_stats()


def main() -> None:
    """Train as the command line says."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain, training
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from examples.pretrain_gpt import build_datasets, forward_step

    def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser.add_argument("--record", type=Path, required=True, help="folder of the ranks' records")
        return parser

    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    args.record.mkdir(parents=True, exist_ok=True)
    with (args.record / f"rank{args.rank}.jsonl").open("w") as file:
        Recorder(file).watch(training)
        pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
