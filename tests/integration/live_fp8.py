"""Trainer ranks that push and export in block FP8, for :mod:`tests.integration.test_live_fp8`."""

from __future__ import annotations

import contextlib
import zlib
from typing import Any, NamedTuple

import torch

from megatron_patches.refit.checkpoints.export import ExportOptions, export_checkpoint
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat, quantized_weights
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.shard import placements
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from tests.integration.live_refit import PROMPTS, STAGING, fill, start
from tests.support.live_models import Case
from tests.support.vllm_host import VllmConnection

_CELL = 48  # rows and columns of one magnitude; blocks are cut otherwise


class After(NamedTuple):
    """What an engine held and answered after a push, and why the push failed; empty if it did not."""

    parameters: list[dict[str, str]]
    answers: list[list[float]]
    reason: str = ""


class Step(NamedTuple):
    """A push of a model, and what goes wrong: ``nan`` in a weight of the last rank, or a place for ``sabotage``."""

    seed: int
    harm: str = ""


def fill_unevenly(case: Case, chunks: list[Any], seed: int) -> None:
    """As :func:`fill`; magnitudes of weights to quantize differ from place to place, so that scales do."""
    fill(case, chunks, seed)
    family = family_from_config(case.config)
    shapes = dict(family.shapes())
    names = frozenset(quantized_weights(shapes))
    for live in describe_model(chunks):
        for placement in placements(live.shard, family.pieces(live.shard)):
            box = placement.box
            if box.tensor not in names:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(f"{box.tensor} {seed} magnitudes".encode()))
            cells = [-(-extent // _CELL) for extent in shapes[box.tensor]]
            whole = torch.rand(cells, generator=generator).mul(4).sub(2).exp2()
            whole = whole.repeat_interleave(_CELL, 0).repeat_interleave(_CELL, 1)
            part = whole[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]
            placement.view.tensor(live.memory).mul_(part)


def export_body(rank: int, world_size: int, case: Case, weight_format: WeightFormat, paths: dict[int, str]) -> None:
    """Several models as checkpoints, by their seeds."""
    del rank, world_size
    chunks = start(case)
    options = ExportOptions(weight_format=weight_format)
    for seed, path in paths.items():
        fill_unevenly(case, chunks, seed)
        export_checkpoint(chunks, path, vocab_size=int(str(case.config["vocab_size"])), options=options)


def push_body(
    rank: int,
    world_size: int,
    case: Case,
    address: str,
    version: int,
    steps: list[Step],
    given: dict[str, Any],
) -> list[After]:
    """Pushes one model after another, with the given options; if no session begins, the reason alone."""
    chunks = start(case)
    engine = VllmConnection(address) if rank == 0 else None
    found: list[After] = []
    options = RefitOptions(transport=TransportName.SHM, timeout_s=120.0, staging_bytes=STAGING, **given)
    engines = [] if engine is None else [engine]
    session = RefitSession(chunks, engines, vocab_size=int(str(case.config["vocab_size"])), options=options)
    with contextlib.closing(session):
        try:
            session.prepare()
        except RefitError as error:
            return [After([], [], str(error))]
        for number, (seed, harm) in enumerate(steps):
            reason = ""
            fill_unevenly(case, chunks, seed)
            if harm == "nan" and rank == world_size - 1:
                next(live for live in describe_model(chunks) if "linear_fc2" in live.shard.name).memory[7] = float(
                    "nan"
                )
            elif harm and harm != "nan" and engine is not None:
                engine.sabotage(0, harm)
            try:
                session.push(version + number)
            except RefitError as error:
                reason = str(error)
            if engine is not None:
                found.append(After(engine.parameters(), engine.log_probabilities(PROMPTS), reason))
    return found
