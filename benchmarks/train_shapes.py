"""The systems and models of the training benchmark, and the operations and bytes that a step takes in theory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

SYSTEMS = {
    "none": "no communication",
    "none_graph": "no communication, CUDA graph",
    "dp": "data parallel, distributed optimizer",
    "ep": "expert parallel",
    "upstream_gtp": "Megatron's own sharded weights (GTP)",
    "tp": "tensor and sequence parallel",
    "fsdp2": "PyTorch FSDP2 (Megatron's wrapper)",
    "megatron_fsdp": "Megatron-FSDP",
    "etp_c10d": "ETP, c10d",
    "etp_c10d_graph": "ETP, c10d, CUDA graph",
    "etp_copy_engine": "ETP, copy_engine",
    "etp_copy_engine_graph": "ETP, copy_engine, CUDA graph",
    "etp_c10d_ep2": "ETP, c10d, and expert parallel 2",
    "etp_copy_engine_ep2": "ETP, copy_engine, and expert parallel 2",
}
PRECISIONS = {"bf16": "", "fp8_block": "blockwise", "fp8_tensor": "tensorwise"}
"""Precisions of the linear layers' GEMMs, with Megatron's name of the recipe."""
GRAPH = "_graph"
EXPERT_PARALLEL = "_ep2"
# Rows of an ETP shard are a multiple of this (`EtpConfig.pad_for_alignment`).
_ALIGNMENT = 16
_BLOCK = 128
WEIGHT_BYTES = 2
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, untied, without biases, and one microbatch of data.

    Attributes:
        ffn: of the MLP, or of each expert.
        experts: of each layer; 0 for a dense model. With experts, queries and keys are normalized, as in Qwen3.
        top_k: experts that each token goes to.
        head: elements of an attention head; 0 stands for ``hidden / heads``.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    experts: int = 0
    top_k: int = 0
    head: int = 0

    def flops(self) -> float:
        """FLOPs of forward and backward of one microbatch: GEMMs and causal attention, no recomputation."""
        dense = sum(count * rows * columns for count, rows, columns in self.weights()) - self.vocabulary * self.hidden
        experts = sum(rows * columns for _, rows, columns in self.expert_weights()) * self.top_k
        router = self.layers * self.experts * self.hidden
        attention = self.layers * 2 * self.heads * self.head_elements() * self.sequence / 2
        return 6.0 * self.tokens() * (dense + experts + router + attention)

    def tokens(self) -> int:
        """Tokens of one microbatch."""
        return self.micro_batch * self.sequence

    def head_elements(self) -> int:
        """Elements of one attention head."""
        return self.head or self.hidden // self.heads

    def weights(self) -> list[tuple[int, int, int]]:
        """1, rows and columns of every dense matrix.

        These are the embedding, QKV and projection of each layer, FC1 and FC2 where there are no experts, and the
        output.
        """
        queries, keys = self.heads * self.head_elements(), self.kv_heads * self.head_elements()
        layer = [(1, queries + 2 * keys, self.hidden), (1, self.hidden, queries)]
        if not self.experts:
            layer += [(1, 2 * self.ffn, self.hidden), (1, self.hidden, self.ffn)]
        ends = [(1, self.vocabulary, self.hidden)]
        return [*ends, *layer * self.layers, *ends]

    def expert_weights(self) -> list[tuple[int, int, int]]:
        """Number, rows and columns of the matrices that are one group: FC1 of a layer's experts, and FC2."""
        layer = [(self.experts, 2 * self.ffn, self.hidden), (self.experts, self.hidden, self.ffn)]
        return layer * self.layers if self.experts else []

    def replicated(self) -> int:
        """Elements of all norms' scales and of the routers."""
        layer = 2 * self.hidden
        if self.experts:
            layer += 2 * self.head_elements() + self.experts * self.hidden
        return self.layers * layer + self.hidden


SHAPES = {
    "llama8b-8l": Shape(8, 4096, 14336, 32, 8, 32000, 4096, 1),
    # Launch overhead rules: the host cannot enqueue kernels as fast as the GPU runs them.
    "small": Shape(8, 1024, 2816, 16, 4, 32000, 1024, 1),
    # Layers of Llama-70B. 129 GiB of bf16 weights and gradients: too much for a GPU of 141 GB, with activations.
    "llama70b-40l": Shape(40, 8192, 28672, 64, 8, 32000, 4096, 1),
    "llama8b-32l": Shape(32, 4096, 14336, 32, 8, 128256, 4096, 1),
    # Layers of Qwen3-30B-A3B.
    "qwen3-30b-a3b-6l": Shape(6, 2048, 768, 32, 4, 32000, 4096, 1, experts=128, top_k=8, head=128),
    "test": Shape(2, 256, 704, 8, 4, 512, 256, 1),
    "test-moe": Shape(2, 128, 96, 4, 2, 512, 256, 1, experts=8, top_k=2, head=48),
}


def resized(name: str, layers: int | None = None, experts: int | None = None) -> tuple[str, Shape]:
    """A shape of :data:`SHAPES`, or one with other numbers of layers and experts, and what to call it.

    Raises:
        ValueError: if a dense model is given experts, or a mixture of experts fewer than each token goes to.
    """
    shape = SHAPES[name]
    if experts is not None and not shape.experts:
        raise ValueError(f"{name} has no experts; choose a shape that has, or drop --experts")
    if experts is not None and experts < shape.top_k:
        raise ValueError(f"{experts} experts are too few: in {name} each token goes to {shape.top_k}")
    name += "".join(f", {count} {what}" for count, what in ((layers, "layers"), (experts, "experts")) if count)
    return name, replace(shape, layers=layers or shape.layers, experts=experts or shape.experts)


