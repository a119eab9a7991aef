"""What lets Megatron run without CUDA: stand-ins that are always done, and nothing at all where CUDA is there."""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Mapping
from types import MappingProxyType

import pytest
import torch

from megatron_patches import cpu
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.cpu import arguments, torch_cuda
from megatron_patches.registry import PatchRecord

RECORDS = {record.target: record for record in cpu.records()}


def replaced(target: str, original: object) -> object:
    """What takes the place of ``original``."""
    return RECORDS[target].replace(original)


def test_every_record_says_why() -> None:
    assert all(isinstance(record, PatchRecord) and record.reason for record in RECORDS.values())
    assert len(RECORDS) == len(cpu.records())


def test_streams_and_events_are_always_done() -> None:
    stream, event = torch_cuda.CpuStream(priority=-1), torch_cuda.CpuEvent(enable_timing=True)
    with stream as entered:
        assert entered is stream
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), torch_cuda.CpuEvent)
    stream.wait_event(event)
    stream.wait_stream(stream)
    event.record(stream)
    event.wait(stream)
    assert stream.query()
    assert event.query()
    assert event.elapsed_time(torch_cuda.CpuEvent()) == 0.0


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_tensors_asked_for_on_cuda_are_made_on_the_cpu(device: object) -> None:
    zeros = RECORDS["torch:zeros"].replace(torch.zeros)
    assert zeros(3, dtype=torch.int16, device=device).tolist() == [0, 0, 0]
    assert zeros(3, device=device).device == torch.device("cpu")
    assert zeros(2, device="meta").device.type == "meta"


def test_type_names_are_those_that_megatrons_optimizers_know() -> None:
    name = RECORDS["torch:Tensor.type"].replace(torch.Tensor.type)
    assert name(torch.randn(2)) == "torch.cuda.FloatTensor"
    assert name(torch.randn(2, dtype=torch.bfloat16)) == "torch.cuda.BFloat16Tensor"
    assert name(torch.tensor([1.5]), torch.int64).tolist() == [1]

    class Weight(torch.nn.Parameter):
        pass

    assert name(Weight(torch.randn(2))) == "torch.cuda.FloatTensor"


def test_random_state_is_that_of_the_cpu() -> None:
    get_state = RECORDS["torch.cuda:get_rng_state"].replace(None)
    set_state = RECORDS["torch.cuda:set_rng_state"].replace(None)
    seed = RECORDS["torch.cuda:manual_seed"].replace(None)
    before = torch.get_rng_state()
    try:
        seed(77)
        state = get_state("cuda")
        first = torch.randn(3)
        set_state(state, device="cuda")
        assert torch.equal(torch.randn(3), first)
        torch.manual_seed(77)
        assert torch.equal(torch.randn(3), first)
    finally:
        torch.set_rng_state(before)


def test_norms_are_marked_for_sequence_parallelism() -> None:
    def norm(_cls: type, config: argparse.Namespace) -> torch.nn.Module:
        assert not config.sequence_parallel
        return torch.nn.LayerNorm(4)

    build = RECORDS["megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"].replace(norm)
    config = argparse.Namespace(sequence_parallel=True)
    built = build(object, config)
    assert [getattr(parameter, "sequence_parallel", False) for parameter in built.parameters()] == [True, True]
    assert config.sequence_parallel
    plain = build(object, argparse.Namespace(sequence_parallel=False))
    assert [getattr(parameter, "sequence_parallel", False) for parameter in plain.parameters()] == [False, False]


@pytest.mark.parametrize(
    "name", ["reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"]
)
def test_what_one_rank_computed_is_not_reduced(name: str) -> None:
    def negated(tensor: torch.Tensor, _group: object, *, use_global_buffer: bool = False) -> torch.Tensor:
        return -tensor - int(use_global_buffer)

    reduce = RECORDS[f"megatron.core.tensor_parallel.mappings:{name}"].replace(negated)
    tensor = torch.randn(2)
    one, two = (types.SimpleNamespace(size=lambda size=size: size) for size in (1, 2))
    assert reduce(tensor, group=one) is tensor
    assert torch.equal(reduce(tensor, group=two), -tensor)
    assert torch.equal(reduce(tensor, use_global_buffer=True), -tensor - 1)


