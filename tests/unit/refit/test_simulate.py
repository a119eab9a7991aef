"""The simulation of a fleet runs what parties run: its figures are those of plans for all, and of real messages."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
from msgspec.msgpack import decode

from benchmarks.refit import TINY
from megatron_patches.refit.__main__ import main
from megatron_patches.refit.control.messages import Asked, Orders, Step
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.planning.local import SourceIndex
from megatron_patches.refit.planning.plan import make_plan
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.planning.transfers import Request
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.simulation.cluster import Hosts, Sides, engine_mesh, trainer_mesh
from megatron_patches.refit.simulation.fleet import Fleet, asked_bytes, holders_in, run_destination, run_source
from megatron_patches.refit.simulation.models import MODELS
from megatron_patches.refit.simulation.simulate import Simulation, simulate
from megatron_patches.refit.tools import simulate_command
from megatron_patches.refit.transports.base import Offer
from tests.unit.refit.test_plan_command import CONFIG

ROOT = Path(__file__).resolve().parents[3]
TRAINER, ENGINE = "tp=2,etp=2,pp=2,ep=2,dp=2", "tp=2,ep=2"


def sides(engines: int = 4, engine: str = ENGINE, colocated: bool = False) -> Sides:
    return Sides(
        family=family_from_config(CONFIG),
        trainer=trainer_mesh(TRAINER),
        engine=engine_mesh(engine),
        engines=engines,
        hosts=Hosts(ranks_per_host=2, colocated=colocated),
    )


def simulated(of: Sides, requests: int = 64, replicas: int = 4) -> Simulation:
    return simulate(of, 64, requests, replicas, 1e9, Progress())


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("engine", [ENGINE, "tp=2,pp=2"])
def test_figures_are_those_of_the_whole_plan(engine: str, colocated: bool) -> None:
    of = sides(3, engine, colocated)
    sources = [of.held_by(rank) for rank in range(of.trainer.size)]
    destinations = [of.wanted_by(rank) for rank in range(of.workers)]
    plan = make_plan(agree_on_tensors(of.family.shapes(), sources), sources, destinations)
    sent, received = plan.bytes_by_source(), defaultdict[int, int](int)
    for item in plan.transfers:
        received[item.destination] += item.nbytes
    found = simulated(of)
    assert not found.sampled
    assert found.balance.busiest_bytes == max(sent.values())
    assert found.balance.mean_bytes * of.trainer.size == plan.nbytes
    assert sum(kind.count for kind in found.kinds) == of.trainer.size + of.workers
    for kind in found.kinds:
        totals = received if kind.name.startswith("engine") else sent
        assert {worker.rank: worker.weight_bytes for worker in kind.measured} == {
            worker.rank: totals[worker.rank] for worker in kind.measured
        }
    measured = [worker.rank for kind in found.kinds if kind.name.startswith("trainer") for worker in kind.measured]
    assert sorted(measured) == list(range(of.trainer.size))


def test_planned_requests_are_those_that_a_worker_makes() -> None:
    """The one is the planner alone, the other all that a party does."""
    fleet = Fleet(sides())
    overlaps = fleet.overlaps()
    asked = [
        asked_bytes(fleet.requests_of(worker, SourceIndex(holders_in(overlaps[worker]))))
        for worker in range(fleet.sides.workers)
    ]
    orders, offers = fleet.orders(asked), fleet.connect(len(asked))
    for rank, told in enumerate(asked):
        requests = decode(told, type=Asked[list[Request]]).requests
        heard = offers[fleet.sides.trainer.size + rank]
        worker = run_destination(fleet, rank, overlaps[rank], heard)
        assert decode(heard, type=dict[int, Offer]).keys() == requests.keys()  # of nobody else
        assert worker.messages == 2 * 7 + len(requests)  # seven steps, and a greeting on each link
        assert (worker.peers, worker.requests) == (len(requests), sum(map(len, requests.values())))
        assert worker.weight_bytes == sum(request.nbytes for found in requests.values() for request in found)
        assert worker.received_bytes > len(overlaps[rank]) + len(fleet.model)
        assert worker.sent_bytes > len(told)
    for rank, order in enumerate(orders):
        requests_of = decode(order, type=Orders[list[Request]]).requests
        source = run_source(fleet, rank, order, offers[rank], 1.0)
        assert (source.peers, source.requests) == (len(requests_of), sum(len(found) for _, found in requests_of))
        workers = {fleet.sides.trainer.size + destination for destination, _ in requests_of}
        assert decode(offers[rank], type=dict[int, Offer]).keys() == workers


def test_the_registry_carries_all_messages_of_all() -> None:
    fleet = Fleet(sides())
    assert fleet.through_bytes[Step.DESCRIBING] > (fleet.sides.trainer.size + fleet.sides.workers) * len(fleet.model)
    overlaps = fleet.overlaps()
    assert fleet.through_bytes[Step.RECORDING] > sum(map(len, overlaps))
    orders = fleet.orders([asked_bytes({})] * fleet.sides.workers)
    assert fleet.through_bytes[Step.PLANNING] > sum(map(len, orders))


def test_steps_after_planning_carry_a_few_bytes_for_each_party_and_link() -> None:
    """Not for each pair of parties: a party hears only of those with which it links."""

    def carried(engines: int) -> tuple[int, int, dict[str, int]]:
        fleet = Fleet(sides(engines))
        overlaps = fleet.overlaps()
        found = [
            fleet.requests_of(worker, SourceIndex(holders_in(overlaps[worker])))
            for worker in range(fleet.sides.workers)
        ]
        fleet.orders([asked_bytes(requests) for requests in found])
        fleet.connect(len(found))
        return fleet.sides.trainer.size + fleet.sides.workers, sum(map(len, found)), fleet.through_bytes

    for engines in (2, 16):
        parties, links, nbytes = carried(engines)
        assert nbytes[Step.CHECKING] == nbytes[Step.LINKING] == 2 * parties
        assert nbytes[Step.CHOOSING] < 100 * parties
        assert nbytes[Step.LISTENING] < 2 * 100 * links + 100 * parties


def test_a_sample_stands_for_all_engines() -> None:
    whole, part = simulated(sides(8), requests=16), simulated(sides(8), requests=7)
    assert (whole.sampled, part.sampled) == (False, True)
    assert part.balance.engines == 4  # whole ones
    for all_, some in zip(whole.kinds, part.kinds, strict=True):
        assert (all_.name, all_.count) == (some.name, some.count)
        assert some.most("peers") == pytest.approx(all_.most("peers"), rel=0.25)
        assert some.most("weight_bytes") == pytest.approx(all_.most("weight_bytes"), rel=0.25)
    assert part.registry_bytes[Step.DESCRIBING] == whole.registry_bytes[Step.DESCRIBING]
    assert part.registry_bytes[Step.RECORDING] == whole.registry_bytes[Step.RECORDING]
    assert part.registry_bytes[Step.PLANNING] == pytest.approx(whole.registry_bytes[Step.PLANNING], rel=0.1)


def test_the_trainer_serves_as_many_engines_at_a_time_as_its_busiest_rank_allows() -> None:
    found = simulated(sides(), replicas=256)
    received = max(kind.most("weight_bytes") for kind in found.kinds if kind.name == "engine")
    exact = received / (found.balance.busiest_bytes / found.balance.engines)
    assert exact - 0.125 < found.fan_out.copies <= exact
    assert found.fan_out.unit_seconds == received / 1e9
    assert 1 <= found.fan_out.over_least < 1.1
    assert len([name for wave in found.fan_out.waves for name in wave.committed]) == 256


@pytest.mark.parametrize("replicas", [1, 64])
@pytest.mark.parametrize("workers", [64, 80, 128])
def test_one_rank_that_serves_many_workers_is_not_taken_for_faster_than_it_is(workers: int, replicas: int) -> None:
    """The first engine has the version once the rank has sent it to all of the engine's workers in turn."""
    of = Sides(family=family_from_config(TINY), trainer=trainer_mesh("dp=1"), engine=engine_mesh(f"dp={workers}"))
    found = simulate(of, 1, 1, replicas, 1e9, Progress()).fan_out
    assert workers <= found.waves[0].end < 1.04 * workers
    assert 1 <= found.over_least < 1.04


