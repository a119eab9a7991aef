"""Scales of KV caches reach the attention layers that have them, once each, or are refused by name."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from megatron_patches.refit.control.kv_scales import KVScales, scale_values
from megatron_patches.refit.errors import ModelMismatchError, UnsupportedEngineError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

from vllm.config import VllmConfig
from vllm.device_allocator.cumem import CuMemAllocator
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.quantization.fp8 import Fp8Config, Fp8KVCacheMethod
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImplBase

from megatron_patches.refit.vllm.kv_scales import with_kv_scales
from megatron_patches.refit.vllm.reload import Replacement

ONE = KVScales(k_scale=0.5, v_scale=0.25)
NOTHING = Manifest(1, "here", (), ())


class Backend(AttentionImplBase[Any]):
    """A backend that derives nothing from weights."""


class Layer(Attention):
    """vLLM's attention with what concerns scales alone."""

    def __init__(self, number: int, dtype: str = "fp8", backend: str = "FLASH_ATTN", heads: int = 0) -> None:
        nn.Module.__init__(self)
        self.layer_name, self.kv_cache_dtype = f"model.layers.{number}.self_attn.attn", dtype
        self.attn_backend = cast(Any, SimpleNamespace(get_name=lambda: backend))
        self.impl, self.quant_config, self.calculate_kv_scales = cast(Any, Backend()), None, False
        for kind in ("q", "k", "v", "prob"):
            self.register_buffer(f"_{kind}_scale", torch.ones(heads) if heads else torch.tensor(1.0))
            setattr(self, f"_{kind}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)

    def scales(self) -> list[tuple[float, float]]:
        """Of queries, keys and values: the buffer, and the number that follows it."""
        assert (self._k_scale_cpu, self._v_scale_cpu) == (self._k_scale, self._v_scale)
        return [(float(getattr(self, f"_{kind}_scale")), getattr(self, f"_{kind}_scale_float")) for kind in "qkv"]


class Latent(MLAAttention):
    """Multi-latent attention, likewise."""

    def __init__(self, backend: str) -> None:
        nn.Module.__init__(self)
        self.layer_name, self.kv_cache_dtype = "model.layers.0.self_attn.attn", "fp8"
        self.attn_backend = cast(Any, SimpleNamespace(get_name=lambda: backend))


class Model(nn.Module):
    """Attention layers at the paths that vLLM gives them."""

    def __init__(self, *layers: nn.Module | None) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList()
        for layer in layers:
            if layer is None or isinstance(layer, PPMissingLayer):
                self.model.layers.append(layer or nn.Module())
                continue
            decoder = nn.Module()
            decoder.self_attn = nn.Module()
            decoder.self_attn.attn = layer
            self.model.layers.append(decoder)


def config(dtype: str = "fp8") -> VllmConfig:
    return cast(VllmConfig, SimpleNamespace(cache_config=SimpleNamespace(cache_dtype=dtype)))


def wanted(model: nn.Module, *layers: int | str, dtype: str = "fp8") -> Manifest:
    """What a worker wants if a trainer gives scales of these layers."""
    names = scale_values(dict.fromkeys(layers, ONE))
    return with_kv_scales(NOTHING, model, config(dtype), [TensorSpec(name, (1,), "float32") for name in names])


def where(manifest: Manifest) -> dict[str, str]:
    """The buffer of each scale."""
    return {placement.box.tensor: placement.view.storage for placement in manifest.placements}


def test_without_scales_an_engine_wants_what_it_wanted() -> None:
    weight = TensorSpec("model.norm.weight", (4,), "float32")
    assert with_kv_scales(NOTHING, Model(Layer(0, dtype="auto")), config(), [weight]) is NOTHING


def test_scales_go_to_the_layers_that_they_name() -> None:
    found = where(wanted(Model(Layer(0), None, Layer(2)), "model.layers.0.self_attn", 2))
    path = "model.layers.{}.self_attn.attn._{}_scale"
    assert found == {
        "kv_scales/model.layers.0.self_attn/k_scale": path.format(0, "k"),
        "kv_scales/model.layers.0.self_attn/v_scale": path.format(0, "v"),
        "kv_scales/2/k_scale": path.format(2, "k"),
        "kv_scales/2/v_scale": path.format(2, "v"),
    }


def test_layers_of_other_workers_and_caches_in_other_types_get_none() -> None:
    model = Model(Layer(0), PPMissingLayer(), Layer(2, dtype="auto"))
    assert set(where(wanted(model, 0, "model.layers.1.self_attn", 2))) == {
        "kv_scales/0/k_scale",
        "kv_scales/0/v_scale",
    }


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((0,), "the trainer gives no scales for model.layers.1.self_attn.attn, whose KV cache is in fp8"),
        ((0, 1, "model.layers.1.self_attn"), "gives scales as 1 and model.layers.1.self_attn for"),
        ((0, 1, 2), "the engine has no attention layer 2; it has model.layers.0.self_attn.attn to model.layers.1"),
        ((0, 1, "model.layers.1.mixer"), "the engine has no attention layer model.layers.1.mixer"),
    ],
)
def test_every_layer_gets_scales_and_every_scale_has_a_layer(layers: tuple[int | str, ...], message: str) -> None:
    with pytest.raises(ModelMismatchError, match=message):
        wanted(Model(Layer(0), Layer(1)), *layers)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Layer(0, "auto"), r"KV cache is not in FP8 \(--kv-cache-dtype auto\); start it with --kv-cache-dtype fp8"),
        (Layer(0, "fp8_per_token_head"), "KV cache is not in FP8"),
        (
            Layer(0, backend="FLASHINFER"),
            "FLASHINFER, which would keep old.*--attention-backend FLASH_ATTN or TRITON_ATTN, or pub",
        ),
        *(
            (Latent(backend), f"with {backend}, which would keep old scales or lose new ones; pub")
            for backend in ("FLASHINFER_MLA", "TOKENSPEED_MLA", "CUTLASS_MLA", "TRITON_MLA", "FLASHMLA")
        ),
        (Layer(0, heads=2), "has scales for each head; pub"),
    ],
)
def test_an_engine_whose_scales_cannot_be_replaced_is_refused(layer: Any, message: str) -> None:
    with pytest.raises(UnsupportedEngineError, match=rf"^kv_scales: .*{message}") as raised:
        wanted(Model(layer), 0, dtype=layer.kv_cache_dtype)
    check_refusal(raised.value)


