"""Reads from a Hugging Face ``config.json`` alone what decides which tensors a model has, and how large they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.source.family import ModelFamily
from megatron_patches.refit.source.llama import LlamaFamily
from megatron_patches.refit.source.qwen2 import Qwen2Family
from megatron_patches.refit.source.qwen3 import Qwen3Family
from megatron_patches.refit.source.qwen3_moe import Qwen3MoeFamily
from megatron_patches.refit.source.traits import ModelTraits

FAMILIES: Mapping[str, Callable[[ModelTraits], ModelFamily]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaFamily,
        "Qwen2ForCausalLM": Qwen2Family,
        "Qwen3ForCausalLM": Qwen3Family,
        "Qwen3MoeForCausalLM": Qwen3MoeFamily,
    }
)
"""The architectures that a plan can be made for, by their class in ``transformers``."""


def read_config(path: Path) -> Mapping[str, object]:
    """The content of a ``config.json``.

    Args:
        path: the file, or the directory of a checkpoint.

    Raises:
        UnsupportedModelError: if it is no such file.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise UnsupportedModelError(f"{file} is not the configuration of a model")
    return content


def family_from_config(config: Mapping[str, object]) -> ModelFamily:
    """The family, with its traits.

    Rotary scaling other than none is not read: it has no bearing on any tensor of the checkpoint.

    Raises:
        UnsupportedModelError: if the architecture is unknown, a field is missing, or layers differ in kind.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "not given"
    if name not in FAMILIES:
        raise UnsupportedModelError(f"the architecture is {name}; known are {', '.join(FAMILIES)}")
    return FAMILIES[name](_traits(name, config))


def dtype_of(config: Mapping[str, object]) -> str:
    """Element type of the weights: ``torch_dtype``, which later releases of transformers call ``dtype``.

    Raises:
        UnsupportedModelError: if the configuration has neither.
    """
    value = config.get("torch_dtype") or config.get("dtype")
    if not isinstance(value, str):
        raise UnsupportedModelError("the configuration has neither torch_dtype nor dtype")
    return value


def _traits(architecture: str, config: Mapping[str, object]) -> ModelTraits:
    experts = architecture == "Qwen3MoeForCausalLM"
    if experts:
        _check_all_sparse(config)
    heads, hidden = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    qwen2 = architecture == "Qwen2ForCausalLM"
    attention_bias = bool(config.get("attention_bias", False))
    llama = architecture == "LlamaForCausalLM"
    mlp_bias = llama and bool(config.get("mlp_bias", False))
    if attention_bias != mlp_bias:
        raise UnsupportedModelError(
            f"attention_bias is {attention_bias} and mlp_bias is {mlp_bias}: Megatron has a bias on all linear layers "
            "of a layer, on none, or on query, key and value alone"
        )
    return ModelTraits(
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=hidden,
        ffn_hidden_size=_integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim", hidden // heads),
        vocab_size=_integer(config, "vocab_size"),
        max_positions=_integer(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or qwen2,
        linear_bias=mlp_bias,
        qk_norm=architecture.startswith("Qwen3"),
        num_experts=_integer(config, "num_experts") if experts else 0,
        experts_per_token=_integer(config, "num_experts_per_tok") if experts else 0,
        moe_ffn_hidden_size=_integer(config, "moe_intermediate_size") if experts else 0,
        norm_topk_prob=bool(config.get("norm_topk_prob", False)) if experts else True,  # False is transformers' own
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_base=_number(config, "rope_theta", 10000.0),
    )


def _check_all_sparse(config: Mapping[str, object]) -> None:
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers"):
        raise UnsupportedModelError(
            f"decoder_sparse_step is {config.get('decoder_sparse_step')} and mlp_only_layers is "
            f"{config.get('mlp_only_layers')}; only models with experts in every layer are known"
        )


def _integer(config: Mapping[str, object], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"{name} is {value} in the configuration; it must be a positive integer")
    return value


def _number(config: Mapping[str, object], name: str, default: float) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float):
        raise UnsupportedModelError(f"{name} is {value} in the configuration; it must be a number")
    return float(value)
