"""The GPU memory that a rank needs, in closed form: between two steps, and at the peak of one.

The formulas for weights, slots and rings are those of :func:`benchmarks.train_shapes.held`; those for what a step adds
are explained in docs/sweep.md. ``tests/unit/test_sweep_predictions.py`` compares all of them with measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.sweep.configurations import ParallelConfiguration
from benchmarks.sweep.model import Model
from benchmarks.train_shapes import WEIGHT_BYTES, Cut, Held, held

_VOCABULARY_MULTIPLE = 128  # --make-vocab-size-divisible-by
_STATE_BYTES = 12  # main weight and two moments in fp32
_SCALE = 4 / 128  # of block FP8: a float for 128 elements
_LOGIT_BYTES = 6  # bf16 and, for the loss, fp32


@dataclass(frozen=True)
class Training:
    """What does not depend on the configuration.

    Attributes:
        global_batch: sequences of a step.
        grad_bytes: of one element of Megatron's gradient buffer: 4, or 2 with ``--grad-reduce-in-bf16``.
        optimizer: whether there is one. Benchmarks of forward and backward have none.
        precision: of the linear layers' GEMMs: one of :data:`benchmarks.train_shapes.PRECISIONS`.
        transport: of ETP.
        prefetch_depth: of ETP.
    """

    global_batch: int
    grad_bytes: int = 4
    optimizer: bool = True
    precision: str = "bf16"
    transport: str = "copy_engine"
    prefetch_depth: int = 1


def padded_vocabulary(model: Model, parallel: ParallelConfiguration) -> int:
    """Rows of the embedding, all tensor-parallel ranks together."""
    unit = _VOCABULARY_MULTIPLE * parallel.tp
    return -(-model.shape.vocabulary // unit) * unit


def stage_weights(model: Model, parallel: ParallelConfiguration, stage: int) -> list[tuple[int, int, int]]:
    """Number, rows and columns of every dense matrix on a rank of a pipeline stage, before ETP cuts it."""
    shape, tp = model.shape, parallel.tp
    attention = [
        (1, model.qkv_rows() // tp, shape.hidden),
        (1, shape.hidden, shape.heads * shape.head_elements() // tp),
    ]
    mlp = [] if shape.experts else [(1, 2 * shape.ffn // tp, shape.hidden), (1, shape.hidden, shape.ffn // tp)]
    ends = _ends(model, parallel)
    first, last = stage == 0, stage == parallel.pp - 1
    found = [ends] if first else []
    found += (attention + mlp) * (shape.layers // parallel.pp)
    # A model whose output is the embedding keeps a second one where the last stage is not the first.
    return [*found, ends] if last and not (first and model.tied) else found


def stage_experts(model: Model, parallel: ParallelConfiguration) -> list[tuple[int, int, int]]:
    """Number, rows and columns of the experts' matrices on a rank: a layer's FC1 are one group, its FC2 another."""
    shape = model.shape
    if not shape.experts:
        return []
    local = shape.experts // parallel.ep
    return [(local, 2 * shape.ffn, shape.hidden), (local, shape.hidden, shape.ffn)] * (shape.layers // parallel.pp)


def stage_replicated(model: Model, parallel: ParallelConfiguration, stage: int) -> int:
    """Elements that ETP does not cut: norms, routers, and this rank's part of the biases."""
    bias = model.qkv_rows() // parallel.tp if model.qkv_bias else 0
    last = model.shape.hidden if stage == parallel.pp - 1 else 0
    return model.shape.layers // parallel.pp * (model.layer_replicated() + bias) + last


def stage_held(model: Model, parallel: ParallelConfiguration, stage: int, training: Training) -> Held:
    """Shards, slots and rings of a rank of a stage."""
    cut = Cut(parallel.etp, parallel.expert_etp, training.transport, training.prefetch_depth, training.precision)
    return held(stage_weights(model, parallel, stage), stage_experts(model, parallel), _ends(model, parallel), cut)


def resident(model: Model, parallel: ParallelConfiguration, stage: int, training: Training) -> dict[str, int]:
    """Bytes that a rank of a stage holds between two steps, by purpose.

    The distributed optimizer shards a weight's states over the weight's replicas. Each ETP rank has all states of what
    ETP does not cut.
    """
    found, whole = stage_held(model, parallel, stage, training), stage_replicated(model, parallel, stage)
    elements = found.dense + found.experts + whole
    states = (found.dense + whole) / parallel.replicas + found.experts / parallel.expert_replicas
    sizes = {
        "weights": elements * WEIGHT_BYTES,
        "gradients": elements * training.grad_bytes,
        "optimizer": round(states * _STATE_BYTES) if training.optimizer else 0,
        "gather slots": found.slots,
        "receive ring": found.ring,
        "quantized copies": found.copies,
    }
    return {purpose: nbytes for purpose, nbytes in sizes.items() if nbytes}