def check_refusal(error: Exception) -> None:
    """One line, with a way out."""
    assert str(error).endswith("publish without kv_scales")
    assert "\n" not in str(error)


def test_an_engine_that_would_forget_them_asleep_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuMemAllocator, "instance", object())
    with pytest.raises(UnsupportedEngineError, match="wakes up; start it without --enable-sleep-mode, or") as raised:
        wanted(Model(Layer(0)), 0)
    check_refusal(raised.value)


def test_a_gpu_whose_fp8_has_another_range_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda _: True))
    with pytest.raises(UnsupportedEngineError, match="FNUZ") as raised:
        wanted(Model(Layer(0)), 0)
    check_refusal(raised.value)


@pytest.mark.parametrize("in_fp8", [False, True], ids=["trained", "fp8"])
def test_scales_serve_and_come_back_with_their_version(in_fp8: bool) -> None:
    """Also where vLLM has a method that loads scales from a checkpoint."""
    layer = Layer(0)
    if in_fp8:
        method = Fp8KVCacheMethod(Fp8Config(True, weight_block_size=[128, 128]))
        layer.quant_method = method
        method.create_weights(layer)
        for kind, value in (("k", 0.75), ("v", 1.5), ("q", 2.0)):
            getattr(layer, f"{kind}_scale").data.fill_(value)
    model = Model(layer)
    record_metadata_for_reloading(model)
    if in_fp8:
        method.process_weights_after_loading(layer)
    before = layer.scales()
    memory = [buffer.data_ptr() for buffer in layer.buffers()]
    q = before[0]
    for value in (0.5, 0.125):
        staged = {f"model.layers.0.self_attn.attn._{kind}_scale": torch.tensor([value * len(kind)]) for kind in "kv"}
        replacement = Replacement(model, VllmConfig(), staged)
        replacement.begin()
        replacement.build()
        assert layer.scales() == before
        replacement.apply()
        assert layer.scales() == [q, (value, value), (value, value)]
        if value == 0.5:
            replacement.undo()
            assert layer.scales() == before
        else:
            replacement.forget()
    assert [buffer.data_ptr() for buffer in layer.buffers()] == memory
