"""Trainer ranks that push into a running engine, for :mod:`tests.integration.test_live_refit`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import signal
import socket
import time
import warnings
import zlib
from typing import Any

import torch

from megatron_patches.refit.checkpoints.export import export_checkpoint
from megatron_patches.refit.control.assembly import Assembly
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.boxes import Box
from megatron_patches.refit.memory import sender
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.shard import placements
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import PushReport, RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName
from megatron_patches.refit.transports.sending import SendingEnd
from tests.support.live_models import Case, build_chunk
from tests.support.live_parallel import start_parallel_state
from tests.support.vllm_host import VllmConnection

PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8], [36, 0, 17, 9]]
LONG_PROMPT = [(5 * at + at // 32) % 37 for at in range(70)]
"""Two blocks of a prefix cache and a little more."""


def start(case: Case) -> list[Any]:
    """Megatron on this rank, and its model chunks."""
    import megatron_patches

    warnings.simplefilter("ignore")
    megatron_patches.apply()
    start_parallel_state(case.mesh)
    return [build_chunk(case, chunk).bfloat16().eval() for chunk in range(case.mesh.vpp)]


def value(box: Box, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """What a box holds in model ``seed``, whoever holds it."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{box.tensor} {seed}".encode()))
    if box.tensor.endswith("norm.weight"):
        full = torch.rand(shape, generator=generator) + 0.5
    else:
        full = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
    return full[tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))]


def fill(case: Case, chunks: list[Any], seed: int, padding: float = float("nan")) -> None:
    """Gives every weight that this rank holds its value; padding gets another, so that it shows where it comes out."""
    family = family_from_config(case.config)
    shapes = family.shapes()
    for live in describe_model(chunks):
        live.memory.fill_(padding)
        for placement in placements(live.shard, family.pieces(live.shard)):
            where = placement.view.tensor(live.memory)
            where.copy_(value(placement.box, shapes[placement.box.tensor], seed))


def export_body(rank: int, world_size: int, case: Case, seed: int, path: str) -> None:
    """The model as a checkpoint."""
    export_all_body(rank, world_size, case, {seed: path})


def export_all_body(rank: int, world_size: int, case: Case, paths: dict[int, str]) -> None:
    """Several models as checkpoints, by their seeds."""
    del rank, world_size
    chunks = start(case)
    for seed, path in paths.items():
        fill(case, chunks, seed)
        export_checkpoint(chunks, path, vocab_size=int(str(case.config["vocab_size"])))


STAGING = 1 << 16


def session(
    case: Case,
    chunks: list[Any],
    rank: int,
    address: str,
    transport: TransportName,
    *,
    allow_narrowing: bool = False,
    timeout_s: float = 150.0,
    memory: MemoryMode = MemoryMode.BESIDE,
) -> RefitSession:
    engines = [VllmConnection(address)] if rank == 0 else []
    # Generous: with an engine of two workers, five processes share what may be two processors.
    options = RefitOptions(
        transport=transport,
        timeout_s=timeout_s,
        staging_bytes=STAGING,
        allow_narrowing=allow_narrowing,
        memory=memory,
    )
    return RefitSession(chunks, engines, vocab_size=int(str(case.config["vocab_size"])), options=options)


def transport_of(case: Case) -> TransportName:
    """Another transport for some kinds of mesh, so that several meet a live engine."""
    mesh, is_llama = case.mesh, "LlamaForCausalLM" in str(case.config["architectures"])
    if mesh.dp > 1 and is_llama and importlib.util.find_spec("nixl_cu12") is not None:
        return TransportName.NIXL
    return TransportName.TCP if mesh.pp > 1 and mesh.etp > 1 else TransportName.SHM


def push_body(
    rank: int, world_size: int, cases: list[tuple[Case, int]], address: str, seeds: tuple[int, ...]
) -> list[list[tuple[list[dict[str, str]], list[list[float]]]]]:
    """Pushes one model after another from each mesh; what the engine then holds and answers, after each push.

    ``cases`` are meshes of this size, each with the first version to use.
    """
    del world_size
    found = []
    for case, version in cases:
        chunks = start(case)
        with contextlib.closing(session(case, chunks, rank, address, transport_of(case))) as pushing:
            pushing.prepare()
            after = []
            for number, seed in enumerate(seeds):
                fill(case, chunks, seed)
                report = pushing.push(version + number)
                assert 0 < report.staged_bytes <= STAGING
                if rank == 0:
                    engine = VllmConnection(address)
                    after.append((engine.parameters(), engine.log_probabilities(PROMPTS)))
        found.append(after)
    return found


def in_place_body(
    rank: int, world_size: int, case: Case, address: str, version: int, seeds: tuple[int, ...]
) -> tuple[list[tuple[list[dict[str, str]], list[list[float]]]], list[PushReport]]:
    """Pushes one model after another in place; what the engine then holds and answers, and the reports."""
    del world_size
    chunks = start(case)
    after, reports = [], []
    pushing = session(case, chunks, rank, address, transport_of(case), memory=MemoryMode.IN_PLACE)
    with contextlib.closing(pushing):
        pushing.prepare()
        for number, seed in enumerate(seeds):
            fill(case, chunks, seed)
            reports.append(pushing.push(version + number))
            if rank == 0:
                engine = VllmConnection(address)
                after.append((engine.parameters(), engine.log_probabilities(PROMPTS)))
    return after, reports


