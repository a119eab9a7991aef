"""Times one training step of a Llama-like model under several ways to spread it over GPUs, side by side.

::

    torchrun --nproc-per-node 4 benchmarks/train_step.py --systems none,dp,etp_c10d,etp_copy_engine --json ours.json
    torchrun --nproc-per-node 4 benchmarks/train_step.py --systems none,dp,upstream_gtp,fsdp2 --json theirs.json
    python benchmarks/train_step.py --merge ours.json theirs.json

All systems of a run live in one process group and are measured in random order, several rounds; every figure has
its ratio to "none" (the unsharded model, no communication) of the same run. Megatron's own sharded weights
(upstream_gtp) need an unpatched Megatron, so they are measured in a run of their own, against a "none" of their own.
A step is forward and backward of every microbatch and the reduction of gradients, without zeroing gradients and
without an optimizer; sharded weights count as changed by every step.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

SYSTEMS = {
    "none": "no communication",
    "dp": "data parallel, distributed optimizer",
    "upstream_gtp": "Megatron's own sharded weights (GTP)",
    "fsdp2": "PyTorch FSDP2 (Megatron's wrapper)",
    "etp_c10d": "ETP, c10d",
    "etp_copy_engine": "ETP, copy_engine",
}
SHARDED = ("upstream_gtp", "etp_c10d", "etp_copy_engine")
GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A model and its data."""

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
        qkv = self.hidden * (self.hidden + 2 * self.hidden * self.kv_heads // self.heads)
        weights = self.layers * (qkv + self.hidden**2 + 3 * self.hidden * self.ffn) + self.hidden * self.vocabulary
        tokens = self.micro_batch * self.sequence
        attention = self.layers * 2 * self.hidden * self.sequence / 2
        return 6.0 * tokens * (weights + attention)


SHAPES = {
    "llama8b-8l": Shape(8, 4096, 14336, 32, 8, 32000, 4096, 1),
    "small": Shape(8, 1024, 2816, 16, 4, 32000, 1024, 1),
    "llama8b-32l": Shape(32, 4096, 14336, 32, 8, 128256, 4096, 1),
    "test": Shape(2, 256, 704, 8, 4, 512, 256, 1),
}


@dataclass
class Result:
    """One system with one number of microbatches."""

    system: str
    microbatches: int
    milliseconds: list[float] = field(default_factory=list)
    allocated_gib: float = 0.0
    peak_gib: float = 0.0
    other_gib: dict[str, float] = field(default_factory=dict)
    loss: str = ""
    host_ms: float = 0.0

    @property
    def median(self) -> float:
        """Milliseconds of a step."""
        return statistics.median(self.milliseconds)


class System:
    """One built model and how to step it."""

    def __init__(self, name: str, shape: Shape, options: argparse.Namespace) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        self.name, self.shape = name, shape
        shards = dist.get_world_size() if name in SHARDED else 1
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            gtp_remat_size=shards, high_priority_stream_groups=["gtp_remat"] if shards > 1 else None
        )
        model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        self.config = _config(shape, shards)
        self.model = self._build(options)
        generator = torch.Generator().manual_seed(17 + dist.get_rank())
        size = (shape.micro_batch, shape.sequence + 1)
        tokens = torch.randint(0, shape.vocabulary, size, generator=generator).cuda()
        self.inputs, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.positions = torch.arange(shape.sequence, device="cuda").expand(shape.micro_batch, -1).contiguous()
        self.loss = torch.zeros(())

    def _build(self, options: argparse.Namespace) -> Any:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            TorchFullyShardedDataParallel,
        )

        if self.name in SHARDED:
            if self.name != "upstream_gtp":
                self._configure_etp(options)
            from megatron.core.tensor_parallel.gtp_api import configure_gtp_remat_from_recipe

            configure_gtp_remat_from_recipe()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=self.name != "fsdp2", overlap_grad_reduce=self.name != "fsdp2"
        )
        module = _gpt(self.config, self.shape)
        if self.name == "fsdp2":
            return TorchFullyShardedDataParallel(self.config, ddp, module)
        model = DistributedDataParallel(self.config, ddp, module)
        if self.name in SHARDED:
            from megatron.core.tensor_parallel.gtp_api import classify_gtp_remat_chains

            classify_gtp_remat_chains([model])
        return model

    def _configure_etp(self, options: argparse.Namespace) -> None:
        from etp import EtpConfig, TransportName
        from megatron_patches import MegatronEtpConfig
        from megatron_patches.seam import installed

        engine = EtpConfig(
            transport=TransportName(self.name.removeprefix("etp_")), prefetch_depth=options.prefetch_depth
        )
        api = installed()
        if api is None:
            raise RuntimeError("megatron_patches.apply() has not run")
        api.configure(MegatronEtpConfig(engine=engine))

    def step(self, microbatches: int) -> None:
        """Forward and backward of every microbatch, and the reduction of gradients."""
        for index in range(microbatches):
            quiet = self.name == "none" or (self.name != "fsdp2" and index < microbatches - 1)
            with self.model.no_sync() if quiet else contextlib.nullcontext():
                losses = self.model(self.inputs, self.positions, None, labels=self.labels)
                self.loss = losses.float().mean()
                (self.loss / microbatches).backward()
        if self.name in ("none", "fsdp2"):
            for p in self.model.parameters():
                if self.name == "fsdp2":
                    p.grad = None
            return
        if self.name in SHARDED:
            from megatron.core.tensor_parallel.gtp_api import wait_for_gtp_grad_reduction_on_current_stream

            wait_for_gtp_grad_reduction_on_current_stream()
        self.model.finish_grad_sync()
        for group in (*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups):
            group.reset()
        for p in self.model.params_with_grad:
            p.grad_added_to_main_grad = False

    def other_memory(self) -> dict[str, float]:
        """GiB that PyTorch's allocator does not know of."""
        if self.name != "etp_copy_engine":
            return {}
        param = next(p for p in self.model.parameters() if hasattr(p, "driver"))
        sizes: dict[str, float] = {}
        for transport in param.driver.transports.values():
            for what, nbytes in transport.nbytes().items():
                sizes[what] = sizes.get(what, 0.0) + nbytes / GIB
        return sizes


