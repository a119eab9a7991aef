"""Engines that new weights would reach in part, or not at all, are refused by the option that makes them so."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import vllm
from vllm.config import ECTransferConfig, KVTransferConfig, VllmConfig
from vllm.config.quantization import QuantizationConfigArgs
from vllm.device_allocator import AllocationData
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

from megatron_patches.refit.errors import (
    ModelMismatchError,
    RefitError,
    TransferError,
    UnmappedParameterError,
    UnsupportedEngineError,
)
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.vllm.engine_refusals import (
    check_all_loaded,
    check_awake,
    check_derivations,
    check_options,
)
from megatron_patches.refit.vllm.quantized import check_scale_values, check_scales, check_weight_values

VLLM = vllm.__version__.partition("+")[0]
OF_SOME_RELEASES = {
    "cache_config.calculate_kv_scales": ("0.26.0",),
    "load_config.load_format": ("0.32.0", "0.33.0"),
    "parallel_config.dcp_q_replicate": ("0.32.0", "0.33.0"),
    "kernel_config.monokernel": ("0.33.0",),
}
"""Options that others do not have."""


def online(linear: str, moe: str = "") -> OnlineQuantizationConfig:
    """As of ``--quantization``, with another way for experts."""
    return OnlineQuantizationConfig(QuantizationConfigArgs(linear=linear, moe=moe or linear))


def model_config() -> SimpleNamespace:
    """What refusals read of a model's configuration."""
    return SimpleNamespace(
        word_embeddings_untied_by_checkpoint=False, hf_config=SimpleNamespace(), enable_sleep_mode=False
    )


def test_an_engine_without_options_is_taken() -> None:
    check_options(VllmConfig())


def test_an_engine_in_block_fp8_is_taken() -> None:
    config = VllmConfig()
    object.__setattr__(config, "quant_config", Fp8Config(True, weight_block_size=[128, 128]))
    check_options(config)


@pytest.mark.parametrize("quantization", ["fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"])
@pytest.mark.parametrize("more_workers", [(), ("tensor", "pipeline"), ("data",), ("pipeline",)])
def test_an_engine_that_quantizes_to_fp8_what_it_loads_is_taken(
    quantization: str, more_workers: tuple[str, ...]
) -> None:
    """Since vLLM 0.32, several workers agree on scales of tensors and channels, while they quantize."""
    config = VllmConfig()
    for kind in more_workers:
        object.__setattr__(config.parallel_config, f"{kind}_parallel_size", 2)
    if quantization == "fp8":
        if VLLM != "0.26.0":
            pytest.skip("vLLM calls it fp8_per_tensor alone")
        object.__setattr__(config, "quant_config", Fp8Config())
    else:
        object.__setattr__(config, "quant_config", online(quantization))
    if VLLM == "0.26.0" or quantization == "fp8_per_block" or more_workers in ((), ("pipeline",)):
        check_options(config)
    else:
        with pytest.raises(UnsupportedEngineError, match=r"as they are quantized here \(online\)"):
            check_options(config)


@pytest.mark.skipif(VLLM == "0.26.0", reason="it has no such option")
def test_an_engine_that_quantizes_some_layers_is_refused() -> None:
    config = VllmConfig()
    some = OnlineQuantizationConfig(QuantizationConfigArgs(targets={"*.o_proj": "fp8_per_block"}))
    object.__setattr__(config, "quant_config", some)
    with pytest.raises(UnsupportedEngineError, match=r"as they are quantized here \(online\)"):
        check_options(config)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quant_config", Fp8Config(True, weight_block_size=[64, 128]), r"as they are quantized here \(fp8\); start it"),
        ("quant_config", Fp8Config(True), r"as they are quantized here \(fp8\); start it from a configuration without"),
        ("quant_config", Fp8Config(True, "static"), r"as they are quantized here \(fp8\)"),
        ("quant_config", online("mxfp8"), r"as they are quantized here \(online\)"),
        ("quant_config", online("fp8_per_tensor", moe="mxfp8"), r"as they are quantized here \(online\)"),
        ("parallel_config.enable_eplb", True, r"--enable-eplb"),
        ("offload_config.uva.cpu_offload_gb", 1.0, r"--cpu-offload-gb"),
        ("offload_config.prefetch.offload_group_size", 2, r"--offload-group-size"),
        ("cache_config.calculate_kv_scales", True, r"--calculate-kv-scales"),
        ("load_config.load_format", "ipc_cache", r"--load-format ipc_cache"),
        ("parallel_config.dcp_q_replicate", True, r"dcp_q_replicate"),
        ("kernel_config.monokernel", True, r"--monokernel"),
    ],
)
def test_an_option_that_keeps_weights_elsewhere_is_refused(path: str, value: object, message: str) -> None:
    if VLLM not in OF_SOME_RELEASES.get(path, (VLLM,)):
        pytest.skip(f"vLLM {VLLM} does not have it, or does not do that with it")
    config = VllmConfig()
    *parents, name = path.split(".")
    owner: Any = config
    for parent in parents:
        owner = getattr(owner, parent)
    object.__setattr__(owner, name, value)  # past vLLM's own checks, some of which need a GPU
    with pytest.raises(UnsupportedEngineError, match=f"^weights cannot be pushed into this engine: .*{message}"):
        check_options(config)