def arguments(tmp_path: Path, **changed: str) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    flags = {
        "model": str(tmp_path),
        "from": TRAINER,
        "to": ENGINE,
        "engines": "4",
        "json": str(tmp_path / "found.json"),
    }
    chosen = {**flags, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return ["simulate", *(word for name, value in chosen.items() for word in (f"--{name}", value))]


def test_the_command_prints_tables_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, replicas="9")) == 0
    out = capsys.readouterr().out
    for text in (
        "planned for all engine workers",
        "trainer, stage 1",
        "registry, for all",
        "waves to 9 of such engines",
        "met",
    ):
        assert text in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["engine"] == {"axes": ENGINE, "ranks": 2, "engines": 4}
    assert [kind["count"] for kind in found["kinds"]] == [8, 8, 8]
    assert found["sampled"] is False
    assert sorted(name for wave in found["fan_out"]["waves"] for name in wave["committed"]) == [
        f"engine {number}" for number in range(9)
    ]
    assert all(target["met"] for target in found["targets"])


def test_a_sample_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(tmp_path, requests="1", most_over="9")) == 0
    assert "planned for 1 of 4 engines, and multiplied (sampled)" in capsys.readouterr().out


def test_seconds_of_a_wave_are_of_bytes_between_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where engines share the trainer's hosts, within which bytes may travel faster."""
    assert main([*arguments(tmp_path), "--colocated"]) == 0
    seconds = json.loads((tmp_path / "found.json").read_text())["fan_out"]["unit_seconds"]
    told = " ".join(capsys.readouterr().out.split())
    assert f"one in {seconds:.3g} s with all bytes between hosts" in told


