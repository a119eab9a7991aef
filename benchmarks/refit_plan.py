"""Time and memory of planning a refit between large clusters, from a configuration alone, on one core.

    python benchmarks/refit_plan.py [--model qwen3-235b|deepseek-v3] [--what destination|source|registry|whole]
        [--json FILE]

Each measurement runs in a process of its own. ``destination`` and ``source`` are what one rank computes in a live
refit, with what the others have told it, which is made beforehand and not timed. ``registry`` is what the first trainer
rank does for all others. ``whole`` is what the command ``plan`` does: everything, for all ranks. Without arguments all
are made. Times are seconds of one core's time, which other work on the machine does not add to; memory is the
process's peak (``ru_maxrss``), of which most is preparation where one rank is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from msgspec.msgpack import decode, encode

from megatron_patches.refit.cluster import Hosts, describe_cluster, engine_mesh, trainer_mesh
from megatron_patches.refit.manifest import Manifest
from megatron_patches.refit.parties.messages import (
    DESCRIBING,
    PLANNING,
    RECORDING,
    Asked,
    Held,
    ModelAnswer,
    Orders,
    Overlap,
    Registration,
    Wanted,
)
from megatron_patches.refit.parties.registry import Registry, registered
from megatron_patches.refit.plan import DEFAULT_OPTIONS, PartOf, Plan, plan_for
from megatron_patches.refit.planning.layouts import Holder, holder_of, layout_of
from megatron_patches.refit.planning.local import SourceIndex
from megatron_patches.refit.planning.requests import Request, check_requests, transfers_of
from megatron_patches.refit.planning.tensors import unfold_tensors
from megatron_patches.refit.planning.transfers import Transfer, canonical
from megatron_patches.refit.proof import prove, prove_with
from megatron_patches.refit.source.config_traits import family_from_config
from megatron_patches.refit.source.offline import TrainerOptions, trainer_manifest
from megatron_patches.refit.target.vllm_layout import engine_manifest

WHAT = ("destination", "source", "registry", "whole")
RANK = 5
"""Which destination or source is measured."""
HOSTS = Hosts()

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
        what: one of ``WHAT``.
        describe_s: CPU seconds to describe what the rank holds or wants, or that of all; in the registry, to agree on
            the model.
        plan_s: CPU seconds to plan; on a source, to make transfers of what is asked; in the registry, to find the
            layouts that overlap what each destination wants.
        prove_s: CPU seconds to prove; on a source, to check what is asked; in the registry, to pass requests on.
        total_s: their sum.
        peak_bytes: peak memory of the process.
        transfers: transfers made; 0 in the registry, which makes none.
        moved_bytes: bytes of these transfers.
        busiest_source: bytes of the busiest source over the mean; 0 where the plan is not that of all.
        digest: digest of the plan.
    """

    model: str
    what: str
    describe_s: float
    plan_s: float
    prove_s: float
    total_s: float
    peak_bytes: int
    transfers: int
    moved_bytes: int
    busiest_source: float
    digest: str


def measure(model: str, what: str) -> Measurement:
    """Plans in this process."""
    setting, clock = SETTINGS[model], _Clock()
    plan = {"destination": _destination, "source": _source, "registry": _registry, "whole": _whole}[what](
        setting, clock
    )
    sent = plan.bytes_by_source()
    sources = trainer_mesh(setting.trainer).size
    return Measurement(
        model=model,
        what=what,
        describe_s=clock.seconds["describe"],
        plan_s=clock.seconds["plan"],
        prove_s=clock.seconds["prove"],
        total_s=sum(clock.seconds.values()),
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        transfers=len(plan.transfers),
        moved_bytes=plan.nbytes,
        busiest_source=max(sent.values()) * sources / plan.nbytes if what == "whole" else 0.0,
        digest=plan.digest,
    )