def keeping(connector: str, more: dict[str, object]) -> VllmConfig:
    """Of an engine with a KV connector."""
    return VllmConfig(
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector, kv_role="kv_both", kv_connector_extra_config={**more}
        )
    )


EXAMPLE, OFFLOADING = (
    {"kv_connector": name, "kv_role": "kv_both"} for name in ("ExampleConnector", "OffloadingConnector")
)
TIERED = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}


@pytest.mark.parametrize(
    ("connector", "more"),
    [
        ("ExampleConnector", {}),
        ("OffloadingConnector", TIERED),
        ("OffloadingConnector", {"spec_name": "Mine", "spec_module_path": "mine"}),
        ("MultiConnector", {"connectors": [OFFLOADING, EXAMPLE]}),
        ("MultiConnector", {"connectors": [{**OFFLOADING, "kv_connector_extra_config": TIERED}]}),
    ],
)
def test_a_connector_that_keeps_entries_of_older_weights_is_refused(connector: str, more: dict[str, object]) -> None:
    message = (
        r"(Example|Offloading)Connector keeps KV cache entries of older weights .*--kv-transfer-config.*; start it"
    )
    with pytest.raises(UnsupportedEngineError, match=f"^weights cannot be pushed into this engine: {message}"):
        check_options(keeping(connector, more))


def test_a_connector_of_encoders_is_refused() -> None:
    connector = ECTransferConfig(ec_connector="ECExampleConnector", ec_role="ec_both")
    check_options(VllmConfig(ec_transfer_config=ECTransferConfig()))
    with pytest.raises(UnsupportedEngineError, match=r"ECExampleConnector keeps what encoders .*--ec-transfer-config"):
        check_options(VllmConfig(ec_transfer_config=connector))


@pytest.mark.parametrize(
    ("connector", "more"),
    [
        ("OffloadingConnector", {}),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec", "secondary_tiers": []}),
        ("MultiConnector", {"connectors": [OFFLOADING, OFFLOADING]}),
        ("DecodeBenchConnector", {}),
    ],
)
def test_a_connector_that_can_be_emptied_or_keeps_nothing_is_taken(connector: str, more: dict[str, object]) -> None:
    check_options(keeping(connector, more))


@pytest.mark.skipif(VLLM == "0.26.0", reason="vLLM 0.26.0 does not do it")
def test_word_embeddings_that_vllm_may_tie_by_itself_are_refused() -> None:
    config = VllmConfig()
    config.model_config = model_config()
    check_options(config)
    config.model_config.word_embeddings_untied_by_checkpoint = True
    with pytest.raises(UnsupportedEngineError, match="set tie_word_embeddings to false there, or remove the lm_head"):
        check_options(config)


@pytest.mark.skipif(VLLM in ("0.26.0", "0.32.0"), reason=f"vLLM {VLLM} has no constant experts")
def test_constant_experts_are_refused() -> None:
    config = VllmConfig()
    config.model_config = model_config()
    check_options(config)
    config.model_config.hf_config.approximate_experts = {"1": []}
    check_options(config)
    config.model_config.hf_config.approximate_experts = {"1": [0, 5]}
    with pytest.raises(UnsupportedEngineError, match=r"some of its experts are constants .*approximate_experts"):
        check_options(config)


