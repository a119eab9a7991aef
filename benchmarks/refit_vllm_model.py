"""The Megatron model whose weights ``benchmarks.refit_vllm`` pushes; it is changed between pushes, but not trained."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.models.shard import placements
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.tools.check_command import log_probabilities


class TrainerModel:
    """One rank's part of a model with random weights, in bfloat16. Expects an initialized default process group.

    Args:
        config: content of ``config.json``.
        mesh: the parallel sizes.
        device: the device of the weights; on GPUs the layers are Transformer Engine's.
        length: longest text, in tokens.

    Attributes:
        module: Megatron's model.
        family: describes the tensors of its Hugging Face checkpoint.
    """

    def __init__(self, config: dict[str, Any], mesh: TrainerMesh, device: torch.device, length: int) -> None:
        self._config, self._mesh, self._device = config, mesh, device
        self._on_gpu = device.type == "cuda"
        self.family = family_from_config(config)
        self.module = self._build(length)
        self._fill()

    def change(self) -> None:
        """Change the weights but not their distribution: rotate the elements of each shard by one."""
        with torch.no_grad():
            for live in describe_model([self.module]):
                numel = live.shard.as_storage().logical_numel
                content = live.memory[:numel]
                content.copy_(content.roll(1))

    def gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every full tensor by name, on every rank. Collective."""
        rank = dist.get_rank()
        held: dict[str, list[tuple[Any, torch.Tensor]]] = {}
        for live in describe_model([self.module]):
            for placement in placements(live.shard, self.family.pieces(live.shard)):
                held.setdefault(placement.box.tensor, []).append(
                    (placement.box, placement.view.tensor(live.memory.detach()))
                )
        boxes: list[Any] = [None] * self._mesh.size
        dist.all_gather_object(boxes, {name: [box for box, _ in found] for name, found in held.items()})
        for name, shape in sorted(self.family.shapes().items()):
            full = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            done = set()
            for owner, theirs in enumerate(boxes):
                for index, box in enumerate(theirs.get(name, ())):
                    if box in done:
                        continue
                    done.add(box)
                    region = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
                    piece = torch.empty(box.shape, dtype=torch.bfloat16, device=self._device)
                    if owner == rank:
                        piece.copy_(held[name][index][1])
                    if self._mesh.size > 1:
                        dist.broadcast(piece, owner)
                    full[region] = piece
            yield name, full

    def log_probs(self, texts: Sequence[Sequence[int]], prompt: int) -> torch.Tensor:
        """Log-probabilities of the tokens after the first ``prompt`` ones.

        Args:
            texts: token ids, ``[texts, length]``.
            prompt: tokens at the start of each text that are not scored.

        Returns:
            ``[texts, length - prompt]``, float64 on the host.
        """
        found = log_probabilities([self.module], torch.tensor(texts))
        every: list[torch.Tensor | None] = [None] * self._mesh.size
        dist.all_gather_object(every, found)  # only the last pipeline stage knows them
        return next(scores for scores in every if scores is not None)[:, prompt - 1 :].double()

    def _build(self, length: int) -> Any:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel

        self._initialize_groups()
        traits = self.family.traits
        model = GPTModel(
            self._transformer_config(),
            self._layer_spec(),
            traits.vocab_size,
            length,
            position_embedding_type="rope",
            rotary_base=int(traits.rope_base),
            share_embeddings_and_output_weights=traits.tied_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        return model.to(self._device).bfloat16().eval().requires_grad_(False)

    def _initialize_groups(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self._mesh.tp,
            pipeline_model_parallel_size=self._mesh.pp,
            gtp_remat_size=self._mesh.etp,
            expert_model_parallel_size=self._mesh.ep,
            expert_tensor_parallel_size=self._mesh.expert_tp,
            expert_gtp_remat_size=self._mesh.expert_etp,
            create_gloo_process_groups=not self._on_gpu,
        )
        model_parallel_cuda_manual_seed(1)

    def _transformer_config(self) -> Any:
        from megatron.core.transformer.transformer_config import TransformerConfig

        traits = self.family.traits
        return TransformerConfig(
            num_layers=traits.num_layers,
            hidden_size=traits.hidden_size,
            ffn_hidden_size=traits.ffn_hidden_size,
            num_attention_heads=traits.num_heads,
            num_query_groups=traits.num_kv_heads,
            kv_channels=traits.head_dim,
            normalization="RMSNorm",
            layernorm_epsilon=traits.norm_eps,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            qk_layernorm=traits.qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            use_cpu_initialization=not self._on_gpu,
            perform_initialization=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=self._mesh.tp,
            pipeline_model_parallel_size=self._mesh.pp,
            expert_model_parallel_size=self._mesh.ep,
            expert_tensor_parallel_size=self._mesh.expert_tp,
            gtp_weight_remat_size=self._mesh.etp,
            **self._expert_settings(),
        )

    def _expert_settings(self) -> dict[str, Any]:
        traits = self.family.traits
        if not traits.num_experts:
            return {}
        return {
            "num_moe_experts": traits.num_experts,
            "moe_router_topk": int(self._config["num_experts_per_tok"]),
            "moe_ffn_hidden_size": int(self._config["moe_intermediate_size"]),
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            # A softmax after the top-k choice makes the chosen experts' scores add up to one; before it, it does not.
            "moe_router_pre_softmax": not traits.norm_topk_prob,
            "moe_grouped_gemm": self._on_gpu,
        }

    def _layer_spec(self) -> Any:
        from megatron.core.models.gpt.gpt_layer_specs import (
            get_gpt_layer_local_spec,
            get_gpt_layer_with_transformer_engine_spec,
        )

        traits = self.family.traits
        experts = traits.num_experts or None
        if self._on_gpu:
            return get_gpt_layer_with_transformer_engine_spec(
                num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=traits.qk_norm
            )
        return get_gpt_layer_local_spec(
            normalization="RMSNorm", num_experts=experts, moe_grouped_gemm=False, qk_layernorm=traits.qk_norm
        )

    def _fill(self) -> None:
        """Fill with random weights, the same on all ranks that hold the same box."""
        shapes = self.family.shapes()
        for live in describe_model([self.module]):
            live.memory.zero_()
            for placement in placements(live.shard, self.family.pieces(live.shard)):
                box, shape = placement.box, shapes[placement.box.tensor]
                generator = torch.Generator(device=self._device).manual_seed(zlib.crc32(str(box).encode()))
                values = torch.randn(box.shape, generator=generator, device=self._device, dtype=torch.bfloat16)
                where = placement.view.tensor(live.memory.detach())
                where.copy_(1 + values / 8 if box.tensor.endswith("norm.weight") else values / math.sqrt(shape[-1]))
