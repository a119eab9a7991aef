"""NemotronH-like hybrids: each layer is a Mamba-2 mixer, attention, a squared-ReLU feed-forward, or experts.

Megatron's hybrid model keeps the five inputs of a Mamba mixer (gate z, x, B, C and the time step) in one weight, each
cut separately by tensor parallelism. The same holds for the convolution over x, B and C. A checkpoint contains them
whole, one after another.

Experts may work on a latent vector instead of the residual stream; then a layer has two projections around them. A
multi-token prediction layer consists of a few layers of these kinds. A checkpoint numbers these on, under a prefix of
their own: the first has what combines the embedding and the hidden state, and the last has the norm at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.models import rules
from megatron_patches.refit.models.config_fields import check_given, count, flag, integer, number
from megatron_patches.refit.models.family import Declaration, ModelFamily
from megatron_patches.refit.models.hf_refusals import (
    activation_name,
    attention_refusals,
    norm_refusals,
    sigmoid_router_refusals,
    vocabulary_refusals,
)
from megatron_patches.refit.models.llama import traits_from_config
from megatron_patches.refit.models.params import TpDim, Weight, alike, attention, feed_forward, mtp_parts
from megatron_patches.refit.models.shard import ParamShard, RowSpan
from megatron_patches.refit.models.traits import (
    MambaTraits,
    ModelTraits,
    RouterTraits,
    common_traits,
    sigmoid_router,
    sigmoid_router_from_config,
)

if TYPE_CHECKING:
    import torch

# Kinds of layers by their letters in Megatron's hybrid patterns, where "|" ends a pipeline stage, and in
# hybrid_override_pattern.
_KINDS: Mapping[str, str] = MappingProxyType({"M": "mamba", "*": "attention", "-": "mlp", "E": "experts"})
# Kinds of layers by their names in layers_block_type, as several releases of transformers spell them.
_KINDS_BY_NAME: Mapping[str, str] = MappingProxyType(
    {
        **_KINDS,
        "mamba": "mamba",
        "attention": "attention",
        "mlp": "mlp",
        "moe": "experts",
        "linear_attention": "mamba",
        "full_attention": "attention",
    }
)
# Constants of megatron.core.ssm.mamba_mixer.MambaMixer; no flag sets them.
_MIXER_KERNEL, _MIXER_NORM_EPS = 4, 1e-5
# Least time step in transformers, whose default is 0.001. Megatron and vLLM have none, and 0 has no logarithm, which
# transformers takes of it to draw initial weights.
_LEAST_TIME_STEP = 1e-30


class NemotronHFamily(ModelFamily):
    """``NemotronHForCausalLM``; traits have the kind of each layer."""

    architecture = "NemotronHForCausalLM"
    final_norm = "decoder.final_norm.weight"
    embedding = "backbone.embeddings.weight"
    norm = "backbone.norm_f.weight"
    feed_forward = "mixer."
    gated = False

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        t, mamba, router = self.traits, self._mamba, self.traits.router or RouterTraits()
        mtp = {"mtp_hybrid_override_pattern": _letters(t.mtp_layer_kinds)} if t.mtp_layers else {}
        return {
            "architectures": [self.architecture],
            "model_type": "nemotron_h",
            "hybrid_override_pattern": _letters(t.layer_kinds),
            "num_nextn_predict_layers": t.mtp_layers,
            **mtp,
            "num_hidden_layers": t.num_layers,
            "hidden_size": t.hidden_size,
            "intermediate_size": t.ffn_hidden_size,
            "num_attention_heads": t.num_heads,
            "num_key_value_heads": t.num_kv_heads,
            "head_dim": t.head_dim,
            "vocab_size": t.vocab_size,
            "max_position_embeddings": t.max_positions,
            "tie_word_embeddings": False,  # neither transformers nor vLLM ties them: a tied model's are written twice
            "layer_norm_epsilon": t.norm_eps,
            "initializer_range": t.init_std,
            "mamba_num_heads": mamba.heads,
            "mamba_head_dim": mamba.head_dim,
            "n_groups": mamba.groups,
            "ssm_state_size": mamba.state,
            "conv_kernel": mamba.kernel,
            "use_conv_bias": True,
            "time_step_min": _LEAST_TIME_STEP,
            "mlp_hidden_act": "relu2",
            "n_routed_experts": t.num_experts or 1,
            "n_shared_experts": 1 if t.shared_ffn_hidden_size else 0,
            "num_experts_per_tok": t.experts_per_token or 1,
            "moe_intermediate_size": t.moe_ffn_hidden_size or 1,
            "moe_latent_size": t.moe_latent_size or None,
            "moe_shared_expert_intermediate_size": t.shared_ffn_hidden_size or 1,
            "norm_topk_prob": t.norm_topk_prob,
            "n_group": router.groups,
            "topk_group": router.groups_per_token,
            "routed_scaling_factor": router.scaling,
        }

    def outer(self) -> Iterator[Weight]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        t, width = self.traits, len(self.traits.mtp_layer_kinds)
        for weight in super().outer():
            more = {"lm_head.weight": weight.shape} if t.tied_embeddings and self.embedding in weight.tensors else {}
            yield replace(weight, tensors={**weight.tensors, **more})
        for index in range(t.mtp_layers):
            first = t.num_layers + index * width
            norm = self.prefix(first + width - 1) + "final_layernorm.weight"
            yield from mtp_parts(index, t.hidden_size, self.prefix(first), norm)

    def prefix(self, layer: int) -> str:
        """Prefix of a layer's tensors; those of multi-token prediction follow the last of the model."""
        index = layer - self.traits.num_layers
        return f"mtp.layers.{index}." if index >= 0 else f"backbone.layers.{layer}."

    def weights(self, layer: int, fused_norms: bool) -> Iterator[Weight]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        t, kind, norm = self.traits, self.traits.all_layer_kinds[layer], "norm.weight"
        if kind == "mamba":
            yield alike("mixer.in_proj.layer_norm_weight" if fused_norms else norm, norm, (t.hidden_size,))
            yield from self._mixer()
        elif kind == "attention":
            yield from attention(t, "mixer.", norm, fused_norms)
        else:
            yield from feed_forward(t, "mixer.", norm, fused_norms, experts=kind == "experts", gated=False)

    def file_refusals(self) -> Iterator[str]:
        """See :class:`megatron_patches.refit.models.family.ModelFamily`."""
        if "experts" in self.traits.layer_kinds and not self.traits.shared_ffn_hidden_size:
            yield (
                "it has no shared experts, and transformers would draw random ones; train with "
                "--moe-shared-expert-intermediate-size"
            )

    def tp_dims(self, fused_norms: bool) -> Iterator[TpDim]:
        """Dimensions that tensor parallelism must divide in a layer, besides heads, experts and feed-forward."""
        yield from super().tp_dims(fused_norms)
        yield "heads of a Mamba mixer", self._mamba.heads
        yield "groups of a Mamba mixer", self._mamba.groups

    def _mixer(self) -> Iterator[Weight]:
        """Weights of a Mamba mixer."""
        mamba, hidden = self._mamba, self.traits.hidden_size
        rows = (mamba.inner, mamba.inner, mamba.grouped, mamba.grouped, mamba.heads)
        inputs, convolved = partial(_blocks, sizes=rows), partial(_blocks, sizes=rows[1:4])
        yield alike("mixer.in_proj.weight", "mixer.in_proj.weight", (sum(rows), hidden), 0, inputs)
        yield alike("mixer.conv1d_weight", "mixer.conv1d.weight", (mamba.convolved, 1, mamba.kernel), 0, convolved)
        yield alike("mixer.conv1d_bias", "mixer.conv1d.bias", (mamba.convolved,), 0, convolved)
        for name in ("dt_bias", "A_log", "D"):
            yield alike("mixer." + name, "mixer." + name, (mamba.heads,), 0)
        yield alike("mixer.norm.weight", "mixer.norm.weight", (mamba.inner,), 0)
        yield alike("mixer.out_proj.weight", "mixer.out_proj.weight", (hidden, mamba.inner), 1)

    @property
    def _mamba(self) -> MambaTraits:
        if self.traits.mamba is None:
            raise ValueError("NemotronH needs the traits of its Mamba layers")
        return self.traits.mamba