@pytest.mark.skipif(VLLM in ("0.26.0", "0.32.0"), reason=f"vLLM {VLLM} has one way to sleep")
def test_other_ways_to_sleep_are_refused() -> None:
    config = VllmConfig()
    config.model_config = model_config()
    config.model_config.sleep_mode_backend = "snapshot"
    check_options(config)
    config.model_config.enable_sleep_mode = True
    with pytest.raises(UnsupportedEngineError, match=r"whether they are asleep \(--sleep-mode-backend snapshot"):
        check_options(config)
    config.model_config.sleep_mode_backend = "cumem"
    check_options(config)


@pytest.mark.skipif(VLLM == "0.26.0", reason="it has no attribute for this")
def test_a_checkpoint_in_block_fp8_that_is_quantized_again_is_refused() -> None:
    config, quantization = VllmConfig(), Fp8Config(True, weight_block_size=[128, 128])
    quantization.online_quantization_config = online("fp8_per_tensor")
    object.__setattr__(config, "quant_config", quantization)
    with pytest.raises(UnsupportedEngineError, match=r"as they are quantized here \(fp8\)"):
        check_options(config)


def test_what_derives_from_weights_by_itself_is_refused() -> None:
    """Attention is not: what it derives is derived anew at a commit."""

    class Packing(nn.Linear):
        def process_weights_after_loading(self) -> None:
            self.packed = self.weight.t()

    class Attentive(Attention):
        def __init__(self) -> None:
            nn.Module.__init__(self)

    model = nn.Module()
    model.head, model.attention = nn.Linear(2, 3), Attentive()
    check_derivations(model)
    model.inner = nn.Sequential(nn.Linear(2, 2), Packing(2, 3))
    with pytest.raises(UnsupportedEngineError, match=r"^inner\.1 \(Packing\) derives something from weights"):
        check_derivations(model)


def test_scales_that_a_kernel_has_for_itself_are_refused() -> None:
    """They would stay those of the weights that the engine was started with."""

    class Method(QuantizeMethodBase):
        def create_weights(self, layer: nn.Module, *weight_args: Any, **extra_weight_attrs: Any) -> None:
            del layer, weight_args, extra_weight_attrs

        def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise NotImplementedError

    model = nn.Module()
    model.experts = nn.Linear(2, 3)
    method = Method()
    object.__setattr__(model.experts, "quant_method", method)
    check_derivations(model)
    scales = model.experts.weight.data
    method.moe_quant_config = SimpleNamespace(w1_scale=scales.view(-1), w2_scale=None)
    check_derivations(model)
    method.moe_quant_config.w2_scale = scales.clone()
    with pytest.raises(
        UnsupportedEngineError, match=r"^experts computes with a w2_scale that is none of its parameters"
    ):
        check_derivations(model)


