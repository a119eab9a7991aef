"""Qwen3-MoE-like models: Qwen3's attention, and a router with gated experts in every layer, none of them shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from megatron_patches.refit.source import rules
from megatron_patches.refit.source.llama import Rule
from megatron_patches.refit.source.qwen3 import Qwen3Family
from megatron_patches.refit.source.shard import ParamShard, Piece

# One module an expert (SequentialMLP), or one weight an expert in a grouped module (TEGroupedMLP).
_EXPERT = re.compile(
    r"(decoder\.layers\.(\d+)\.mlp\.experts\.)(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))"
)


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
        match = _EXPERT.fullmatch(shard.name)
        if match is None:
            return super().pieces(shard)
        layer, expert = int(match[2]), int(match[3] or match[6])
        if layer >= self.traits.num_layers or expert >= self.traits.num_experts:
            raise self._unmapped(shard)
        prefix = f"model.layers.{layer}.mlp.experts.{expert}."
        if (match[4] or match[5]) == "linear_fc1":
            return rules.gated(shard, prefix + "gate_proj.weight", prefix + "up_proj.weight")
        return rules.row_parallel(shard, prefix + "down_proj.weight")

    def _mlp_shapes(self) -> Mapping[str, tuple[int, ...]]:
        t = self.traits
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (t.num_experts, t.hidden_size)}
        for expert in range(t.num_experts):
            prefix = f"mlp.experts.{expert}."
            shapes[prefix + "gate_proj.weight"] = (t.moe_ffn_hidden_size, t.hidden_size)
            shapes[prefix + "up_proj.weight"] = (t.moe_ffn_hidden_size, t.hidden_size)
            shapes[prefix + "down_proj.weight"] = (t.hidden_size, t.moe_ffn_hidden_size)
        return shapes

    def _layer_rules(self, prefix: str) -> Mapping[str, Rule]:
        dense = super()._layer_rules(prefix)
        router = {"mlp.router.weight": partial(rules.replicated, tensor=prefix + "mlp.gate.weight")}
        return {**{name: rule for name, rule in dense.items() if not name.startswith("mlp.")}, **router}