def _blocks(shard: ParamShard, tensor: str, sizes: Sequence[int]) -> tuple[RowSpan, ...]:
    """Consecutive blocks of ``sizes`` rows in ``tensor``, each cut separately by tensor parallelism."""
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return rules.segments(shard, [(tensor, start, rows) for start, rows in zip(starts, sizes, strict=True)])


def _letters(kinds: Sequence[str]) -> str:
    """A pattern: one letter per layer."""
    letters = {kind: letter for letter, kind in _KINDS.items()}
    return "".join(letters[kind] for kind in kinds)


def _claims(model: torch.nn.Module) -> bool:
    return bool(getattr(model, "hybrid_layer_pattern", None))


def _patterns(model: torch.nn.Module) -> tuple[str, list[str]]:
    """One letter per layer of the whole model, and the same for each multi-token prediction layer."""
    main, *mtp = str(model.hybrid_layer_pattern).replace("|", "").split("/")
    return main, [pattern for pattern in mtp if pattern]


def _refusals(model: torch.nn.Module, vocab_size: int) -> Iterator[str]:
    import torch

    config: Any = model.config
    main, mtp = _patterns(model)
    pattern = main + "".join(mtp)
    yield from norm_refusals(config)
    yield from vocabulary_refusals(model, vocab_size)
    if any(letter not in _KINDS for letter in pattern):
        shown = "/".join([main, *mtp])
        yield f"its layers are {shown} (--hybrid-layer-pattern), and only {', '.join(_KINDS)} are known"
    if model.position_embedding_type != "none":
        yield f"its positions are {model.position_embedding_type!r}; train with --position-embedding-type none"
    probe = torch.tensor([-1.0, 2.0, 3.0])
    if config.gated_linear_unit or config.activation_func(probe).tolist() != [0.0, 4.0, 9.0]:
        yield f"its feed-forward is not a squared ReLU but {activation_name(config)}; train with --squared-relu"
    if config.qk_layernorm:
        yield "it has norms on query and key (--qk-layernorm)"
    if "M" in pattern and config.layernorm_epsilon != _MIXER_NORM_EPS:
        yield (
            f"its norms have an epsilon of {config.layernorm_epsilon} (--norm-epsilon), and those of Mamba mixers have "
            f"{_MIXER_NORM_EPS}; NemotronH has one for all"
        )
    if "E" in pattern:
        yield from sigmoid_router_refusals(config, latent=True)
    yield from attention_refusals(config)