@pytest.mark.parametrize(
    ("flag", "value", "missed"),
    [
        ("most_seconds", "0", 2),
        ("most_worker", "10", 1),
        ("most_registry", "10", 1),
        ("most_over", "-0.9", 2),
    ],
)
def test_a_missed_target_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, missed: int
) -> None:
    assert main(arguments(tmp_path, **{flag: value})) == 1
    assert capsys.readouterr().out.count("MISSED") == missed


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("model", "gpt-9", "gpt-9 is neither a file nor one of qwen3-235b, deepseek-v3, kimi-k2"),
        ("from", "tp=3", "tp is 3 and the model has 2 KV heads"),
        ("from", "dp=16386", "--from has 16386 ranks; at most 16384 can be planned for"),
        ("to", "tp=2,ep=3", "--to: ep is 3"),
        ("engines", "0", "--engines: there are 0 engines"),
        ("replicas", "0", "--replicas is 0"),
        ("requests", "0", "--workers is 1 and --requests is 0; each must be at least 1"),
        ("ranks_per_host", "0", "--ranks-per-host: ranks_per_host is 0"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, message: str
) -> None:
    assert main(arguments(tmp_path, **{flag: value})) == 1
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("file", ["/nowhere/found.json", "/"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    monkeypatch.setattr(simulate_command, "simulate", lambda *_: pytest.fail("it has begun"))
    assert main(arguments(tmp_path, json=file)) == 1
    assert capsys.readouterr().err == f"error: --json is {file}, which cannot be written; name another file\n"


def test_a_simulation_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RefitError("a plan fails")

    monkeypatch.setattr(simulate_command, "simulate", fail)
    assert main(arguments(tmp_path, json=str(tmp_path / "found.json"))) == 1
    assert not (tmp_path / "found.json").exists()


@pytest.mark.parametrize("name", MODELS)
def test_models_with_a_name_are_described(name: str) -> None:
    shapes = family_from_config(MODELS[name]).shapes()
    parameters = sum(map(math.prod, shapes.values()))
    expected = {"qwen3-235b": 235e9, "deepseek-v3": 685e9, "kimi-k2": 1.027e12}[name]
    assert parameters == pytest.approx(expected, rel=0.005)


_TO_64 = {
    "model": "kimi-k2",
    "from": "tp=2,etp=2,pp=4,first=16,ep=64,expert_etp=4,dp=64",
    "engines": "64",
    "replicas": "256",
    "most_seconds": "5",
    "most_worker": "500MB",
}
FLEETS = {
    "deepseek-v3": {
        "model": "deepseek-v3",
        "from": "tp=2,etp=2,pp=4,first=16,ep=32,expert_etp=2,dp=16",
        "to": "tp=8,dp=32,ep=256",
        "engines": "1",
        "replicas": "1",
        "most_seconds": "2",
        "most_worker": "20MB",
    },
    "kimi-k2": {**_TO_64, "to": "tp=8,ep=8"},
    "kimi-k2-cut": {**_TO_64, "to": "tp=8", "requests": "8"},
}
"""By report: DeepSeek-V3 on 256 ranks to 256; a model of 1T parameters on 1024 to 64 engines, and to 256 in waves, with
whole experts and with experts cut over the workers of an engine."""


@pytest.mark.parametrize("name", FLEETS)
def test_page_has_what_the_reports_say(name: str) -> None:
    page = (ROOT / "docs" / "refit.md").read_text()
    report = json.loads((ROOT / "docs" / "performance" / f"refit-simulate-{name}.json").read_text())
    fleet = FLEETS[name]
    assert report["model"] == fleet["model"]
    assert (report["trainer"]["axes"], report["engine"]["axes"]) == (fleet["from"], fleet["to"])
    assert (report["engine"]["engines"], report["fan_out"]["replicas"]) == (
        int(fleet["engines"]),
        int(fleet["replicas"]),
    )
    found = {target["name"]: target["found"] for target in report["targets"]}
    assert all(target["met"] for target in report["targets"])
    for what, text in (
        ("seconds of a worker", f"{found['seconds of a worker']:.2f} s"),
        ("seconds of the registry", f"{found['seconds of the registry']:.2f} s"),
        ("busiest source", f"{found['busiest source']:.3f}"),
    ):
        assert re.search(rf"^. {what}.* {re.escape(text)}\b", page, re.MULTILINE), (what, text)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FLEETS)
def test_large_fleets_meet_their_targets(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Seconds are those of an idle machine, and the committed reports keep to them. A shared one may be half as fast.
    fleet = FLEETS[name] | {"most_seconds": str(3 * int(FLEETS[name]["most_seconds"]))}
    assert main(arguments(tmp_path, **fleet, most_registry="2GB")) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_four_layers_of_a_large_fleet_meet_its_targets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As large as the fleets above, but for the 57 layers more, which take minutes: 1024 ranks, 64 engines of TP 8."""
    fleet, model = FLEETS["kimi-k2"], {**MODELS["kimi-k2"], "num_hidden_layers": 4}
    few = {"model": str(tmp_path), "from": fleet["from"].replace("first=16,", ""), "requests": "16"}
    call = arguments(tmp_path, **fleet | few | {"most_worker": "1MB"})
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert main(call) == 0, capsys.readouterr()
    found = json.loads((tmp_path / "found.json").read_text())
    assert sum(kind["count"] for kind in found["kinds"]) == 1024 + 64 * 8
    assert len([name for wave in found["fan_out"]["waves"] for name in wave["committed"]]) == 256