def obstacle(system: str, shape: Shape, ranks: int) -> str:
    """Why a system cannot run a model on this number of GPUs; empty if it can."""
    parallel = expert_parallel(system, ranks)
    if system.endswith(GRAPH) and shape.experts:
        return "the host reads how many tokens each expert gets in each pass, which a CUDA graph forbids"
    if parallel > 1 and (not shape.experts or shape.experts % parallel):
        return f"{shape.experts} experts cannot be distributed over {parallel} ranks"
    if system.endswith(EXPERT_PARALLEL) and ranks < 2 * parallel:
        return f"it needs {2 * parallel} GPUs and there are {ranks}"
    return ""


def shards(system: str, ranks: int) -> int:
    """Over how many ranks a system cuts each weight, of the attention or of an expert."""
    whole = system.removesuffix(GRAPH) in {"none", "dp", "ep"}
    return 1 if whole else ranks // expert_parallel(system, ranks)


def expert_parallel(system: str, ranks: int) -> int:
    """Over how many ranks a layer's experts are distributed, each as a whole."""
    return ranks if system == "ep" else 2 if system.endswith(EXPERT_PARALLEL) else 1


@dataclass(frozen=True)
class Cut:
    """How a rank's matrices are sharded, and by what.

    Attributes:
        over: ranks that hold one shard each of a dense matrix.
        experts_over: ranks that hold one shard each of an expert's matrix.
        transport: of ETP, "c10d" or "copy_engine"; "" for any other system, which pads nothing and has no slots here.
        prefetch_depth: of ETP.
        precision: one of :data:`PRECISIONS`.
    """

    over: int
    experts_over: int
    transport: str = ""
    prefetch_depth: int = 1
    precision: str = "bf16"


@dataclass(frozen=True)
class Held:
    """What a rank holds of its sharded matrices between two steps.

    Attributes:
        dense: elements of the shards of dense matrices, with padding.
        experts: elements of the shards of experts' matrices, with padding.
        slots: bytes of whole matrices that ETP gathers into.
        ring: bytes that ``copy_engine`` receives gradients in.
        copies: bytes of weights quantized for FP8 GEMMs.
    """

    dense: int
    experts: int
    slots: int
    ring: int
    copies: int


def held(
    dense: Sequence[tuple[int, int, int]],
    experts: Sequence[tuple[int, int, int]],
    ends: tuple[int, int, int],
    cut: Cut,
) -> Held:
    """Counts what a rank holds; docs/performance.md has the formulas.

    Args:
        dense: number, rows and columns of each group of matrices that is gathered as one (:meth:`Shape.weights`); with
            tensor parallelism, of this rank's part.
        experts: the same of the experts on this rank.
        ends: the group that is embedding or output; they are not Transformer Engine's, and stay bf16.
        cut: how they are sharded.
    """
    in_fp8, etp = cut.precision != "bf16", bool(cut.transport)
    elements, slots, ring, copies = [], 0, 0, 0
    for groups, over in ((dense, cut.over), (experts, cut.experts_over)):
        sharded = etp and over > 1
        unit = (_BLOCK if cut.precision == "fp8_block" else _ALIGNMENT) * over if sharded else 1
        sizes = [count * (-(-rows // unit) * unit) * columns for count, rows, columns in groups]
        elements.append(sum(sizes) // over)
        # Matrices of one shape share their slots.
        uses = Counter(zip(groups, sizes, strict=True))
        for (group, size), count in uses.items():
            quantized = in_fp8 and group != ends
            if sharded:
                slots += min(count, cut.prefetch_depth + 1) * size * (1 if quantized else WEIGHT_BYTES)
            if quantized and (sharded or over == 1):
                # A whole weight has rows and columns; a shard's copy is where peers read it.
                copies += count * size // over * (1 if sharded else 2)
        if sharded and cut.transport == "copy_engine":
            # Each process group has a ring. Gradients travel in the dtype that the GEMM writes, that of the weights.
            ring += 2 * max(sizes, default=0) * (over - 1) // over * WEIGHT_BYTES
    return Held(elements[0], elements[1], slots, ring, copies)


def closed_form(
    shape: Shape, system: str, ranks: int, *, prefetch_depth: int = 1, precision: str = "bf16"
) -> dict[str, int]:
    """Bytes that a rank must hold between two steps, by purpose; docs/performance.md has the formulas.

    Activations and what lives only inside a step are left out. For systems other than ETP that is weights and
    gradients alone: what they hold besides is their own choice, and shows as a ratio above 1.

    Args:
        shape: the model; weights and gradients are bf16.
        system: a name of :data:`SYSTEMS`.
        ranks: of the shard group.
        prefetch_depth: of ETP.
        precision: one of :data:`PRECISIONS`. In FP8 the linear layers' slots have a byte for each element, and there is
            a quantized copy of each shard; without sharding, Transformer Engine keeps two copies of each weight.
    """
    system = system.removesuffix(GRAPH)
    transport = system.removeprefix("etp_").removesuffix(EXPERT_PARALLEL) if system.startswith("etp") else ""
    over, parallel = shards(system, ranks), expert_parallel(system, ranks)
    local = [(count // parallel, rows, columns) for count, rows, columns in shape.expert_weights()]
    ends = (1, shape.vocabulary, shape.hidden)
    found = held(shape.weights(), local, ends, Cut(over, over, transport, prefetch_depth, precision))
    elements = found.dense + found.experts + shape.replicated() // (ranks if "fsdp" in system else 1)
    sizes = {"weights": elements * WEIGHT_BYTES, "gradients": elements * WEIGHT_BYTES}
    if transport:
        sizes["gather slots"] = found.slots
    if transport == "copy_engine":
        sizes["receive ring"] = found.ring
    if precision != "bf16" and (transport or over == 1):
        sizes["quantized copies"] = found.copies
    return sizes
