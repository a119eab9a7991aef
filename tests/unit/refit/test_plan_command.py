"""The commands plan and verify: what they print, that they agree with the planner, and what they refuse."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_patches.refit import progress
from megatron_patches.refit.__main__ import main
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.boxes import TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.offline import TrainerOptions
from megatron_patches.refit.planning.plan import PartOf, Plan, PlanOptions, make_plan
from megatron_patches.refit.simulation.cluster import Cluster, Sides, describe_cluster, engine_mesh, trainer_mesh
from megatron_patches.refit.simulation.oracle import OracleError, verify_in_memory
from megatron_patches.refit.simulation.report import LinkTraffic, traffic_of
from tests.integration.tiny_models import DEEPSEEK_V3
from tests.support.refit_cases import folded

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 4,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
TRAINER, ENGINE = "tp=2,etp=2,pp=2,ep=2,dp=2", "tp=4,ep=4,dp=1"


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def cluster(engine: str = ENGINE) -> Cluster:
    family = family_from_config(CONFIG)
    return describe_cluster(Sides(family=family, trainer=trainer_mesh(TRAINER), engine=engine_mesh(engine)))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_the_numbers_are_the_plans(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    sides = cluster()
    plan = sides.plan(PlanOptions())
    found = printed(capsys, "plan", "--model", model, "--from", TRAINER, "--to", ENGINE)
    assert found["plan_digest"] == plan.digest
    assert found["sent"] == {str(rank): nbytes for rank, nbytes in sorted(plan.bytes_by_source().items())}
    wanted = [place.box.volume for manifest in sides.destinations for place in manifest.placements]
    assert found["bytes"] == 2 * sum(wanted)
    proof = {"verdict": "proved", "elements": sum(wanted), "boxes": len(wanted), "conversions": []}
    assert found["proof"] == proof
    links = found["links"]
    assert isinstance(links, list)
    assert sum(link["nbytes"] for link in links) == found["bytes"]
    assert found["bytes_within_hosts"] == 0


def test_what_the_engine_converts_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hybrid = {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*M",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 4,
        "conv_kernel": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | hybrid))
    arguments = ["plan", "--model", str(tmp_path), "--from", "tp=2,etp=2", "--to", "tp=2"]
    proof = printed(capsys, *arguments)["proof"]
    assert isinstance(proof, dict)
    assert sorted(proof["conversions"]) == [
        f"model.layers.{layer}.mixer.A of destination rank {rank}: bfloat16, to float32, exp, neg"
        for layer in (0, 3)
        for rank in range(2)
    ]
    assert main(arguments) == 0
    assert "4 parameters of engine ranks: bfloat16, to float32, exp, neg" in capsys.readouterr().out
    assert main(["verify", *arguments[1:]]) == 0


def test_parts_add_up_to_the_whole(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan", "--model", model, "--from", TRAINER, "--to", ENGINE)
    whole = printed(capsys, *arguments)
    for flag, ranks in (("--rank", 16), ("--engine-rank", 4)):
        parts = [printed(capsys, *arguments, flag, str(rank)) for rank in range(ranks)]
        assert sum(int(str(part["bytes"])) for part in parts) == whole["bytes"]
    assert printed(capsys, *arguments, "--rank", "3")["part"] == {"side": "source", "rank": 3}


@pytest.mark.parametrize("engine", [ENGINE, "tp=2,dp=2", "tp=4,pp=2", ""])
def test_verify_finds_every_byte_in_its_place(model: str, capsys: pytest.CaptureFixture[str], engine: str) -> None:
    arguments = ("verify", "--model", model, "--from", TRAINER, "--to", engine, "--staging", "1000")
    found = printed(capsys, *arguments)
    comparison, proof = found["comparison"], found["proof"]
    assert isinstance(comparison, dict)
    assert isinstance(proof, dict)
    assert comparison["elements"] == proof["elements"]
    assert 800 < comparison["peak_staged_bytes"] <= 1000
    storages = [storage.numel for manifest in cluster(engine).destinations for storage in manifest.storages]
    assert comparison["elements"] + comparison["untouched"] == sum(storages)


def test_tables(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", model, "--from", TRAINER, "--to", ENGINE]) == 0
    text = capsys.readouterr().out
    for words in (
        "tp=2, etp=2, pp=2, ep=2, dp=2: 16 ranks",
        "tp=4, ep=4: 4 ranks",
        "boxes are each written exactly once",
        "elements equal those of the dense model",
        "bytes by link",
        "the largest 16 of",
    ):
        assert words in text
    assert main(["plan", "--model", model, "--from", TRAINER, "--to", ENGINE, "--rank", "2"]) == 0
    assert "transfers read what is held and go where they are wanted" in capsys.readouterr().out


SPECS = [TensorSpec("a", (4, 6), "bfloat16"), TensorSpec("b", (4, 6), "bfloat16")]


def two_tensors(rank: int, host: str = "") -> Manifest:
    return Manifest(
        rank,
        host,
        tuple(Storage(spec.name, "bfloat16", 26, 24) for spec in SPECS),
        tuple(Placement(spec.box, View(spec.name, 0, (4, 6), (6, 1))) for spec in SPECS),
    )


def test_the_oracle_sees_a_box_that_went_to_the_wrong_place() -> None:
    sources, wanted = [two_tensors(0)], [two_tensors(0)]
    plan = make_plan(SPECS, sources, wanted)
    assert verify_in_memory(plan, sources, wanted).untouched == 4
    first, second = plan.transfers
    crossed = Plan(plan.grids, folded([replace(first, read=second.read), replace(second, read=first.read)]))
    with pytest.raises(OracleError, match=r"destination rank 0 holds 0x.* in element 0 of a \(a\[0:4, 0:6\]\)"):
        verify_in_memory(crossed, sources, wanted)


def test_least_times_follow_the_busiest_rank_and_the_kind_of_link() -> None:
    sources = [two_tensors(0, "x"), two_tensors(1, "y")]
    wanted = [two_tensors(0, "x"), two_tensors(1, "z")]
    plan = make_plan(SPECS, sources, wanted)
    traffic = traffic_of(plan, sources, wanted, within_host=960.0, between_hosts=96.0)
    # Rank 0 serves its neighbour (96 bytes at 960 B/s). The other destination, which has no source on its host, does
    # not know that, and takes as much from either.
    assert traffic.links == (LinkTraffic(0, 0, 96, True), LinkTraffic(0, 1, 48, False), LinkTraffic(1, 1, 48, False))
    assert (traffic.egress_seconds, traffic.ingress_seconds, traffic.least_seconds) == (0.5, 1.0, 1.0)
    assert traffic.bytes_within_hosts == 96
    near = traffic_of(plan, sources, wanted, within_host=9.6, between_hosts=96.0)
    assert near.least_seconds == 10.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"--from": "tp=2,etp"}, r"'etp' is not an axis and its size; write for example tp=2,pp=2 \(tp, etp, pp"),
        ({"--from": "tp=2,cp=2"}, "'cp=2' is not an axis"),
        ({"--from": "tp=2,tp=4"}, "tp is given twice"),
        ({"--from": "tp=0"}, "tp is 0; it must be at least 1"),
        ({"--from": "tp=8"}, r"tp of 8 does not divide attention heads \(4\)"),
        ({"--from": "pp=3"}, r"pp x vpp of 3 does not divide num_layers \(4\)"),
        ({"--from": "pp=2,first=4"}, "4 layers, 4 on the first stage, leave 0 for 1 further stages of pp 2"),
        ({"--from": "pp=2,last=5"}, "4 layers, 5 on the last stage, leave -1 for 1 further stages of pp 2"),
        ({"--from": "dp=1000000"}, "--from has 1000000 ranks; at most 16384 can be planned for"),
        ({"--to": "dp=1000000"}, "--to has 1000000 ranks; at most 16384 can be planned for"),
        ({"--to": "tp=4,ep=3"}, "ep is 3; the engine spreads experts over all tp x dp = 4 ranks"),
        ({"--to": "tp=8"}, r"attention heads \(4\) cannot be cut into 8"),
        ({"--model": "/nowhere/config.json"}, "cannot read /nowhere/config.json: No such file"),
        ({"--ranks-per-host": "0"}, "--ranks-per-host: ranks_per_host is 0"),
        ({"--rank": "16"}, "there is no source rank 16; that side has 16 ranks"),
        ({"--rank": "-1"}, "there is no rank -1"),
    ],
)
def test_mistakes_are_one_line(
    model: str, capsys: pytest.CaptureFixture[str], arguments: dict[str, str], message: str
) -> None:
    given = {"--model": model, "--from": TRAINER, "--to": ENGINE} | arguments
    assert main(["plan", *(word for pair in given.items() for word in pair)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(output.err)


@pytest.mark.parametrize("command", ["plan", "verify", "simulate"])
def test_what_takes_long_is_told_on_standard_error(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setattr(progress, "LateProgress", partial(progress.LateProgress, first_s=0.01, every_s=0.01))
    written = ["--json", str(tmp_path / "found.json"), "--most-over", "9"] if command == "simulate" else ["--json"]
    assert main([command, "--model", model, "--from", TRAINER, "--to", ENGINE, *written]) == 0
    output = capsys.readouterr()
    json.loads((tmp_path / "found.json").read_text() if command == "simulate" else output.out)
    assert output.err.count("\n") > 1
    assert [line for line in output.err.splitlines() if not re.fullmatch(r"[a-z ]+, for [0-9]+ s", line)] == []


def test_packets_hold_an_element(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--model", model, "--from", TRAINER, "--to", ENGINE, "--staging", "4"]) == 1
    assert capsys.readouterr().err == "error: --staging is 4; a packet must hold one element of 8 bytes\n"


def test_layers_of_a_model_that_does_not_fit_into_memory_are_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each kind one, and as many as fit."""
    arguments = ["verify", "--model", str(tmp_path), "--from", "tp=2,etp=2,ep=2", "--to", "tp=2", "--max-memory"]
    latent = DEEPSEEK_V3 | {"first_k_dense_replace": 2, "num_hidden_layers": 12}
    (tmp_path / "config.json").write_text(json.dumps(latent))
    whole = printed(capsys, *arguments, "4GB")["comparison"]
    assert isinstance(whole, dict)
    assert "layers" not in whole
    counts = []
    for most in ("3MB", "6MB"):
        part = printed(capsys, *arguments, most)["comparison"]
        assert isinstance(part, dict)
        assert part["of_layers"] == 12
        assert part["left_out"] == []
        assert 0 < part["elements"] < whole["elements"]
        counts.append(part["layers"])
    assert 2 <= counts[0] < counts[1] < 12
    assert main([*arguments, "6MB"]) == 0
    told = capsys.readouterr().out
    assert f"{counts[1]} of 12 layers fit into --max-memory" in told
    assert "not verified" not in told
    assert main([*arguments, "600KB"]) == 0
    (line,) = (line.split() for line in capsys.readouterr().out.splitlines() if "not verified" in line)
    assert " ".join(line) == "not verified layer 2 and 9 like it, lm_head.weight: allow more --max-memory"
    assert main([*arguments, "1KB"]) == 1
    assert "and --max-memory is 0.001 MB; allow more" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "verify"])
