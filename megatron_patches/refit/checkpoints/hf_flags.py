"""Megatron's flags of the model of a Hugging Face ``config.json``, and ``refit flags``, which prints them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from megatron_patches.refit.checkpoints.hf_match import plainly_given, rope_scaling, unsupported
from megatron_patches.refit.command import fail
from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.models.config_fields import number
from megatron_patches.refit.models.config_traits import dtype_of, family_from_config, read_config
from megatron_patches.refit.models.family import ModelFamily
from megatron_patches.refit.models.llama import common_config
from megatron_patches.refit.models.traits import ModelTraits
from megatron_patches.refit.models.yarn import yarn_flags

_DTYPE_FLAGS = {"bfloat16": ["--bf16"], "float16": ["--fp16"], "float32": []}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def model_flags(config: Mapping[str, object]) -> list[str]:
    """Megatron's flags of a model: its shape, and what each layer computes.

    Args:
        config: content of ``config.json``.

    Raises:
        UnsupportedModelError: if no Megatron model here computes the same; with each reason.
    """
    family = family_from_config(config)
    reasons = list(unsupported(config))
    own = family.config()
    reasons += [
        f"its {name} is {value!r}, and Megatron's is {own[name]!r}"
        for name, value in plainly_given(config).items()
        if name in own and value != own[name]
    ]
    scaling = rope_scaling(config)
    traits = family.traits
    if scaling is not None and traits.yarn is None and scaling != _llama_scaling(family, scaling):
        reasons.append(f"its rotary positions are scaled by {scaling} (rope_scaling)")
    if not traits.rope_base.is_integer():
        reasons.append(f"its rotary base is {traits.rope_base} (rope_theta), and Megatron takes whole numbers")
    if traits.router is not None and traits.norm_topk_prob != (traits.experts_per_token > 1):
        reasons.append(f"its router has norm_topk_prob {traits.norm_topk_prob}")
    if traits.num_experts and traits.router is None and traits.experts_per_token == 1 and traits.norm_topk_prob:
        reasons.append("its router picks one expert, whose score Megatron does not normalize (norm_topk_prob true)")
    if reasons:
        raise UnsupportedModelError(f"Megatron cannot build this {family.architecture}: {'; '.join(reasons)}")
    flags = [*_shape(family, config), *_attention(traits), *_feed_forward(traits), *_experts(traits)]
    if scaling is not None and traits.yarn is None:
        flags += ["--use-rope-scaling", "--rope-scaling-factor", str(scaling["factor"])]
    return flags


def flags_of(config: Mapping[str, object], directory: Path) -> list[str]:
    """All flags of a checkpoint's model: those of :func:`model_flags`, its vocabulary and the type of its weights.

    Args:
        config: content of ``config.json``.
        directory: the checkpoint's folder. Without a tokenizer in it, tokens are numbers.

    Raises:
        UnsupportedModelError: as :func:`model_flags`.
    """
    return [*model_flags(config), *_vocabulary(config, directory), *_dtype(config)]


def _vocabulary(config: Mapping[str, object], directory: Path) -> list[str]:
    rows = str(family_from_config(config).traits.vocab_size)
    if any((directory / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(directory)]
        return [*tokenizer, "--padded-vocab-size", rows]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", rows, "--make-vocab-size-divisible-by", "1"]


def _dtype(config: Mapping[str, object]) -> list[str]:
    """The flag of the weights' type; none for float32, or if the configuration does not say."""
    if config.get("torch_dtype") is None and config.get("dtype") is None:
        return []
    name = dtype_of(config)
    if name not in _DTYPE_FLAGS:
        raise UnsupportedModelError(f"the weights' type is {name}; Megatron trains in {', '.join(_DTYPE_FLAGS)}")
    return _DTYPE_FLAGS[name]


def _llama_scaling(family: ModelFamily, scaling: Mapping[str, object]) -> object:
    """Llama 3's scaling with the factor of ``scaling``, as the family writes it; None if it has none."""
    factor = scaling.get("factor")
    if "rope_scaling" not in family.config() or family.traits.latent is not None or not isinstance(factor, int | float):
        return None
    return common_config(replace(family.traits, rope_scaling_factor=float(factor)))["rope_scaling"]


