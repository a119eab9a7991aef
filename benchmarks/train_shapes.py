"""The systems and models of the training benchmark, and the operations and bytes that a step takes in theory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

SYSTEMS = {
    "none": "no communication",
    "none_graph": "no communication, CUDA graph",
    "dp": "data parallel, distributed optimizer",
    "upstream_gtp": "Megatron's own sharded weights (GTP)",
    "tp": "tensor and sequence parallel",
    "fsdp2": "PyTorch FSDP2 (Megatron's wrapper)",
    "megatron_fsdp": "Megatron-FSDP",
    "etp_c10d": "ETP, c10d",
    "etp_c10d_graph": "ETP, c10d, CUDA graph",
    "etp_copy_engine": "ETP, copy_engine",
    "etp_copy_engine_graph": "ETP, copy_engine, CUDA graph",
}
GRAPH = "_graph"
# Rows of an ETP shard are a multiple of this (`EtpConfig.pad_for_alignment`).
_ALIGNMENT = 16
_WEIGHT_BYTES = 2
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A Llama-like model, untied, without biases, and one microbatch of data."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequence: int
    micro_batch: int

    def flops(self) -> float:
        """Of forward and backward of one microbatch: GEMMs and causal attention, no recomputation."""
        weights = sum(rows * columns for rows, columns in self.weights()) - self.vocabulary * self.hidden
        attention = self.layers * 2 * self.hidden * self.sequence / 2
        return 6.0 * self.tokens() * (weights + attention)

    def tokens(self) -> int:
        """Of one microbatch."""
        return self.micro_batch * self.sequence

    def weights(self) -> list[tuple[int, int]]:
        """Rows and columns of every matrix: embedding, then QKV, projection, FC1 and FC2 of each layer, output."""
        qkv = self.hidden + 2 * self.hidden * self.kv_heads // self.heads
        layer = [(qkv, self.hidden), (self.hidden, self.hidden), (2 * self.ffn, self.hidden), (self.hidden, self.ffn)]
        ends = [(self.vocabulary, self.hidden)]
        return [*ends, *layer * self.layers, *ends]

    def norms(self) -> int:
        """Elements of all norms' scales."""
        return (2 * self.layers + 1) * self.hidden


SHAPES = {
    "llama8b-8l": Shape(8, 4096, 14336, 32, 8, 32000, 4096, 1),
    # Launch overhead rules: the host cannot enqueue kernels as fast as the GPU runs them.
    "small": Shape(8, 1024, 2816, 16, 4, 32000, 1024, 1),
    # Layers of Llama-70B. 129 GiB of bf16 weights and gradients: too much for a GPU of 141 GB, with activations.
    "llama70b-40l": Shape(40, 8192, 28672, 64, 8, 32000, 4096, 1),
    "llama8b-32l": Shape(32, 4096, 14336, 32, 8, 128256, 4096, 1),
    "test": Shape(2, 256, 704, 8, 4, 512, 256, 1),
}


def closed_form(
    shape: Shape, system: str, ranks: int, *, prefetch_depth: int = 1, grad_bytes: int = 2
) -> dict[str, int]:
    """Bytes that a rank must hold between two steps, by purpose; docs/performance.md has the formulas.

    Activations and what lives only inside a step are left out. For systems other than ETP that is weights and
    gradients alone: what they hold besides is their own choice, and shows as a ratio above 1.

    Args:
        shape: the model; weights are bf16.
        system: a name of :data:`SYSTEMS`.
        ranks: of the shard group.
        prefetch_depth: of ETP.
        grad_bytes: of one gradient element: 2 for bf16, 4 for fp32.
    """
    system = system.removesuffix(GRAPH)
    unit = _ALIGNMENT * ranks if system.startswith("etp") else 1
    sizes = [-(-rows // unit) * unit * columns for rows, columns in shape.weights()]
    over = 1 if system in {"none", "dp"} else ranks
    held = sum(sizes) // over + shape.norms() // (ranks if "fsdp" in system else 1)
    found = {"weights": held * _WEIGHT_BYTES, "gradients": held * grad_bytes}
    if system.startswith("etp"):
        uses = Counter(shape.weights())
        slots = sum(
            min(count, prefetch_depth + 1) * (-(-rows // unit) * unit) * columns
            for (rows, columns), count in uses.items()
        )
        found["gather slots"] = slots * _WEIGHT_BYTES
    if system == "etp_copy_engine":
        # Gradients travel in the dtype that the GEMM writes, which is that of the weights.
        found["receive ring"] = 2 * max(sizes) * (ranks - 1) // ranks * _WEIGHT_BYTES
    return found