def _read(model: torch.nn.Module, vocab_size: int) -> NemotronHFamily:
    config: Any = model.config
    main, mtp = _patterns(model)
    experts = "E" in main + "".join(mtp)
    # All MTP patterns are alike. With --mtp-use-repeated-layer, there is one layer, which is applied several times.
    mtp_layers = min(len(mtp), 1) if config.mtp_use_repeated_layer else len(mtp)
    traits = ModelTraits(
        **common_traits(model, vocab_size),
        num_layers=len(main),
        layer_kinds=tuple(_KINDS[letter] for letter in main),
        mtp_layers=mtp_layers,
        mtp_layer_kinds=tuple(_KINDS[letter] for letter in mtp[0]) if mtp else (),
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        num_experts=config.num_moe_experts if experts else 0,
        experts_per_token=config.moe_router_topk if experts else 0,
        moe_ffn_hidden_size=config.moe_ffn_hidden_size if experts else 0,
        moe_latent_size=(config.moe_latent_size or 0) if experts else 0,
        shared_ffn_hidden_size=(config.moe_shared_expert_intermediate_size or 0) if experts else 0,
        router_bias=experts,
        router=sigmoid_router(config) if experts else None,
        mamba=MambaTraits(
            heads=config.mamba_num_heads or 2 * config.hidden_size // config.mamba_head_dim,
            head_dim=config.mamba_head_dim,
            groups=config.mamba_num_groups,
            state=config.mamba_state_dim,
            kernel=_MIXER_KERNEL,
        ),
        norm_topk_prob=config.moe_router_topk > 1 if experts else True,
        rope_base=10000.0,  # it has no rotary positions
    )
    return NemotronHFamily(traits)


