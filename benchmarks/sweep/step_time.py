"""How long a step takes, in closed form, with the speed of the GPU's arithmetic taken from one measured step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.sweep.configurations import ParallelConfiguration
from benchmarks.sweep.memory import Training, stage_experts, stage_held, stage_replicated, stage_weights
from benchmarks.sweep.model import Model
from benchmarks.train_shapes import WEIGHT_BYTES

# All-gathers and reduce-scatters of activations: two a pass around each of attention and MLP, and one more of the input
# in backward, which sequence parallelism does not keep whole.
_TP_COLLECTIVES = 5
_RECOMPUTED = 4 / 3
_OPTIMIZER_BYTES = 32  # read and written for an element of the states, with gradient and weight
_BISECTIONS = 80
_FREE = 1e18  # FLOP/s


@dataclass(frozen=True)
class Machine:
    """What a GPU and its links do.

    Attributes:
        flops_per_s: of GEMMs and attention in a training step; a measured step says what it is (:func:`calibrated`).
        within_host: bytes/s that a GPU receives from its host's others.
        between_hosts: bytes/s that it receives from other hosts.
        memory: bytes/s of the GPU's own.
        ranks_per_host: GPUs of a host.
        copy_engine_cost: share of the time of hidden traffic by which it slows down the compute beside it.
        c10d_cost: that share for NCCL's kernels.
        host_per_layer: seconds in which the host enqueues a layer's forward and backward.
        host_per_tp_layer: seconds that tensor parallelism adds to that.
        host_per_etp_layer: seconds that ETP adds.
        host_per_ring_layer: seconds that the ring of context parallelism adds.
    """

    flops_per_s: float = 500e12
    within_host: float = 370e9
    between_hosts: float = 45e9
    memory: float = 3e12
    ranks_per_host: int = 8
    copy_engine_cost: float = 0.3
    c10d_cost: float = 0.6
    host_per_layer: float = 5e-3
    host_per_tp_layer: float = 2.5e-3
    host_per_etp_layer: float = 5e-3
    host_per_ring_layer: float = 8e-3


@dataclass(frozen=True)
class Seconds:
    """Parts of a step.

    Attributes:
        compute: GEMMs and attention of the busiest stage, with what is recomputed.
        exposed: traffic that compute waits for.
        hidden: what traffic beside compute adds to it.
        host: in which the GPU waits for the host to enqueue work.
        bubble: in which a pipeline stage has nothing to do.
        optimizer: reading and writing its states.
    """

    compute: float
    exposed: float
    hidden: float
    host: float
    bubble: float
    optimizer: float

    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.exposed + self.hidden + self.host + self.bubble + self.optimizer


def step_seconds(model: Model, parallel: ParallelConfiguration, training: Training, machine: Machine) -> Seconds:
    """Predicts a step's parts. The model ignores that small GEMMs run slower than large ones."""
    microbatches = parallel.microbatches(training.global_batch)
    compute = _stage_flops(model, parallel) / machine.flops_per_s
    exposed = _exposed(model, parallel, machine)
    beside, added = _beside(model, parallel, training, machine)
    hidden = added + max(0.0, beside - compute)
    etp = parallel.etp * parallel.expert_etp > 1
    enqueuing = machine.host_per_layer
    enqueuing += machine.host_per_tp_layer if parallel.tp > 1 else 0.0
    enqueuing += machine.host_per_etp_layer if etp else 0.0
    enqueuing += machine.host_per_ring_layer if parallel.cp > 1 else 0.0
    host = max(0.0, model.shape.layers // parallel.pp * enqueuing - (compute + exposed + hidden))
    once = _replica_seconds(model, parallel, training, machine)
    once = max(0.0, once - compute) + machine.c10d_cost * min(once, compute)
    states = sum(_states(model, parallel, training)) if training.optimizer else 0.0
    return Seconds(
        compute=microbatches * compute,
        exposed=microbatches * exposed,
        hidden=microbatches * hidden + once,
        host=microbatches * host,
        bubble=(parallel.pp - 1) * (compute + exposed + hidden + host),
        optimizer=states * _OPTIMIZER_BYTES / machine.memory,
    )


def tokens_per_second(model: Model, parallel: ParallelConfiguration, training: Training, seconds: float) -> float:
    """Tokens per second of one GPU."""
    return training.global_batch * model.shape.sequence / seconds / parallel.gpus


def calibrated(machine: Machine, predict: Callable[[Machine], float], measured_s: float) -> Machine:
    """The machine whose arithmetic is as fast as one measured step says.

    Args:
        machine: its links.
        predict: the step's predicted seconds on a machine.
        measured_s: what it took. If the host alone is predicted to take longer, this machine's is taken to be fast; if
            traffic and optimizer alone are, arithmetic counts as all but free.
    """
    if predict(replace(machine, flops_per_s=_FREE)) > measured_s:
        machine = replace(
            machine, host_per_layer=0.0, host_per_tp_layer=0.0, host_per_etp_layer=0.0, host_per_ring_layer=0.0
        )
    low, high = 1e6, _FREE
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if predict(replace(machine, flops_per_s=middle)) > measured_s else (low, middle)
    return replace(machine, flops_per_s=high)


def _stage_flops(model: Model, parallel: ParallelConfiguration) -> float:
    """FLOPs of one microbatch on a rank of the last stage, which also has the output layer."""
    shape = model.microbatch(parallel.micro_batch)
    logits = 6.0 * shape.tokens() * shape.vocabulary * shape.hidden
    layers = (shape.flops() - logits) / parallel.pp * (_RECOMPUTED if parallel.recompute else 1.0)
    return (layers + logits) / (parallel.tp * parallel.cp)


def _exposed(model: Model, parallel: ParallelConfiguration, machine: Machine) -> float:
    """Traffic of one microbatch that nothing runs beside: tensor and expert parallelism, and between stages."""
    shape = model.shape
    tokens = parallel.micro_batch * shape.sequence // parallel.cp
    passes = _RECOMPUTED if parallel.recompute else 1.0
    layers = shape.layers // parallel.pp
    around = _TP_COLLECTIVES if shape.experts else 2 * _TP_COLLECTIVES
    activations = tokens * shape.hidden * WEIGHT_BYTES
    tensor = passes * layers * around * activations * _others(parallel.tp) / _speed(machine, parallel.tp)
    dispatched = shape.top_k * activations // parallel.tp
    # There and back, in forward and in backward.
    expert = passes * layers * 4 * dispatched * _others(parallel.ep) / _speed(machine, parallel.ep)
    between = 2 * activations / parallel.tp / _speed(machine, parallel.gpus) if parallel.pp > 1 else 0.0
    return tensor + expert + between


def _beside(model: Model, parallel: ParallelConfiguration, training: Training, machine: Machine) -> tuple[float, float]:
    """Seconds of one microbatch's traffic beside compute, and what it adds: ETP's and the ring of context parallelism.

    Each weight is gathered for forward and for backward, and its gradient reduced once.
    """
    shape = model.shape
    wire = 1 if training.precision != "bf16" else WEIGHT_BYTES
    last = parallel.pp - 1
    groups = (
        (stage_weights(model, parallel, last), parallel.etp, parallel.tp * parallel.cp * parallel.etp),
        (stage_experts(model, parallel), parallel.expert_etp, parallel.ep * parallel.expert_etp),
    )
    gathers = 3 if parallel.recompute else 2
    seconds = added = 0.0
    for weights, over, reach in groups:
        elements = sum(count * rows * columns for count, rows, columns in weights)
        gathered, reduced = elements * gathers * wire, elements * WEIGHT_BYTES
        if reach <= machine.ranks_per_host:
            moving = (gathered + reduced) * _others(over) / machine.within_host
            cost = machine.copy_engine_cost if training.transport == "copy_engine" else machine.c10d_cost
        else:  # see benchmarks/hosts.py
            per_host = max(1, over * machine.ranks_per_host // reach)
            if training.transport == "c10d" or per_host == 1:
                received = gathered * _others(over) / per_host + reduced * (over - per_host) / over
            else:  # auto selects hierarchical, whose sums are in fp32
                received = (gathered + 2 * reduced) * (over - per_host) / over / per_host
            moving = received / machine.between_hosts
            cost = machine.c10d_cost
        seconds, added = seconds + moving, added + cost * moving
    keys = 2 * shape.kv_heads * shape.head_elements() // parallel.tp
    tokens = parallel.micro_batch * shape.sequence
    ring = 3 * shape.layers // parallel.pp * tokens * keys * WEIGHT_BYTES * _others(parallel.cp)
    ring_s = ring / _speed(machine, parallel.tp * parallel.cp)
    return seconds + ring_s, added + machine.c10d_cost * ring_s


def _replica_seconds(model: Model, parallel: ParallelConfiguration, training: Training, machine: Machine) -> float:
    """Traffic once a step: gradients reduce-scattered over the replicas of each shard, and weights gathered."""
    found = stage_held(model, parallel, parallel.pp - 1, training)
    whole = stage_replicated(model, parallel, parallel.pp - 1)
    bytes_each = training.grad_bytes + (WEIGHT_BYTES if training.optimizer else 0)
    reach = parallel.tp * parallel.cp * parallel.dp
    moved = (found.dense + whole) * _others(parallel.replicas) + found.experts * _others(parallel.expert_replicas)
    return moved * bytes_each / _speed(machine, reach)


def _states(model: Model, parallel: ParallelConfiguration, training: Training) -> tuple[float, float]:
    """Elements of dense and of experts' optimizer states on a rank."""
    found = stage_held(model, parallel, parallel.pp - 1, training)
    return found.dense / parallel.replicas, found.experts / parallel.expert_replicas


def _others(ranks: int) -> float:
    """Part of a collective's bytes that comes from other ranks."""
    return (ranks - 1) / ranks


def _speed(machine: Machine, reach: int) -> float:
    """Bytes/s of a group whose ranks lie within ``reach`` consecutive ones."""
    return machine.within_host if reach <= machine.ranks_per_host else machine.between_hosts