@pytest.mark.parametrize(
    ("changes", "trainer", "message"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, "tp=4", "tp is 4 and the model has 3 KV heads"),
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, "tp=4", "tp is 4 and the model has 6 KV heads"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "tp=2",
            r"its weights are quantized \(quantization_config .*, and not in block FP8",
        ),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            "tp=2",
            r"\bquantization_config \(fp8\): plans are of weights in the type .* in the format fp8_block",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "tp=2", r"rotary positions are scaled by .*'linear'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "tp=2", r"rotary positions are scaled by .*'longrope'"),
        (
            {"use_sliding_window": True, "sliding_window": 4096},
            "tp=2",
            r"its attention has a window \(sliding_window 4096\)",
        ),
        ({"partial_rotary_factor": 0.5}, "tp=2", "it rotates a part of each head"),
        ({"rope_theta": 10000.5}, "tp=2", "Megatron takes whole numbers"),
    ],
)
def test_what_megatron_or_a_live_engine_would_refuse_is_not_proved(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    changes: dict[str, object],
    trainer: str,
    message: str,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    assert main([command, "--model", str(tmp_path), "--from", trainer, "--to", "tp=2"]) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(capsys.readouterr().err)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 12, "num_key_value_heads": 3},
        {"quantization_config": None, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"use_sliding_window": False, "sliding_window": 4096},
    ],
)
def test_what_is_refused_nowhere_is_proved(tmp_path: Path, changes: dict[str, object]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    trainer = "tp=12,etp=2" if "num_key_value_heads" in changes else "tp=2"
    assert main(["plan", "--model", str(tmp_path), "--from", trainer, "--to", "tp=1"]) == 0


def test_a_pattern_of_another_length_than_the_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hybrid = {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "*-", "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | hybrid))
    assert main(["plan", "--model", str(tmp_path), "--from", "", "--to", ""]) == 1
    assert "num_hidden_layers is 4 and the configuration names the kinds of 2 layers" in capsys.readouterr().err


def test_the_trainers_dtype_is_the_engines_and_ranks_are_checked() -> None:
    family = family_from_config(CONFIG)
    kept = TrainerOptions(dtype="float16")
    sides = describe_cluster(Sides(family=family, trainer=trainer_mesh(""), engine=engine_mesh(""), options=kept))
    assert {spec.dtype for spec in sides.tensors} == {"float16"}
    with pytest.raises(UnsupportedModelError, match="there is no destination rank 9"):
        sides.plan(PlanOptions(), PartOf("destination", 9))