def _from_config(config: Mapping[str, object]) -> NemotronHFamily:
    check_given(config, "NemotronHForCausalLM", ("num_key_value_heads",))
    wrong = [name for name in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias") if flag(config, name)]
    if wrong or not flag(config, "use_conv_bias", True):
        raise UnsupportedModelError(
            f"the configuration sets {', '.join(wrong) or 'use_conv_bias to false'}; of NemotronH only "
            "models are known with a bias on the convolution and nowhere else"
        )
    kinds = _kinds(config, "layers_block_type", "hybrid_override_pattern")
    mtp_layers = count(config, "num_nextn_predict_layers")
    mtp_kinds = _kinds(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") if mtp_layers else ()
    if integer(config, "num_hidden_layers", len(kinds)) != len(kinds):
        raise UnsupportedModelError(
            f"num_hidden_layers is {config['num_hidden_layers']} and the configuration names the kinds of {len(kinds)} "
            "layers (layers_block_type or hybrid_override_pattern)"
        )
    experts = "experts" in kinds + mtp_kinds
    traits = replace(
        traits_from_config({**config, "num_hidden_layers": len(kinds)}),
        layer_kinds=kinds,
        mtp_layers=mtp_layers,
        mtp_layer_kinds=mtp_kinds,
        # Published configurations of the first models use the longer name.
        head_dim=integer(config, "head_dim" if "head_dim" in config else "attention_head_dim"),
        num_experts=integer(config, "n_routed_experts") if experts else 0,
        experts_per_token=integer(config, "num_experts_per_tok") if experts else 0,
        moe_ffn_hidden_size=integer(config, "moe_intermediate_size") if experts else 0,
        moe_latent_size=count(config, "moe_latent_size") if experts else 0,
        shared_ffn_hidden_size=_shared_width(config) if experts else 0,
        router_bias=experts,
        router=sigmoid_router_from_config(config) if experts else None,
        mamba=MambaTraits(
            heads=integer(config, "mamba_num_heads"),
            head_dim=integer(config, "mamba_head_dim"),
            groups=integer(config, "n_groups"),
            state=integer(config, "ssm_state_size"),
            kernel=integer(config, "conv_kernel"),
        ),
        norm_topk_prob=flag(config, "norm_topk_prob", True),
        norm_eps=number(config, "layer_norm_epsilon", 1e-5),
        rope_base=10000.0,  # it has no rotary positions
    )
    return NemotronHFamily(traits)


def _kinds(config: Mapping[str, object], names: str, pattern: str) -> tuple[str, ...]:
    """Kinds of layers, from a list of names in one field or a pattern of letters in another."""
    layers = config.get(names) or config.get(pattern)
    if not isinstance(layers, list | str) or any(item not in _KINDS_BY_NAME for item in layers):
        raise UnsupportedModelError(f"{names} or {pattern} is {layers}; known kinds are {', '.join(_KINDS_BY_NAME)}")
    return tuple(_KINDS_BY_NAME[item] for item in layers)


def _shared_width(config: Mapping[str, object]) -> int:
    """Total width of NemotronH's shared experts."""
    shared = count(config, "n_shared_experts")
    return shared * integer(config, "moe_shared_expert_intermediate_size") if shared else 0


FAMILY = Declaration(
    architecture="NemotronHForCausalLM",
    claims=_claims,
    refusals=_refusals,
    read=_read,
    from_config=_from_config,
)