def failing_in_place_body(
    rank: int, world_size: int, case: Case, address: str, version: int, sabotages: tuple[tuple[int, str], ...]
) -> tuple[list[list[dict[str, str]]], list[str]]:
    """Pushes model 3, fails to push model 4, in several ways, and pushes model 2; the engine's weights, and why."""
    del world_size
    chunks = start(case)
    held, reasons = [], []
    engine = VllmConnection(address) if rank == 0 else None
    pushing = session(case, chunks, rank, address, TransportName.SHM, memory=MemoryMode.IN_PLACE)
    with contextlib.closing(pushing):
        pushing.prepare()
        for number, (seed, sabotage) in enumerate([(3, None), *((4, way) for way in sabotages), (2, None)]):
            fill(case, chunks, seed)
            if engine is not None and sabotage is not None:
                engine.sabotage(*sabotage)
            try:
                pushing.push(version + number)
            except RefitError as error:
                reasons.append(str(error))
            if engine is not None:
                held.append(engine.parameters())
    return held, reasons


def train_body(
    rank: int, world_size: int, case: Case, address: str, version: int, path: str
) -> tuple[list[float], list[dict[str, str]], list[list[float]]]:
    """Pushes, trains three steps, pushes again and exports."""
    from etp import wait_async_comms

    del world_size
    chunks = start(case)
    fill(case, chunks, 1, padding=0.0)  # a model may compute with the padding of its vocabulary
    pushing = session(case, chunks, rank, address, TransportName.SHM)
    pushing.prepare()
    pushing.push(version)
    losses = []
    (model,) = chunks
    model.train()
    # The same for all ranks, as nothing here sums the gradients of weights that several of them hold.
    tokens = torch.randint(0, 37, (2, 17), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        logits = model(tokens[:, :-1], torch.arange(16).expand(2, -1), None)[..., :37]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        wait_async_comms(model)
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for param in model.parameters():
                param.data.add_(param.grad.to(param.dtype), alpha=-0.1)
                param.grad = None
    model.eval()
    pushing.push(version + 1)
    export_checkpoint(chunks, path, vocab_size=37)
    engine = VllmConnection(address) if rank == 0 else None
    answer = (engine.parameters(), engine.log_probabilities(PROMPTS)) if engine is not None else ([], [])
    pushing.close()
    return losses, *answer


def narrowing_body(
    rank: int, world_size: int, case: Case, address: str, version: int, path: str
) -> tuple[str, list[dict[str, str]]]:
    """Pushes from float32 and exports: why it was refused at first, and what the engine holds once it was allowed."""
    del world_size
    chunks = [chunk.float() for chunk in start(case)]
    fill(case, chunks, 1)
    refused, reason = session(case, chunks, rank, address, TransportName.SHM), ""
    try:
        refused.prepare()
    except RefitError as error:
        reason = str(error)
    refused.close()
    allowed = session(case, chunks, rank, address, TransportName.SHM, allow_narrowing=True)
    allowed.prepare()
    allowed.push(version)
    export_checkpoint(chunks, path, vocab_size=37)
    parameters = VllmConnection(address).parameters() if rank == 0 else []
    allowed.close()
    return reason, parameters


def killed_body(
    rank: int,
    world_size: int,
    case: Case,
    address: str,
    version: int,
    victim: int,
    phase: str,
    memory: MemoryMode = MemoryMode.BESIDE,
) -> None:
    """A push in which rank ``victim`` is killed in ``phase``."""
    del world_size
    chunks = start(case)
    fill(case, chunks, 1)
    pushing = session(case, chunks, rank, address, TransportName.SHM, timeout_s=60.0, memory=memory)
    if rank == victim and phase == "describing":
        kill_in(pushing, "_describe")
    if rank == victim and phase == "planning":
        kill_in(Assembly, "exchange", calls=3)  # after those for describing and recording
    with contextlib.closing(pushing):
        pushing.prepare()
        if rank == victim and phase == "linking":
            kill_in(SendingEnd, "connect")
        if rank == victim and phase == "sending":
            kill_in(sender.Sender, "pack_into")
        if rank == victim and phase == "committing":
            kill_in(VllmConnection, "commit")
        pushing.push(version)


def kill_in(owner: Any, name: str, calls: int = 1, how: signal.Signals = signal.SIGKILL) -> None:
    """Ends this process, as the kernel would, in the ``calls``-th call of a method; or lets it hang, with SIGSTOP."""
    original, left = getattr(owner, name), itertools.count(calls - 1, -1)

    def method(*args: Any, **kwargs: Any) -> Any:
        if next(left) == 0:
            os.kill(os.getpid(), how)
        return original(*args, **kwargs)

    setattr(owner, name, method)


class Unreachable(HttpEngine):
    """A server that has said how many workers it has, and is not there any more."""

    def world_size(self) -> int:
        return 1


class Deaf(Unreachable):
    """A server whose workers cannot reach the trainer: it answers, as no call may raise there, and none has joined."""

    def call(self, call: dict[str, Any]) -> None:
        pass


def unreachable_body(rank: int, world_size: int, case: Case, kind: type[Unreachable]) -> tuple[float, str]:
    """Prepares for an engine that cannot be reached, or cannot reach the trainer: seconds until it failed, and why."""
    del world_size
    with socket.socket() as gone:
        # Nobody listens, and it is kept: one of the many ports that process groups listen on could be the same.
        gone.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{gone.getsockname()[1]}"
        pushing = RefitSession(start(case), [kind(url)] if rank == 0 else [], vocab_size=37)
        started = time.monotonic()
        with contextlib.closing(pushing):
            try:
                pushing.prepare()
            except RefitError as error:
                return time.monotonic() - started, str(error)
    return 0.0, ""