def test_quantized_weights_need_their_scales() -> None:
    """Of the right type and shape, for every weight; plain weights need none."""
    weight = TensorSpec("model.layers.0.mlp.up_proj.weight", (200, 300), "float8_e4m3fn")
    name = f"{weight.name}_scale_inv"
    check_scales([weight, TensorSpec(name, (2, 3), "float32"), TensorSpec("model.norm.weight", (3,), "bfloat16")])
    with pytest.raises(ModelMismatchError, match=rf"^{weight.name} is float8_e4m3fn, and the trainer has no {name}"):
        check_scales([weight])
    for shape, dtype in (((4, 3), "float32"), ((2, 3), "bfloat16")):
        with pytest.raises(ModelMismatchError, match=rf"^{name} is {dtype} of shape .* for blocks of 128 x 128"):
            check_scales([weight, TensorSpec(name, shape, dtype)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2", "int8", None])
@pytest.mark.parametrize("kind", ["_scale_inv", "_scale", "_scale_2"])
def test_scales_of_weights_that_are_no_blocks_are_refused(dtype: str | None, kind: str) -> None:
    """Some of vLLM's loaders leave out scales that they do not know."""
    weight = "model.layers.0.mlp.up_proj.weight"
    tensors = [TensorSpec("model.layer_scale.weight", (3,), "float32"), TensorSpec(weight + kind, (2, 3), "float32")]
    tensors += [] if dtype is None else [TensorSpec(weight, (200, 300), dtype)]
    what = "missing" if dtype is None else dtype
    with pytest.raises(ModelMismatchError, match=rf"^the trainer has {weight}{kind}, and {weight} is {what}; engines"):
        check_scales(tensors)


@pytest.mark.parametrize("kind", ["_scale", "_scale_2"])
def test_scales_of_another_form_beside_those_of_blocks_are_refused(kind: str) -> None:
    weight = TensorSpec("model.layers.0.mlp.up_proj.weight", (200, 300), "float8_e4m3fn")
    tensors = [weight, *(TensorSpec(weight.name + name, (2, 3), "float32") for name in ("_scale_inv", kind))]
    with pytest.raises(ModelMismatchError, match=rf"^the trainer has {weight.name}{kind}, and {weight.name} is float8"):
        check_scales(tensors)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_that_an_engine_quantizes_must_be_finite(value: float, dtype: torch.dtype) -> None:
    """Those that came: what else is in their memory, or no weight, may be anything."""
    name, kind = "model.layers.0.mlp.up_proj.weight", str(dtype).removeprefix("torch.")
    storages = (Storage("weights", kind, 6, 6), Storage("steps", "int64", 1, 1))
    placements = (
        Placement(Box(name, (4, 0), (6, 2)), View("weights", 0, (2, 2), (3, 1))),
        Placement(Box("steps", (0,), (1,)), View("steps", 0, (1,), (1,))),
    )
    manifest = Manifest(0, "here", storages, placements)
    arrived = {"weights": torch.zeros(6, dtype=dtype), "steps": torch.tensor([7])}
    check_weight_values(manifest, arrived)
    arrived["weights"][[2, 5]] = value
    check_weight_values(manifest, arrived)
    arrived["weights"][4] = value
    with pytest.raises(TransferError, match=rf"^{name}\[4:6, 0:2\] has a weight of {value}; this engine quantizes"):
        check_weight_values(manifest, arrived)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_positive_and_finite(value: float) -> None:
    """Those that came: what else is in their memory, or no scale, may be anything."""
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight_scale_inv" for number in range(2)]
    storages = (Storage("scales", "float32", 12, 12), Storage("norm", "float32", 2, 2))
    placements = (
        *(
            Placement(Box(name, (0, 0), (2, 2)), View("scales", 6 * at, (2, 2), (3, 1)))
            for at, name in enumerate(names)
        ),
        Placement(Box("model.norm.weight", (0,), (2,)), View("norm", 0, (2,), (1,))),
    )
    manifest = Manifest(0, "here", storages, placements)
    arrived = {"scales": torch.full((12,), 0.5), "norm": torch.full((2,), value)}
    arrived["scales"][[2, 5, 8, 11]] = value
    check_scale_values(manifest, arrived)
    arrived["scales"][9] = value
    with pytest.raises(TransferError, match=rf"^{names[1]}\[0:2, 0:2\] has a scale of {value}; it must be positive"):
        check_scale_values(manifest, arrived)


def test_every_parameter_must_come_from_the_trainer() -> None:
    model = nn.Module()
    model.embed, model.head, model.vision = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(2, 2, bias=False)
    model.head.weight = model.embed.weight  # tied
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    loaded = names - {"head.weight"}
    check_all_loaded(model, names, loaded)
    with pytest.raises(UnmappedParameterError, match=r"a parameter vision\.weight that no tensor of the trainer's"):
        check_all_loaded(model, names, loaded - {"vision.weight"})


@pytest.mark.parametrize("tag", ["weights", "kv_cache"])
def test_weights_that_sleep_are_left_alone(tag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an engine whose weights alone have been woken may be replaced."""
    check_awake()
    data = AllocationData((0, 0, 0, 0), tag, torch.empty(0))
    monkeypatch.setattr(CuMemAllocator, "instance", cast(Any, SimpleNamespace(pointer_to_data={1: data})))
    check_awake()
    data.is_asleep = True
    if tag == "weights":
        with pytest.raises(RefitError, match=r"the engine sleeps.*POST /wake_up\?tags=weights"):
            check_awake()
    else:
        check_awake()
