"""Derives a model's traits, which determine its tensors and their shapes, from a Hugging Face ``config.json`` alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from megatron_patches.refit.dtypes import ITEMSIZE
from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.source.deepseek_v3 import DeepseekV3Family
from megatron_patches.refit.source.family import ModelFamily
from megatron_patches.refit.source.llama import LlamaFamily
from megatron_patches.refit.source.nemotron_h import NemotronHFamily
from megatron_patches.refit.source.qwen2 import Qwen2Family
from megatron_patches.refit.source.qwen3 import Qwen3Family
from megatron_patches.refit.source.qwen3_moe import Qwen3MoeFamily
from megatron_patches.refit.source.traits import LatentTraits, MambaTraits, ModelTraits, RouterTraits

FAMILIES: Mapping[str, Callable[[ModelTraits], ModelFamily]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaFamily,
        "Qwen2ForCausalLM": Qwen2Family,
        "Qwen3ForCausalLM": Qwen3Family,
        "Qwen3MoeForCausalLM": Qwen3MoeFamily,
        "DeepseekV3ForCausalLM": DeepseekV3Family,
        "NemotronHForCausalLM": NemotronHFamily,
    }
)
"""The architectures that a plan can be made for, by their class in ``transformers``."""


_LEFT_OUT: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "Qwen2ForCausalLM": {"num_key_value_heads": 32},
        "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
        "Qwen3MoeForCausalLM": {"num_key_value_heads": 4},
    }
)
"""What transformers takes for a field that is left out, by architecture, where it does not follow from other fields."""

# Fields that shape tensors, where transformers takes the value of one large model: nobody leaves them out on purpose.
_ASKED_FOR: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "DeepseekV3ForCausalLM": ("q_lora_rank", "first_k_dense_replace", "n_shared_experts"),
        "NemotronHForCausalLM": ("num_key_value_heads",),
    }
)
_FLAGS = (
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "use_bias",
    "use_conv_bias",
    "mamba_proj_bias",
)


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
        UnsupportedModelError: if the architecture is unknown, a field is missing or has no sense, or layers differ in
            kind.
    """
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else "not given"
    if name not in FAMILIES:
        raise UnsupportedModelError(f"the architecture is {name}; known are {', '.join(FAMILIES)}")
    _check_fields(name, config)
    if name == "DeepseekV3ForCausalLM":
        traits = _deepseek_traits(config)
    elif name == "NemotronHForCausalLM":
        traits = _nemotron_traits(config)
    else:
        traits = _traits(name, config)
    if traits.num_heads % traits.num_kv_heads:
        raise UnsupportedModelError(
            f"num_key_value_heads is {traits.num_kv_heads} and num_attention_heads is {traits.num_heads} in the "
            "configuration; the first must divide the second"
        )
    return FAMILIES[name](traits)


def dtype_of(config: Mapping[str, object]) -> str:
    """Element type of the weights: ``torch_dtype``, which later releases of transformers call ``dtype``.

    Raises:
        UnsupportedModelError: if the configuration has neither, or what it has names no type, such as "auto".
    """
    value = config.get("torch_dtype") or config.get("dtype")
    if not isinstance(value, str):
        raise UnsupportedModelError("the configuration has neither torch_dtype nor dtype")
    if value not in ITEMSIZE:
        raise UnsupportedModelError(
            f"the weights' type is {value!r} (torch_dtype or dtype); write one of torch's names, such as bfloat16"
        )
    return value


def _check_fields(architecture: str, config: Mapping[str, object]) -> None:
    missing = [field for field in _ASKED_FOR.get(architecture, ()) if field not in config]
    if missing:
        raise UnsupportedModelError(
            f"the configuration of this {architecture} does not say {', '.join(missing)}, for which transformers has "
            "values of its own; write down what the model has"
        )
    for field in _FLAGS:
        if not isinstance(config.get(field), bool | None):
            raise UnsupportedModelError(f"{field} is {config[field]!r} in the configuration; it must be true or false")


def _traits(architecture: str, config: Mapping[str, object]) -> ModelTraits:
    config = {**_LEFT_OUT.get(architecture, {}), **config}
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


