"""Parallel configurations over GPUs: which Megatron and ETP can run, and the flags of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from benchmarks.sweep.model import Model

_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@dataclass(frozen=True, kw_only=True)
class ParallelConfiguration:
    """Sizes of the parallel axes. Experts are not cut by tensor parallelism (``--expert-tensor-parallel-size 1``).

    Attributes:
        gpus: in all.
        tp: tensor parallelism, with sequence parallelism.
        pp: pipeline stages.
        cp: context parallelism.
        ep: expert parallelism.
        etp: shards of each dense weight.
        expert_etp: shards of each expert's weight.
        micro_batch: sequences of a microbatch.
        recompute: whether only the inputs of layers are kept for the backward pass.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    expert_etp: int = 1
    micro_batch: int = 1
    recompute: bool = False

    @property
    def dp(self) -> int:
        """Ranks that read different data, ETP's among them."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard of a dense weight; the distributed optimizer shards its states over them."""
        return self.dp * self.cp // self.etp

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold the same shard of an expert's weight."""
        return self.gpus // (self.pp * self.ep * self.expert_etp)

    def shards_span(self, ranks_per_host: int) -> bool:
        """Whether the shards of a weight, dense or of an expert, are on several hosts."""
        dense = self.tp * self.cp * self.etp if self.etp > 1 else 1
        experts = self.ep * self.expert_etp if self.expert_etp > 1 else 1
        return max(dense, experts) > ranks_per_host

    def microbatches(self, global_batch: int) -> int:
        """Microbatches of one step on each pipeline."""
        return global_batch // (self.micro_batch * self.dp)

    def flags(self, *, experts: bool) -> list[str]:
        """Megatron's and ETP's flags, without those whose value is the default.

        Args:
            experts: whether the model has any.
        """
        sizes = {
            "--tensor-model-parallel-size": self.tp,
            "--pipeline-model-parallel-size": self.pp,
            "--context-parallel-size": self.cp,
            "--expert-model-parallel-size": self.ep,
            "--etp-size": self.etp,
            "--expert-etp-size": self.expert_etp,
        }
        found = [f"{flag} {size}" for flag, size in sizes.items() if size > 1]
        if self.tp > 1:
            found.append("--sequence-parallel")
        if self.tp > 1 and experts:
            found.append("--expert-tensor-parallel-size 1")
        if self.recompute:
            found.append(_RECOMPUTE)
        return [*found, f"--micro-batch-size {self.micro_batch}"]

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "cp", "ep", "etp") if getattr(self, name) > 1]
        if self.expert_etp > 1:
            sizes.append(f"expert_etp{self.expert_etp}")
        return " ".join([*sizes, f"mb{self.micro_batch}", *(["recompute"] if self.recompute else [])])


def obstacle(model: Model, parallel: ParallelConfiguration, global_batch: int) -> str:
    """Why a configuration cannot run; empty if it can."""
    return next(_obstacles(model, parallel, global_batch), "")


def _obstacles(model: Model, parallel: ParallelConfiguration, global_batch: int) -> Iterator[str]:
    shape = model.shape
    if parallel.gpus % (parallel.tp * parallel.pp * parallel.cp):
        yield f"{parallel.gpus} GPUs do not divide by tp x pp x cp"
        return
    if parallel.dp % parallel.etp:
        yield f"etp {parallel.etp} does not divide the data-parallel size {parallel.dp}"
    if global_batch % (parallel.micro_batch * parallel.dp):
        yield (
            f"a global batch of {global_batch} does not divide by microbatch {parallel.micro_batch} x dp {parallel.dp}"
        )
    if shape.layers % parallel.pp:
        yield f"{shape.layers} layers do not divide over {parallel.pp} stages"
    widths = (shape.heads, shape.kv_heads) if shape.experts else (shape.heads, shape.kv_heads, shape.ffn)
    if any(width % parallel.tp for width in widths):
        yield f"heads, KV heads or MLP do not divide by tp {parallel.tp}"
    pieces = (
        parallel.tp * parallel.cp * (2 if parallel.cp > 1 else 1)
    )  # causal attention pairs early pieces with late ones
    if shape.sequence % pieces:
        yield f"a sequence of {shape.sequence} does not divide into {pieces} pieces"
    if parallel.ep * parallel.expert_etp == 1:
        return
    if not shape.experts or shape.experts % parallel.ep:
        yield f"{shape.experts} experts do not divide by ep {parallel.ep}"
    if parallel.gpus // parallel.pp % (parallel.ep * parallel.expert_etp):
        yield f"a stage's {parallel.gpus // parallel.pp} GPUs do not divide by ep x expert ETP"


def configurations(
    model: Model, gpus: int, global_batch: int, micro_batches: Sequence[int], ranks_per_host: int, max_tokens: int = 0
) -> list[ParallelConfiguration]:
    """All configurations that can run.

    Args:
        model: what is trained.
        gpus: in all.
        global_batch: sequences of a step.
        micro_batches: numbers of sequences to try.
        ranks_per_host: tensor parallelism stays within a host.
        max_tokens: of a microbatch on one rank, after context parallelism; 0 for no bound.
    """
    found = []
    for micro_batch, recompute, axes in product(micro_batches, (False, True), _axes(model, gpus, ranks_per_host)):
        tp, pp, cp, ep, etp, expert_etp = axes
        parallel = ParallelConfiguration(
            gpus=gpus, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, expert_etp=expert_etp,
            micro_batch=micro_batch, recompute=recompute,
        )  # fmt: skip
        within = not max_tokens or micro_batch * model.shape.sequence // cp <= max_tokens
        if within and not obstacle(model, parallel, global_batch):
            found.append(parallel)
    return found


def _axes(model: Model, gpus: int, ranks_per_host: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """tp, pp, cp, ep, etp and expert ETP: products that divide the GPUs."""
    for tp in _divisors(min(gpus, ranks_per_host), gpus):
        for pp in _divisors(min(gpus // tp, model.shape.layers), gpus // tp):
            for cp in _divisors(gpus // tp // pp, gpus // tp // pp):
                dense = _divisors(gpus, gpus // (tp * pp * cp))
                experts = _divisors(model.shape.experts, gpus // pp) if model.shape.experts else [1]
                for etp, ep in product(dense, experts):
                    shards = _divisors(gpus, gpus // (pp * ep)) if model.shape.experts else [1]
                    for expert_etp in shards:
                        yield tp, pp, cp, ep, etp, expert_etp


def _divisors(most: int, number: int) -> list[int]:
    return [size for size in range(1, min(most, number) + 1) if number % size == 0]
