"""Time and memory of planning a refit between large clusters, from a configuration alone, on one core.

    python benchmarks/refit_plan.py [--model qwen3-235b|deepseek-v3] [--what source|destination|whole] [--json FILE]

Each measurement runs in a process of its own: what one rank has to compute (its part of the plan, with the proof of
that part), on the trainer's or the engine's side, or everything. Without arguments all are made. Times are seconds of
one core's time, which other work on the machine does not add to; memory is the process's peak (``ru_maxrss``).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

QWEN3_235B: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 94,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
}
DEEPSEEK_V3: Mapping[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
}


@dataclass(frozen=True)
class Setting:
    """A model and two clusters, as the command line of ``python -m megatron_patches.refit plan`` takes them."""

    config: Mapping[str, object]
    trainer: str
    engine: str


SETTINGS: Mapping[str, Setting] = {
    "qwen3-235b": Setting(QWEN3_235B, "tp=4,etp=2,pp=2,ep=32,expert_etp=2,dp=8", "tp=8,dp=8,ep=64"),
    "deepseek-v3": Setting(DEEPSEEK_V3, "tp=2,etp=2,pp=4,first=16,ep=32,expert_etp=2,dp=16", "tp=8,dp=32,ep=256"),
}


@dataclass(frozen=True)
class Measurement:
    """One run.

    Attributes:
        model: key of ``SETTINGS``.
        what: ``source``, ``destination`` or ``whole``.
        describe_s: CPU seconds to describe every rank of both sides.
        plan_s: CPU seconds to plan.
        prove_s: CPU seconds to prove.
        total_s: their sum.
        peak_bytes: peak memory of the process.
        transfers: transfers made.
        rounds: rounds of the whole plan.
        moved_bytes: bytes of these transfers.
        busiest_source: bytes of the busiest source over the mean; 0 where the plan is one rank's.
        digest: digest of the whole plan.
    """

    model: str
    what: str
    describe_s: float
    plan_s: float
    prove_s: float
    total_s: float
    peak_bytes: int
    transfers: int
    rounds: int
    moved_bytes: int
    busiest_source: float
    digest: str


def measure(model: str, what: str) -> Measurement:
    """Plans in this process."""
    from megatron_patches.refit.cluster import Hosts, describe_cluster, engine_mesh, trainer_mesh
    from megatron_patches.refit.plan import PartOf, PlanOptions
    from megatron_patches.refit.proof import prove
    from megatron_patches.refit.source.config_traits import family_from_config
    from megatron_patches.refit.source.offline import TrainerOptions

    setting = SETTINGS[model]
    family, options = family_from_config(setting.config), PlanOptions()
    marks = [time.process_time()]
    sides = describe_cluster(
        family, trainer_mesh(setting.trainer), engine_mesh(setting.engine), TrainerOptions(), Hosts()
    )
    marks.append(time.process_time())
    part = None
    if what != "whole":
        part = PartOf("source" if what == "source" else "destination", 5)
    plan = sides.plan(options, part)
    marks.append(time.process_time())
    prove(plan, sides.sources, sides.destinations, options)
    marks.append(time.process_time())
    sent = plan.bytes_by_source()
    return Measurement(
        model=model,
        what=what,
        describe_s=marks[1] - marks[0],
        plan_s=marks[2] - marks[1],
        prove_s=marks[3] - marks[2],
        total_s=marks[3] - marks[0],
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        transfers=len(plan.transfers),
        rounds=plan.rounds,
        moved_bytes=plan.nbytes,
        busiest_source=max(sent.values()) * len(sides.sources) / plan.nbytes if part is None else 0.0,
        digest=plan.digest,
    )


def in_own_process(model: str, what: str) -> Measurement:
    """Measures in a fresh process of one thread."""
    command = [sys.executable, __file__, "--model", model, "--what", what, "--here"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, timeout=1800)  # noqa: S603
    return Measurement(**json.loads(done.stdout))


def main() -> None:
    """Prints one line a measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SETTINGS))
    parser.add_argument("--what", choices=["source", "destination", "whole"])
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(asdict(measure(options.model, options.what))))
        return
    found = []
    for model in [options.model] if options.model else list(SETTINGS):
        for what in [options.what] if options.what else ["source", "destination", "whole"]:
            one = in_own_process(model, what)
            found.append(asdict(one))
            print(
                f"{model:12} {what:12} describe {one.describe_s:5.1f} s  plan {one.plan_s:5.1f} s  prove "
                f"{one.prove_s:5.1f} s  total {one.total_s:6.1f} s  peak {one.peak_bytes / 2**30:4.2f} GiB  "
                f"{one.transfers} transfers  {one.rounds} rounds  busiest source {one.busiest_source:.3f}  "
                f"{one.digest[:12]}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