def _deepseek_traits(config: Mapping[str, object]) -> ModelTraits:
    if config.get("attention_bias") or config.get("moe_layer_freq", 1) != 1:
        raise UnsupportedModelError(
            f"attention_bias is {config.get('attention_bias')} and moe_layer_freq is {config.get('moe_layer_freq')}; "
            "only models without biases and with experts in every layer but the first are known"
        )
    nope, rope = _integer(config, "qk_nope_head_dim"), _integer(config, "qk_rope_head_dim")
    heads, width = _integer(config, "num_attention_heads"), _integer(config, "moe_intermediate_size")
    return ModelTraits(
        num_layers=_integer(config, "num_hidden_layers"),
        hidden_size=_integer(config, "hidden_size"),
        ffn_hidden_size=_integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=nope + rope,
        vocab_size=_integer(config, "vocab_size"),
        max_positions=_integer(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=False,
        linear_bias=False,
        num_experts=_integer(config, "n_routed_experts"),
        experts_per_token=_integer(config, "num_experts_per_tok"),
        moe_ffn_hidden_size=width,
        first_dense_layers=_count(config, "first_k_dense_replace"),
        shared_ffn_hidden_size=_count(config, "n_shared_experts") * width,
        router_bias=config.get("topk_method", "noaux_tc") == "noaux_tc",  # the only method of transformers' class
        router=RouterTraits(
            groups=_integer(config, "n_group", 1),
            groups_per_token=_integer(config, "topk_group", 1),
            scaling=_number(config, "routed_scaling_factor", 1.0),
        ),
        latent=LatentTraits(
            q_rank=_count(config, "q_lora_rank"),
            kv_rank=_integer(config, "kv_lora_rank"),
            nope_dim=nope,
            rope_dim=rope,
            v_dim=_integer(config, "v_head_dim"),
        ),
        mtp_layers=_count(config, "num_nextn_predict_layers"),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope_base=_number(config, "rope_theta", 10000.0),
    )


# Letters of hybrid_override_pattern, and names in layers_block_type of several releases of transformers.
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "M": "mamba",
        "*": "attention",
        "-": "mlp",
        "E": "experts",
        "mamba": "mamba",
        "attention": "attention",
        "mlp": "mlp",
        "moe": "experts",
        "linear_attention": "mamba",
        "full_attention": "attention",
    }
)


def _nemotron_traits(config: Mapping[str, object]) -> ModelTraits:
    wrong = [name for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias") if config.get(name)]
    wrong += [name for name in ("moe_latent_size", "num_nextn_predict_layers") if config.get(name)]
    if wrong or not config.get("use_conv_bias", True):
        raise UnsupportedModelError(
            f"the configuration sets {', '.join(wrong) or 'use_conv_bias to false'}; of NemotronH only "
            "models are known with a bias on the convolution and nowhere else, without latent experts, and without "
            "layers that predict further tokens"
        )
    layers = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    if not isinstance(layers, list | str) or any(item not in _KINDS for item in layers):
        raise UnsupportedModelError(
            f"layers_block_type or hybrid_override_pattern is {layers}; known kinds are {', '.join(_KINDS)}"
        )
    kinds = tuple(_KINDS[item] for item in layers)
    experts = "experts" in kinds
    heads = _integer(config, "num_attention_heads")
    return ModelTraits(
        num_layers=len(kinds),
        layer_kinds=kinds,
        hidden_size=_integer(config, "hidden_size"),
        ffn_hidden_size=_integer(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=_integer(config, "num_key_value_heads", heads),
        head_dim=_integer(config, "head_dim"),
        vocab_size=_integer(config, "vocab_size"),
        max_positions=_integer(config, "max_position_embeddings"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=False,
        linear_bias=False,
        num_experts=_integer(config, "n_routed_experts") if experts else 0,
        experts_per_token=_integer(config, "num_experts_per_tok") if experts else 0,
        moe_ffn_hidden_size=_integer(config, "moe_intermediate_size") if experts else 0,
        shared_ffn_hidden_size=_shared_width(config) if experts else 0,
        router_bias=experts,
        router=RouterTraits(
            groups=_integer(config, "n_group", 1),
            groups_per_token=_integer(config, "topk_group", 1),
            scaling=_number(config, "routed_scaling_factor", 1.0),
        )
        if experts
        else None,
        mamba=MambaTraits(
            heads=_integer(config, "mamba_num_heads"),
            head_dim=_integer(config, "mamba_head_dim"),
            groups=_integer(config, "n_groups"),
            state=_integer(config, "ssm_state_size"),
            kernel=_integer(config, "conv_kernel"),
        ),
        norm_topk_prob=bool(config.get("norm_topk_prob", True)),
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5),
        rope_base=10000.0,  # it has no rotary positions
    )


def _shared_width(config: Mapping[str, object]) -> int:
    """Width of NemotronH's shared experts, all together."""
    count = _count(config, "n_shared_experts")
    return count * _integer(config, "moe_shared_expert_intermediate_size") if count else 0


def _count(config: Mapping[str, object], name: str) -> int:
    """A number that may be 0, or missing, which counts as 0."""
    value = config.get(name) or 0
    if not isinstance(value, int) or value < 0:
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be 0 or a positive integer")
    return value


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
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be a positive integer")
    return value


def _number(config: Mapping[str, object], name: str, default: float) -> float:
    nested = config.get("rope_parameters")  # where releases of transformers from 5.0 on keep what is rotary
    value = config.get(name, nested.get(name, default) if isinstance(nested, Mapping) else default)
    if not isinstance(value, int | float):
        raise UnsupportedModelError(f"{name} is {value!r} in the configuration; it must be a number")
    return float(value)