class _Clock:
    """CPU seconds of this process, by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"describe": 0.0, "plan": 0.0, "prove": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.seconds[name] += time.process_time() - began


def _whole(setting: Setting, clock: _Clock) -> Plan:
    family = family_from_config(setting.config)
    with clock.phase("describe"):
        sides = describe_cluster(
            family, trainer_mesh(setting.trainer), engine_mesh(setting.engine), TrainerOptions(), HOSTS
        )
    with clock.phase("plan"):
        plan = sides.plan(DEFAULT_OPTIONS)
    with clock.phase("prove"):
        prove(plan, sides.sources, sides.destinations)
    return plan


class _Others:
    """What a rank is told in a live refit, by a registry that all sources have told what they hold."""

    def __init__(self, setting: Setting, clock: _Clock) -> None:
        self.family = family_from_config(setting.config)
        self.trainer, self.engine = trainer_mesh(setting.trainer), engine_mesh(setting.engine)
        self.registry = Registry(self.trainer.size)
        shapes = self.family.shapes()
        self.holders: list[Holder] = []
        registrations: list[bytes] = []
        for rank in range(self.trainer.size):
            # Of all but the layout, what the first one says counts.
            held = Held({}, dict(shapes) if rank == 0 else {}, self.held_by(rank))
            self.holders.append(holder_of(held.manifest))
            registrations.append(encode(Registration(registered(held, self.holders[-1].layout))))
        with clock.phase("describe"):
            (answer, *_) = self.tell(DESCRIBING, registrations)
        self.model = decode(answer, type=ModelAnswer)

    def held_by(self, rank: int) -> Manifest:
        return trainer_manifest(self.family, self.trainer, rank, TrainerOptions(), HOSTS.name("trainer", rank))

    def wanted_by(self, rank: int) -> Manifest:
        host = HOSTS.name("engine", rank)
        return engine_manifest(self.family.traits, self.engine, rank, TrainerOptions().dtype, host)

    def tell(self, what: str, parts: list[bytes]) -> list[bytes]:
        answers = self.registry.answer(what, parts)
        if answers is None:
            raise RuntimeError(f"the registry has no answer to {what!r}")
        return answers

    def overlap(self, wanted: Manifest, clock: _Clock) -> list[Holder]:
        regions = encode(Wanted(tuple(template.region for template in layout_of(wanted).templates)))
        with clock.phase("plan"):
            (answer,) = self.tell(RECORDING, [regions])
        told = decode(answer, type=Overlap)
        return [Holder(rank, host, told.layouts[number]) for rank, host, number in told.holders]

    def requests(self, clock: _Clock) -> list[Orders[list[Request]]]:
        """What all destinations ask of each source."""
        tensors = unfold_tensors(self.model.tensors)
        parts = [encode(Asked({}, "", 0))] * self.trainer.size
        for rank in range(self.engine.size):
            wanted = self.wanted_by(rank)
            plan, asked = plan_for(tensors, SourceIndex(self.overlap(wanted, clock)), wanted, DEFAULT_OPTIONS)
            parts.append(encode(Asked({source: list(found) for source, found in asked.items()}, "", plan.nbytes)))
        with clock.phase("prove"):
            answers = self.tell(PLANNING, parts)
        return [decode(answer, type=Orders[list[Request]]) for answer in answers]


def _destination(setting: Setting, clock: _Clock) -> Plan:
    others = _Others(setting, _Clock())
    with clock.phase("describe"):
        tensors = unfold_tensors(others.model.tensors)
        wanted = others.wanted_by(RANK)
        layout_of(wanted)
    holders = others.overlap(wanted, _Clock())
    with clock.phase("plan"):
        plan, _ = plan_for(tensors, SourceIndex(holders), wanted, DEFAULT_OPTIONS)
        _ = plan.digest
    with clock.phase("prove"):
        prove_with(plan, holders, [wanted])
    return plan


def _source(setting: Setting, clock: _Clock) -> Plan:
    others = _Others(setting, _Clock())
    orders = others.requests(_Clock())[RANK]
    with clock.phase("describe"):
        layout = holder_of(others.held_by(RANK)).layout
    transfers: list[Transfer] = []
    for destination, requests in orders.requests:
        with clock.phase("prove"):
            check_requests(requests, layout, RANK, destination)
        with clock.phase("plan"):
            transfers += transfers_of(requests, layout, RANK, destination)
    with clock.phase("plan"):
        tensors = tuple(sorted(unfold_tensors(others.model.tensors)))
        plan = Plan(tensors, tuple(sorted(transfers, key=canonical)), PartOf("source", RANK))
        _ = plan.digest
    return plan


def _registry(setting: Setting, clock: _Clock) -> Plan:
    _Others(setting, clock).requests(clock)
    return Plan((), ())


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
    parser.add_argument("--what", choices=WHAT)
    parser.add_argument("--json", type=Path, help="write the measurements here")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(asdict(measure(options.model, options.what))))
        return
    found = []
    for model in [options.model] if options.model else list(SETTINGS):
        for what in [options.what] if options.what else WHAT:
            one = in_own_process(model, what)
            found.append(asdict(one))
            print(
                f"{model:12} {what:12} describe {one.describe_s:5.1f} s  plan {one.plan_s:5.1f} s  prove "
                f"{one.prove_s:5.1f} s  total {one.total_s:6.1f} s  peak {one.peak_bytes / 2**30:4.2f} GiB  "
                f"{one.transfers} transfers  busiest source {one.busiest_source:.3f}  "
                f"{one.digest[:12]}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
