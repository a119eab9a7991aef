"""One trainer rank of ``benchmarks.refit_vllm``: pushes a Megatron model and compares log-probabilities."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.refit_vllm_model import TrainerModel
from benchmarks.refit_vllm_peers import PEERS, PeerKind, Sides
from benchmarks.vllm_server import ALPHABET, Sample, ServerError, VllmServer
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.parties.terms import MemoryMode
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.session import RefitOptions, RefitSession
from megatron_patches.refit.transports.base import TransportName

PROMPT, LENGTH, _SAMPLES = 64, 128, 4
"""Tokens that the server is given, tokens that it draws, and texts."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The settings that every rank gets.

    Attributes:
        config: content of ``config.json``.
        mesh: how the trainer is spread.
        gpus: GPU of each rank; none for CPUs.
        engine_gpus: the server's GPUs, whose memory is measured.
        server_port: the server's port.
        ways: what to measure: names of transports, followed by ``+in_place`` where versions replace the weights that
            serve byte by byte, or of :data:`benchmarks.refit_vllm_peers.PEERS`.
        repeats: pushes a transport.
        staging_bytes: see RefitOptions.
        timeout_s: how long one step may take, and how long ranks wait for each other.
        weight_format: see RefitOptions; the server's model has the same.
        served: version that the server has; the next ones are pushed.
        adapter_rank: rank of an adapter that is pushed in one of the ways; see :mod:`benchmarks.refit_vllm_adapters`.
    """

    config: dict[str, Any]
    mesh: TrainerMesh
    gpus: tuple[int, ...]
    engine_gpus: tuple[int, ...]
    server_port: int
    ways: tuple[str, ...]
    repeats: int
    staging_bytes: int
    timeout_s: float
    weight_format: WeightFormat = WeightFormat.TRAINED
    served: int = 0
    adapter_rank: int = 0


@dataclass
class Outcome:
    """The results of one way; seconds are lists with an entry per push.

    Attributes:
        way: its name.
        failure: why it failed; empty if it did not.
        prepare_s: meeting, recording, planning and proving, once.
        nbytes: bytes that a push sends to all workers together.
        seconds: ``push`` from begin to end, its parts, and ``paused``: how long no request was answered.
        trainer_bytes: the most that any rank's PyTorch had given out on its GPU beyond the model while pushing; NCCL's
            own buffers are not among it.
        engine_bytes: growth of the memory in use on the busiest of the engine's GPUs; None for a way whose server has
            been pushed to in another way before, and has kept that way's memory.
        made_bytes: bytes that the busiest worker has allocated, only for ways of this project: ``beside`` the weights
            that serve, on its device; ``backup``, in its host's memory; ``staged``, for packets (the most of either
            side).
        kl: generation KL of the last version, in nats a token (Schulman's k3 estimator of KL(engine, trainer)).
        log_prob_error: mean absolute difference of log-probabilities.
        largest_error: largest absolute difference.
        untouched_kl: KL against the weights of another version, one after the last; shows that KL detects a missed
            push.
    """

    way: str
    failure: str = ""
    prepare_s: float = 0.0
    nbytes: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    trainer_bytes: int = 0
    engine_bytes: int | None = None
    made_bytes: dict[str, int] = field(default_factory=dict)
    kl: float = math.nan
    log_prob_error: float = math.nan
    largest_error: float = math.nan
    untouched_kl: float = math.nan


def way_of(name: str) -> tuple[TransportName, MemoryMode]:
    """What ``TRANSPORT`` or ``TRANSPORT+in_place`` stands for.

    Raises:
        ValueError: for another name.
    """
    transport, plus, memory = name.partition("+")
    return TransportName(transport), MemoryMode(memory) if plus else MemoryMode.BESIDE


def run_rank(rank: int, task: Task, meeting: str, results: Connection) -> None:
    """Runs all measurements; the first rank sends the results."""
    trainer = Trainer(rank, task, meeting)
    for name in task.ways:
        found = trainer.measure(name)
        if rank == 0:
            results.send(found)
    # Not after a failure: with work under way that no peer takes part in, NCCL would wait.
    dist.destroy_process_group()


class Trainer:
    """One rank.

    Args:
        rank: its number.
        task: what to measure.
        meeting: URL at which the ranks meet.
    """

    def __init__(self, rank: int, task: Task, meeting: str) -> None:
        import megatron_patches

        # Read when CUDA starts; with tensor parallelism Megatron demands it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self.rank, self.task = rank, task
        self.device = torch.device("cpu")
        if task.gpus:
            self.device = torch.device("cuda", task.gpus[rank])
            torch.cuda.set_device(self.device)
        megatron_patches.apply()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if task.gpus else "gloo",
            init_method=meeting,
            rank=rank,
            world_size=task.mesh.size,
            timeout=timedelta(seconds=task.timeout_s),
        )
        self.model = TrainerModel(task.config, task.mesh, self.device, PROMPT + LENGTH)
        self.server = VllmServer(task.server_port, task.timeout_s)
        self.version = task.served
        self._warm_up()
        self._engine_in_use()

    def _warm_up(self) -> None:
        """Lets both sides allocate what does not belong to a push, such as ETP's slots and symmetric memory.

        This process's contexts on the engine's GPUs, which measuring their memory creates, do not belong to it either.
        """
        if self.rank == 0:
            self.server.sample([0] * PROMPT, LENGTH, 0)
        self.model.log_probs([[0] * (PROMPT + LENGTH)] * _SAMPLES, PROMPT)

    def measure(self, name: str) -> Outcome:
        """Pushes versions one way."""
        found = Outcome(name)
        engine_before, own_before = self._engine_in_use(), self._allocated()
        self._peak = own_before
        try:
            if name in PEERS:
                self._push_peer(found, PEERS[name])
            else:
                self._push_session(found, *way_of(name))
            if name == self.task.ways[0]:
                found.engine_bytes = max(
                    (now - before for now, before in zip(self._engine_in_use(), engine_before, strict=True)), default=0
                )
            self._compare(found)
        except (RefitError, ServerError, ImportError) as error:
            found.failure = str(error)[:400]
        every: list[int] = [0] * self.task.mesh.size
        dist.all_gather_object(every, self._peak - own_before)
        found.trainer_bytes = max(every)
        return found

    # Pushes ------------------------------------------------------------------------------------------------------

    def _push_session(self, found: Outcome, transport: TransportName, memory: MemoryMode) -> None:
        engine = HttpEngine(self.server.url, self.task.timeout_s)
        options = RefitOptions(
            transport=transport,
            memory=memory,
            weight_format=self.task.weight_format,
            staging_bytes=self.task.staging_bytes,
            timeout_s=self.task.timeout_s,
        )
        session = RefitSession(
            [self.model.module],
            [engine] if self.rank == 0 else [],
            vocab_size=int(self.task.config["vocab_size"]),
            options=options,
        )
        try:
            started = time.perf_counter()
            session.prepare()
            found.prepare_s = time.perf_counter() - started
            for push in range(self.task.repeats + 1):
                self._next()
                self._all_ready()
                started = time.perf_counter()
                report = session.push(self.version)
                taken = {"push": time.perf_counter() - started, **report.seconds}
                self._note_peak()
                if push:  # the first makes links and allocates
                    for part, seconds in taken.items():
                        found.seconds.setdefault(part, []).append(seconds)
                found.nbytes = report.nbytes
                found.made_bytes = {
                    "beside": report.beside_bytes,
                    "backup": report.backup_bytes,
                    "staged": report.staged_bytes,
                }
        finally:
            session.close()
            engine.close()

    def _push_peer(self, found: Outcome, kind: PeerKind) -> None:
        sides = Sides(
            rank=self.rank,
            size=self.task.mesh.size,
            workers=max(1, len(self.task.engine_gpus)),
            model=self.model,
            server=self.server,
            timeout_s=self.task.timeout_s,
        )
        self._all_ready()
        started = time.perf_counter()
        peer = kind.make(sides)
        self._all_ready()
        found.prepare_s, found.nbytes = time.perf_counter() - started, sides.nbytes()
        for push in range(self.task.repeats + 1):
            self._next()
            self._all_ready()
            started = time.perf_counter()
            parts = peer.push()
            self._note_peak()  # before the count restarts
            self._all_ready()
            if push:  # the first makes communicators and allocates
                for part, seconds in {"push": time.perf_counter() - started, **parts}.items():
                    found.seconds.setdefault(part, []).append(seconds)

    # Comparison --------------------------------------------------------------------------------------------------

    def _compare(self, found: Outcome) -> None:
        """Generation KL: tokens that the engine has drawn, under the trainer's weights."""
        drawn = self._draw()
        texts = [sample.tokens for sample in drawn]
        theirs = torch.tensor([sample.log_probs for sample in drawn], dtype=torch.float64)
        ours = self.model.log_probs(texts, PROMPT)
        errors = (ours - theirs).abs()
        found.kl, found.log_prob_error, found.largest_error = (
            k3(theirs, ours),
            float(errors.mean()),
            float(errors.max()),
        )
        self._next()
        found.untouched_kl = k3(theirs, self.model.log_probs(texts, PROMPT))

    def _draw(self) -> list[Sample]:
        """Samples from the server; all ranks get the same samples, or the same error."""
        answers: list[list[Sample] | ServerError | None] = [None]
        if self.rank == 0:
            try:
                answers = [draw(self.server)]
            except ServerError as error:
                answers = [error]
        dist.broadcast_object_list(answers, 0)
        drawn = answers[0]
        if isinstance(drawn, ServerError):
            raise drawn
        return drawn or []

    def _next(self) -> None:
        self.version += 1
        self.model.change()

    def _all_ready(self) -> None:
        """Wait for all ranks and their GPUs, and start to measure peak memory."""
        if self.task.gpus:
            torch.cuda.synchronize(self.device)
        dist.barrier()
        if self.task.gpus:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _engine_in_use(self) -> list[int]:
        """Bytes in use on each GPU; where trainer and engine share GPUs, this side's unused blocks do not count."""
        self._all_ready()
        if not self.task.gpus:
            return []
        torch.cuda.empty_cache()
        self._all_ready()
        found = []
        for gpu in self.task.engine_gpus:
            free, total = torch.cuda.mem_get_info(gpu)
            found.append(total - free)
        return found

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.task.gpus else 0

    def _note_peak(self) -> None:
        """Records the peak memory of a push since all ranks were ready for it."""
        if self.task.gpus:
            self._peak = max(self._peak, torch.cuda.max_memory_allocated(self.device))


def draw(server: VllmServer, model: str = "benchmark") -> list[Sample]:
    """Samples from a server.

    Args:
        server: the server.
        model: the name of its model or of an adapter.

    Raises:
        ServerError: if it does not answer.
    """
    prompts = torch.randint(0, ALPHABET, (_SAMPLES, PROMPT), generator=torch.Generator().manual_seed(5)).tolist()
    with ThreadPoolExecutor(_SAMPLES) as pool:
        asked = [pool.submit(server.sample, prompt, LENGTH, seed, model) for seed, prompt in enumerate(prompts)]
        return [each.result() for each in asked]


def k3(engine: torch.Tensor, trainer: torch.Tensor) -> float:
    """KL(engine, trainer) in nats a token, from log-probabilities of tokens that the engine has drawn."""
    ratio = trainer - engine
    return float((ratio.exp() - 1 - ratio).mean())