def layer_activations(model: Model, parallel: ParallelConfiguration, precision: str = "bf16") -> int:
    """Bytes of one layer's activations that one microbatch keeps for its backward pass.

    With Transformer Engine's layers and flash attention: the inputs and outputs of both norms, QKV, the output of
    attention with its statistics, both halves of FC1 and the input of FC2. An expert's token is kept once for each
    expert that it goes to; loads are taken as even. Where GEMMs run in block FP8, their inputs are kept in FP8.
    """
    shape = model.shape
    fp8 = WEIGHT_BYTES if precision == "bf16" else 1 + _SCALE
    queries = shape.heads * shape.head_elements()
    norms_in = 2 * shape.hidden * WEIGHT_BYTES
    attention = (model.qkv_rows() + queries) * WEIGHT_BYTES + 4 * shape.heads
    if model.qk_norm:
        attention += (queries + shape.kv_heads * shape.head_elements()) * WEIGHT_BYTES
    mlp = 2 * shape.ffn * WEIGHT_BYTES + shape.ffn * fp8
    if shape.experts:
        # The second norm's output is also the router's input, in bf16, and each expert's input is kept on its own.
        router = 4 * 4 * shape.experts
        mlp = shape.top_k * (mlp + shape.hidden * fp8) + router + shape.hidden * WEIGHT_BYTES
        norms_out = shape.hidden * fp8
    else:
        norms_out = 2 * shape.hidden * fp8
    per_token = norms_in + norms_out + attention + mlp
    return round(per_token * parallel.micro_batch * shape.sequence / (parallel.tp * parallel.cp))


def step_adds(model: Model, parallel: ParallelConfiguration, stage: int, training: Training) -> dict[str, int]:
    """Bytes that a step adds to :func:`resident` at its peak on a rank of a stage, by purpose.

    The peak is at the loss, or where a layer's weight gradients have been computed and not yet been added or sent:
    ``copy_engine`` has up to two of the largest group's size, ``c10d`` three, and one more where the group is a layer's
    experts, Megatron alone one. These numbers are measured. From the second microbatch on, the microbatch before may
    have one more on its way.
    """
    shape = model.shape
    microbatches = parallel.microbatches(training.global_batch)
    tokens = parallel.micro_batch * shape.sequence // parallel.cp
    inputs = tokens * shape.hidden * WEIGHT_BYTES // parallel.tp
    one = layer_activations(model, parallel, training.precision)
    layers = shape.layers // parallel.pp
    in_flight = min(parallel.pp - stage, microbatches)
    kept = layers * (inputs if parallel.recompute else one) * in_flight + (one if parallel.recompute else 0)
    logits = 0
    if stage == parallel.pp - 1:
        kept += 2 * inputs  # of the last norm and of the output layer
        logits = tokens * padded_vocabulary(model, parallel) // parallel.tp * _LOGIT_BYTES
    groups = stage_weights(model, parallel, stage) + stage_experts(model, parallel)
    largest, group = max((count * rows * columns * WEIGHT_BYTES, count) for count, rows, columns in groups)
    etp = parallel.etp * parallel.expert_etp > 1
    waiting = 1 if not etp else 2 if training.transport == "copy_engine" else 4 if group > 1 else 3
    sizes = {"activations": kept, "logits or gradients": max(logits, waiting * largest)}
    if etp and microbatches > 1:
        sizes["gradients on their way"] = largest
    return sizes


def needed(model: Model, parallel: ParallelConfiguration, training: Training) -> dict[str, int]:
    """Bytes at the peak of a step on the stage that needs most, by purpose."""
    stages = (
        resident(model, parallel, stage, training) | step_adds(model, parallel, stage, training)
        for stage in {0, parallel.pp // 2, parallel.pp - 1}
    )
    return max(stages, key=lambda sizes: sum(sizes.values()))


def _ends(model: Model, parallel: ParallelConfiguration) -> tuple[int, int, int]:
    return 1, padded_vocabulary(model, parallel) // parallel.tp, model.shape.hidden