def _config(shape: Shape, shards: int) -> Any:
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=shape.layers, hidden_size=shape.hidden, ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads, num_query_groups=shape.kv_heads, gated_linear_unit=True,
        activation_func=F.silu, normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0,
        attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False, bias_activation_fusion=True, tensor_parallel_num_weight_shards=shards,
    )  # fmt: skip


def _gpt(config: Any, shape: Shape) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    model = GPTModel(
        config, get_gpt_layer_with_transformer_engine_spec(), shape.vocabulary, shape.sequence,
        position_embedding_type="rope", share_embeddings_and_output_weights=False,
    )  # fmt: skip
    return model.cuda().bfloat16()


def measure(run: Callable[[], None], steps: int) -> tuple[float, float]:
    """Milliseconds a step on the slowest rank: on the device, and until the host had enqueued it."""
    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    clock = time.perf_counter()
    start.record()
    for _ in range(steps):
        run()
    stop.record()
    host = (time.perf_counter() - clock) * 1000 / steps
    torch.cuda.synchronize()
    slowest = torch.tensor([start.elapsed_time(stop) / steps, host], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    device_ms, host_ms = slowest.tolist()
    return device_ms, host_ms


def trace(system: System, microbatches: int, path: Path) -> None:
    """Write a profiler trace of two steps on rank 0."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(2):
            system.step(microbatches)
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Build every system, measure all of them in random order, and return the results."""
    shape, names = SHAPES[options.shape], options.systems.split(",")
    ours = [name for name in names if name.startswith("etp")]
    if ours and "upstream_gtp" in names:
        raise SystemExit("upstream_gtp needs an unpatched Megatron; measure it in a run without ETP")
    if ours:
        import megatron_patches

        megatron_patches.apply()
    systems: dict[str, System] = {}
    results: dict[tuple[str, int], Result] = {}
    for name in names:
        systems[name] = system = System(name, shape, options)
        for microbatches in options.microbatches:
            for _ in range(2):
                system.step(microbatches)
            torch.cuda.synchronize()
            results[name, microbatches] = Result(name, microbatches, loss=float(system.loss).hex())
        result = results[name, options.microbatches[-1]]
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        system.step(options.microbatches[-1])
        torch.cuda.synchronize()
        result.allocated_gib = (torch.cuda.memory_allocated() - system.before) / GIB
        result.peak_gib = (torch.cuda.max_memory_allocated() - system.before) / GIB
        result.other_gib = system.other_memory()
        if dist.get_rank() == 0:
            print(f"{name}: built, loss {float(system.loss):.6f}, {result.allocated_gib:.2f} GiB", flush=True)
    order = random.Random(options.seed)  # noqa: S311 - the same order on all ranks is what is wanted
    for _ in range(options.rounds):
        for name, microbatches in order.sample(sorted(results), len(results)):
            system = systems[name]
            device_ms, host_ms = measure(lambda s=system, m=microbatches: s.step(m), options.steps)  # type: ignore[misc]
            results[name, microbatches].milliseconds.append(device_ms)
            results[name, microbatches].host_ms = host_ms
    if options.trace is not None:
        for name in names:
            trace(systems[name], options.microbatches[0], options.trace / f"trace_{name}.json.gz")
    return {
        "shape": asdict(shape),
        "flops_per_microbatch": shape.flops(),
        "gpus": dist.get_world_size(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "options": {key: str(value) for key, value in vars(options).items()},
        "results": [asdict(result) | {"median": result.median} for result in results.values()],
    }


def table(reports: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown; ratios are to "none" of the same run and number of microbatches."""
    lines = [
        "| system | GPUs | microbatches | ms | spread | ratio | tokens/s/GPU | model TFLOP/s | GiB allocated | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        base = {r["microbatches"]: r["median"] for r in report["results"] if r["system"] == "none"}
        tokens = report["shape"]["micro_batch"] * report["shape"]["sequence"]
        for r in report["results"]:
            seconds, micro = r["median"] / 1000, r["microbatches"]
            ratio = f"{r['median'] / base[micro]:.3f}" if micro in base else ""
            other = sum(r["other_gib"].values())
            memory = f"{r['allocated_gib'] + other:.2f} | {r['peak_gib'] + other:.2f}" if r["allocated_gib"] else " | "
            spread = f"{min(r['milliseconds']):.1f}-{max(r['milliseconds']):.1f}"
            rates = f"{tokens * micro / seconds:.0f} | {report['flops_per_microbatch'] * micro / seconds / 1e12:.0f}"
            lines.append(
                f"| {SYSTEMS[r['system']]} | {report['gpus']} | {micro} | {r['median']:.1f} | {spread} | {ratio} | "
                f"{rates} | {memory} |"
            )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line; run under torchrun, or merge what earlier runs wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default="none,dp,etp_c10d,etp_copy_engine", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--shape", choices=SHAPES, default="llama8b-8l")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps in a row that one measurement averages")
    parser.add_argument("--seed", type=int, default=0, help="of the order of measurements")
    parser.add_argument("--prefetch-depth", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--trace", type=Path, help="folder for a profiler trace of each system on rank 0")
    parser.add_argument("--merge", type=Path, nargs="+", help="print the table of these results and end")
    options = parser.parse_args()
    if options.merge:
        print(table([json.loads(path.read_text()) for path in options.merge]))
        return
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    report = run(options)
    if dist.get_rank() == 0:
        print(table([report]))
        for r in report["results"]:
            print(f"{r['system']} x{r['microbatches']}: host {r['host_ms']:.1f} ms, loss {r['loss']}, {r['other_gib']}")
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
