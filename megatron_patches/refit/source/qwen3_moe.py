"""Qwen3-MoE-like models: Qwen3's attention, and a router with gated experts in every layer, none of them shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_patches.refit.source import rules
from megatron_patches.refit.source.experts import expert_pieces, expert_shapes
from megatron_patches.refit.source.llama import Rule
from megatron_patches.refit.source.qwen3 import Qwen3Family
from megatron_patches.refit.source.shard import ParamShard, Piece

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class Qwen3MoeFamily(Qwen3Family):
    """``Qwen3MoeForCausalLM``. The numbers of experts in parameter names are those of the whole model."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""
        return "Qwen3MoeForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            **super().config(),
            "model_type": "qwen3_moe",
            "num_experts": self.traits.num_experts,
            "num_experts_per_tok": self.traits.experts_per_token,
            "moe_intermediate_size": self.traits.moe_ffn_hidden_size,
            "norm_topk_prob": self.traits.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def pieces(self, shard: ParamShard) -> Sequence[Piece]:
        """Which rows of the TP-local weight are which box.

        Raises:
            UnmappedParameterError: if the name is none of such a model's, or its layer or expert does not exist.
        """
        match = _LAYER.fullmatch(shard.name)
        if match is not None and int(match[1]) < self.traits.num_layers:
            prefix = f"model.layers.{match[1]}.mlp.experts."
            found = expert_pieces(shard, match[2], prefix, self.traits.num_experts, gated=True)
            if found is not None:
                return found
        return super().pieces(shard)

    def _mlp_shapes(self) -> Mapping[str, tuple[int, ...]]:
        t = self.traits
        experts = expert_shapes("mlp.experts.", t.num_experts, t.hidden_size, t.moe_ffn_hidden_size, gated=True)
        return {"mlp.gate.weight": (t.num_experts, t.hidden_size), **experts}

    def _layer_rules(self, prefix: str) -> Mapping[str, Rule]:
        dense = super()._layer_rules(prefix)
        router = {"mlp.router.weight": partial(rules.replicated, tensor=prefix + "mlp.gate.weight")}
        return {**{name: rule for name, rule in dense.items() if not name.startswith("mlp.")}, **router}