@pytest.fixture
def required(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    values: dict[str, object] = {"distributed_backend": "gloo", "num_workers": 0}
    monkeypatch.setattr(arguments, "required_arguments", lambda: values)
    return values


def test_settings_that_change_are_logged_on_the_first_rank(
    required: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        args = argparse.Namespace(rank=rank, distributed_backend="nccl", num_workers=0)
        cpu.set_required_arguments(args)
        assert {name: getattr(args, name) for name in required} == required
    assert [record.getMessage() for record in caplog.records] == [
        "no CUDA device: running on CPU with distributed_backend=gloo"
    ]


def test_warnings_of_what_only_gpus_have_are_silenced_also_in_spawned_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "warnoptions", [])
    inapplicable = (
        "Apex is not installed. Falling back to Torch Norm",
        (
            "Only transformer-engine>=1.7.0 supports MoE "
            "experts, but your version is 0.0.0. Use local linear implementation instead."
        ),
    )

    def shown() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if sys.warnoptions:  # a spawned process has them as -W options
                warnings._processoptions(sys.warnoptions)  # type: ignore[attr-defined]
            else:
                cpu.silence_inapplicable_warnings()
            for text in (*inapplicable, "loss is nan"):
                warnings.warn(text, stacklevel=1)
        return [str(warning.message) for warning in seen]

    assert shown() == ["loss is nan"]
    assert len(sys.warnoptions) > 1
    assert shown() == ["loss is nan"]


def test_the_random_state_warning_is_dropped(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", [])
    tracker = logging.getLogger("megatron.core.tensor_parallel.random")
    before = list(tracker.filters)
    try:
        with warnings.catch_warnings():
            cpu.silence_inapplicable_warnings()
        tracker.warning("CPU RNG state changed within GPU RNG context")
        tracker.warning("something else")
        assert [record.getMessage() for record in caplog.records] == ["something else"]
    finally:
        tracker.filters[:] = before


def test_environment_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    cpu.prepare_environment()
    assert (os.environ["TORCH_COMPILE_DISABLE"], os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("0", "1")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(("disabled", "runs_as_it_is"), [("1", True), ("0", False)])
def test_nothing_is_compiled_unless_the_user_says_so(
    monkeypatch: pytest.MonkeyPatch, disabled: str, runs_as_it_is: bool
) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", disabled)
    asked: list[dict[str, object]] = []

    def compile_function(model: object = None, **options: object) -> str:
        asked.append({"model": model, **options})
        return "compiled"

    (record,) = [record for record in cpu.records() if record.target == "torch:compile"]
    replacement = record.replace(compile_function)
    assert replacement(round) == (round if runs_as_it_is else "compiled")
    decorated = replacement(dynamic=True)
    assert (decorated(round) is round) if runs_as_it_is else (decorated == "compiled")
    assert asked == ([] if runs_as_it_is else [{"model": round}, {"model": None, "dynamic": True}])


def test_nothing_is_needed_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.needed()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cpu.needed()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm"),
        ({"use_precision_aware_optimizer": True}, "--use-precision-aware-optimizer"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
        ({"recompute_modules": ["mlp", "layernorm"]}, "--recompute-modules layernorm"),
        ({"recompute_modules": ["mla_up_proj", "layernorm"]}, "--recompute-modules layernorm mla_up_proj"),
        ({"hybrid_layer_pattern": "ME*-"}, "--hybrid-layer-pattern"),
        ({"hybrid_layer_pattern": "ME*-", "spec": ["megatron.core.models", "stack"]}, "--hybrid-layer-pattern"),
    ],
)
def test_what_needs_layers_of_transformer_engine_is_refused(settings: dict[str, object], flag: str) -> None:
    plain = {
        "context_parallel_size": 1,
        "moe_grouped_gemm": False,
        "use_precision_aware_optimizer": False,
        "fp32_residual_connection": False,
        "layernorm_zero_centered_gamma": False,
        "recompute_modules": None,
        "hybrid_layer_pattern": None,
        "spec": None,
    }
    cpu.check_layers(argparse.Namespace(**plain, transformer_impl="local"))
    cpu.check_layers(argparse.Namespace(**plain | {"recompute_modules": ["core_attn"]}, transformer_impl="local"))
    cpu.check_layers(argparse.Namespace(**plain | settings, transformer_impl="transformer_engine"))
    own_layers = {"hybrid_layer_pattern": "ME*-", "layernorm_zero_centered_gamma": True, "spec": ["my.layers", "stack"]}
    cpu.check_layers(argparse.Namespace(**plain | own_layers, transformer_impl="local"))
    with pytest.raises(UnsupportedConfigurationError, match=f"^{flag} needs Transformer Engine's kernels, and with"):
        cpu.check_layers(argparse.Namespace(**plain | settings, transformer_impl="local"))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"), ({"async_save": True}, "--async-save")],
)
def test_what_needs_cuda_is_refused(settings: dict[str, object], flag: str) -> None:
    plain = {"cuda_graph_impl": "none", "async_save": False, "etp_transport": "auto"}
    cpu.check(argparse.Namespace(**plain))
    with pytest.raises(UnsupportedConfigurationError, match=f"^{flag} needs CUDA, which this machine does not have"):
        cpu.check(argparse.Namespace(**plain | settings))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
@pytest.mark.parametrize("variable", ["0", "1"])
def test_cuda_stays_away_however_torch_looks_for_it(variable: str) -> None:
    """Megatron is told of one device; torch may take the number of devices for an answer."""
    code = "import torch, megatron_patches; megatron_patches.apply(); print(torch.cuda.is_available())"
    assert printed(code, {"PYTORCH_NVML_BASED_CUDA_CHECK": variable}) == "False"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_megatron_is_imported_without_the_compiler() -> None:
    code = "import sys, megatron_patches; megatron_patches.apply(); import megatron.training.training"
    assert printed(f"{code}; print({{'torch._dynamo', 'torch._inductor'}} & sys.modules.keys())") == "set()"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_a_device_context_still_holds_for_every_factory() -> None:
    """Libraries build models on the meta device, and take whatever is not there for computed already."""
    code = (
        "import torch, megatron_patches\n"
        "megatron_patches.apply()\n"
        "with torch.device('meta'):\n"
        "    one = torch.ones(2)\n"
        f"    made = [getattr(torch, name)(2) for name in {[*NOT_LIKE]}] + [torch.full((2,), 1.0)]\n"
        "    made += [getattr(torch, name)(one) for name in ('zeros_like', 'ones_like', 'empty_like')]\n"
        "print({tensor.device.type for tensor in made})"
    )
    assert printed(code) == "{'meta'}"


NOT_LIKE = ("tensor", "zeros", "ones", "empty", "arange", "rand", "randn")


def printed(code: str, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """The last line that a Python of its own prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | variables | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