def _shape(family: ModelFamily, config: Mapping[str, object]) -> Iterator[str]:
    traits = family.traits
    if traits.layer_kinds:
        patterns = family.config()
        mtp = traits.mtp_layers * f"/{patterns.get('mtp_hybrid_override_pattern')}"
        yield from ("--hybrid-layer-pattern", f"{patterns['hybrid_override_pattern']}{mtp}")
    else:
        yield from ("--num-layers", str(traits.num_layers))
    yield from ("--hidden-size", str(traits.hidden_size), "--ffn-hidden-size", str(traits.ffn_hidden_size))
    yield from ("--max-position-embeddings", str(traits.max_positions))
    yield from ("--normalization", "RMSNorm", "--norm-epsilon", str(traits.norm_eps))
    for name in ("attention_dropout", "hidden_dropout"):  # Megatron's defaults are not 0
        yield from ("--" + name.replace("_", "-"), f"{number(config, name, 0.0):g}")
    if not traits.tied_embeddings:
        yield "--untie-embeddings-and-output-weights"
    if not traits.linear_bias:
        yield "--disable-bias-linear"
    if traits.qkv_bias and not traits.linear_bias:
        yield "--add-qkv-bias"
    if traits.mtp_layers and not traits.layer_kinds:  # a hybrid's pattern says it
        yield from ("--mtp-num-layers", str(traits.mtp_layers))


def _attention(traits: ModelTraits) -> Iterator[str]:
    yield from ("--num-attention-heads", str(traits.num_heads))
    if traits.latent is not None:
        latent = traits.latent
        yield from ("--multi-latent-attention", "--qk-layernorm")
        yield from ("--rope-type", "rope") if traits.yarn is None else yarn_flags(traits.yarn, latent=True)
        if latent.q_rank:
            yield from ("--q-lora-rank", str(latent.q_rank))
        yield from ("--kv-lora-rank", str(latent.kv_rank), "--qk-head-dim", str(latent.nope_dim))
        yield from ("--qk-pos-emb-head-dim", str(latent.rope_dim), "--v-head-dim", str(latent.v_dim))
    else:
        yield from ("--kv-channels", str(traits.head_dim))
        if traits.num_kv_heads != traits.num_heads:
            yield from ("--group-query-attention", "--num-query-groups", str(traits.num_kv_heads))
        if traits.qk_norm:
            yield "--qk-layernorm"
    if traits.layer_kinds:
        yield from ("--position-embedding-type", "none")
        return
    if traits.yarn is None or traits.latent is not None:
        yield from ("--position-embedding-type", "rope")
    else:
        yield from yarn_flags(traits.yarn, latent=False)
    yield from ("--rotary-base", f"{traits.rope_base:.0f}")


def _feed_forward(traits: ModelTraits) -> Iterator[str]:
    yield "--squared-relu" if traits.layer_kinds else "--swiglu"
    if (mamba := traits.mamba) is not None:
        yield from ("--mamba-num-heads", str(mamba.heads), "--mamba-head-dim", str(mamba.head_dim))
        yield from ("--mamba-num-groups", str(mamba.groups), "--mamba-state-dim", str(mamba.state))


def _experts(traits: ModelTraits) -> Iterator[str]:
    if not traits.num_experts:
        return
    yield from ("--num-experts", str(traits.num_experts), "--moe-router-topk", str(traits.experts_per_token))
    yield from ("--moe-ffn-hidden-size", str(traits.moe_ffn_hidden_size))
    if traits.moe_latent_size:
        yield from ("--moe-latent-size", str(traits.moe_latent_size))
    if traits.first_dense_layers:
        dense, routed = traits.first_dense_layers, traits.num_layers - traits.first_dense_layers
        yield from ("--moe-layer-freq", f"[0]*{dense}+[1]*{routed}")
    if traits.shared_ffn_hidden_size:
        yield from ("--moe-shared-expert-intermediate-size", str(traits.shared_ffn_hidden_size))
    if (router := traits.router) is None:
        if not traits.norm_topk_prob:
            yield "--moe-router-pre-softmax"
        return
    yield from ("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias")
    if router.groups > 1:
        yield from ("--moe-router-num-groups", str(router.groups), "--moe-router-group-topk")
        yield str(router.groups_per_token)
    if router.scaling != 1.0:
        yield from ("--moe-router-topk-scaling-factor", str(router.scaling))


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``flags``."""
    flags = commands.add_parser(
        "flags",
        help="print Megatron's flags of a Hugging Face checkpoint's model",
        description="Prints, in one line, the flags with which a Megatron script builds the model of a Hugging Face "
        "checkpoint, so that --load-hf can load it. Parallelism, data and schedule are left to you.",
    )
    flags.add_argument("checkpoint", type=Path, metavar="DIR", help="folder with config.json")


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    checkpoint: Path = options.checkpoint
    try:
        flags = flags_of(read_config(checkpoint), checkpoint if checkpoint.is_dir() else checkpoint.parent)
        if split := [flag for flag in flags if len(flag.split()) != 1]:
            raise UnsupportedModelError(
                f"a shell would split {split[0]!r}; move the checkpoint to a path without spaces"
            )
    except RefitError as error:
        return fail(error, speaks=True, leads=True)
    sys.stdout.write(" ".join(flags) + "\n")  # whatever RANK is: the script of each host may need them
    return 0
