"""Small random models of Hugging Face transformers, and a body that trains them sharded beside the unsharded ones."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import etp
from tests.multiproc.oracle import Twins
from tests.support.launch import device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCABULARY, WIDTH, LAYERS = 96, 32, 2
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
STATES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
IMAGE = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
MAMBA_2 = {"n_groups": 2, "chunk_size": 8}


def _tokens(generator: torch.Generator, length: int = 9) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (3, length), generator=generator)


def _text(generator: torch.Generator) -> dict[str, Any]:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _pairs(generator: torch.Generator) -> dict[str, Any]:
    return {"input_ids": _tokens(generator), "labels": _tokens(generator, 7)}


def _images(generator: torch.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator), "labels": torch.tensor([0, 1, 0])}


def _images_and_text(generator: torch.Generator) -> dict[str, Any]:
    images = torch.randn(3, 3, 16, 16, generator=generator)
    return {"input_ids": _tokens(generator), "pixel_values": images, "return_loss": True}


def _spectra(generator: torch.Generator) -> dict[str, Any]:
    return {"input_features": torch.randn(3, 8, 32, generator=generator), "labels": _tokens(generator, 7)}


def _sounds(generator: torch.Generator) -> dict[str, Any]:
    return {"input_values": torch.randn(3, 800, generator=generator), "labels": _tokens(generator, 3)}


@dataclass(frozen=True)
class Model:
    """One small model.

    Attributes:
        kind: name of its class in transformers.
        config: name of its configuration's class.
        options: of the configuration.
        inputs: makes a batch.
        replicated: classes or attribute names of the modules that read their weights.
        dtype: of the weights.
    """

    kind: str
    config: str
    options: Mapping[str, Any] = field(default_factory=lambda: TEXT)
    inputs: Callable[[torch.Generator], dict[str, Any]] = _text
    replicated: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float32


MODELS = {
    "Llama": Model("LlamaForCausalLM", "LlamaConfig", {**TEXT, **GROUPED}),
    "Qwen3": Model("Qwen3ForCausalLM", "Qwen3Config", {**TEXT, **GROUPED, "tie_word_embeddings": True}),
    "Qwen3-Next": Model(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **TEXT,
            **GROUPED,
            **EXPERTS,
            "num_experts": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "Mixtral": Model("MixtralForCausalLM", "MixtralConfig", {**TEXT, **GROUPED, "num_local_experts": 4}),
    "Gemma 3": Model("Gemma3ForCausalLM", "Gemma3TextConfig", {**TEXT, **GROUPED}),
    "Phi-3": Model("Phi3ForCausalLM", "Phi3Config", {**TEXT, "num_key_value_heads": 2}),
    "DeepSeek-V3": Model(
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {**TEXT, **LATENT, **EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "GPT-OSS": Model("GptOssForCausalLM", "GptOssConfig", {**TEXT, **GROUPED, "num_local_experts": 4}),
    "OPT": Model("OPTForCausalLM", "OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "GPT-2": Model("GPT2LMHeadModel", "GPT2Config", {**TEXT, "n_inner": 48}),
    "GPT-NeoX": Model("GPTNeoXForCausalLM", "GPTNeoXConfig"),
    "Bloom": Model("BloomForCausalLM", "BloomConfig", {**STATES, "n_head": 4}),
    "BERT": Model("BertForMaskedLM", "BertConfig"),
    "ModernBERT": Model("ModernBertForMaskedLM", "ModernBertConfig"),
    "T5": Model(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            **STATES,
            "d_model": WIDTH,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
        _pairs,
    ),
    "BART": Model("BartForConditionalGeneration", "BartConfig", {**BOTH, "max_position_embeddings": 64}, _pairs),
    "Longformer": Model("LongformerForMaskedLM", "LongformerConfig", {**TEXT, "attention_window": 4}),
    "ViT": Model("ViTForImageClassification", "ViTConfig", IMAGE, _images),
    "Swin": Model(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4},
        _images,
    ),
    "CLIP": Model(
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**TEXT, "projection_dim": 16}, "vision_config": {**IMAGE, "projection_dim": 16}},
        _images_and_text,
    ),
    "SigLIP": Model(
        "SiglipModel",
        "SiglipConfig",
        {"text_config": {**TEXT, "projection_size": WIDTH}, "vision_config": IMAGE},
        _images_and_text,
    ),
    "wav2vec 2.0": Model(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {
            **TEXT,
            "conv_dim": [8, 8],
            "conv_stride": [5, 4],
            "conv_kernel": [10, 8],
            "num_feat_extract_layers": 2,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
            "mask_time_prob": 0.0,
            "ctc_zero_infinity": True,
        },
        _sounds,
    ),
    "Mamba-2": Model("Mamba2ForCausalLM", "Mamba2Config", {**STATES, **MAMBA_2, "num_heads": 8, "head_dim": 8}),
    "Zamba2": Model(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            **TEXT,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 2,
            "chunk_size": 8,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "Bamba": Model(
        "BambaForCausalLM",
        "BambaConfig",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_chunk_size": 8,
        },
    ),
    "NemotronH": Model(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        {
            **{key: value for key, value in TEXT.items() if key != "num_hidden_layers"},
            **GROUPED,
            **MAMBA_2,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
        },
    ),
    "Mamba": Model(
        "MambaForCausalLM",
        "MambaConfig",
        {**STATES, "state_size": 4, "time_step_rank": 4},
        replicated=("dt_proj",),
    ),
    "Falcon-Mamba": Model(
        "FalconMambaForCausalLM",
        "FalconMambaConfig",
        {**STATES, "state_size": 4, "time_step_rank": 4},
        replicated=("dt_proj",),
    ),
    "Jamba": Model(
        "JambaForCausalLM",
        "JambaConfig",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "num_experts": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        replicated=("dt_proj",),
    ),
    "Whisper": Model(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        _spectra,
        ("WhisperPositionalEmbedding",),
    ),
    "DeBERTa-v2": Model(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
        replicated=("rel_embeddings",),
    ),
    "ProphetNet": Model(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        {
            **{key: value for key, value in STATES.items() if key != "num_hidden_layers"},
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_encoder_layers": LAYERS,
            "num_decoder_layers": LAYERS,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
        },
        _pairs,
        ("ngram_embeddings",),
    ),
    "Gemma 3n": Model(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {
            **TEXT,
            **GROUPED,
            "intermediate_size": [48, 48],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.0, 0.0],
            "layer_types": ["sliding_attention", "full_attention"],
        },
        replicated=("correction_coefs",),
    ),
    "LongCat-Flash": Model(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        {
            **TEXT,
            **LATENT,
            "num_layers": 1,
            "num_hidden_layers": 2,
            "head_dim": 4,
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 16,
            "n_routed_experts": 16,
            "zero_expert_num": 0,
            "moe_topk": 2,
        },
        replicated=("classifier",),
        dtype=torch.bfloat16,
    ),
    "MobileBERT": Model(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        {**TEXT, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
        replicated=("MobileBertLMPredictionHead",),
    ),
    "Falcon": Model("FalconForCausalLM", "FalconConfig", replicated=("FalconLinear",)),
}


MIXTURES = ("Mixtral", "DeepSeek-V3", "GPT-OSS")
"""Models whose experts are stacked: by rows, beside shared ones, and transposed with biases."""


def _built(made: Model) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # takes seconds, and only these tests need it

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, made.kind)(getattr(transformers, made.config)(**made.options))
    with torch.no_grad():
        for param in model.parameters():
            # Some are constant when they are new, and would not tell one row from another.
            param.add_(torch.randn(param.shape) * 0.02)
    for module in model.modules():
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(vars(holder or object).items()):
                if "drop" in name and isinstance(value, float):
                    setattr(holder, name, 0.0)
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.to(device=device(), dtype=made.dtype).train()


def _train(made: Model, rank: int, world_size: int, replicated: tuple[str, ...]) -> float:
    """Three steps beside the unsharded model. Returns the share of the model's elements that is sharded."""
    model = _built(made)
    names = [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in replicated or name.rpartition(".")[2] in replicated
    ]
    assert bool(names) == bool(replicated)
    elements = sum(param.numel() for param in model.parameters())
    twins = Twins(model, rank, world_size, replicated=names, timeout_s=30.0)
    sides = (twins.model, twins.reference.model)
    optimizers = [torch.optim.AdamW(side.parameters(), lr=1e-2, foreach=False) for side in sides]

    def scenario(side: nn.Module, step: int, data_rank: int) -> Iterator[Any]:
        batch = made.inputs(torch.Generator().manual_seed(1000 * step + data_rank))
        torch.manual_seed(step)  # layers that draw
        moved = {key: value.to(device()) if torch.is_tensor(value) else value for key, value in batch.items()}
        yield side(**moved).loss

    for step in range(3):
        twins.step(scenario, step)
        for optimizer in optimizers:
            optimizer.step()
        twins.compare_weights(f"step {step}")
    sharded = (param for param in twins.model.parameters() if isinstance(param, etp.ETPShardedParam))
    return sum(math.prod(param.layout.shape) for param in sharded) / elements


def train(rank: int, world_size: int) -> dict[str, tuple[str, float]]:
    """Train each model, and those with ``replicated`` without it before: what was answered then, and the share."""
    answers = {}
    for name, made in MODELS.items():
        refused = ""
        if made.replicated:
            try:
                _train(made, rank, world_size, ())
            except (TypeError, etp.EtpStateError) as error:
                refused = str(error)
        try:
            answers[name] = (refused, _train(made, rank, world_size, made.replicated))
        except Exception as error:
            error.add_note(name)
            raise
    return answers


def train_mixtures(rank: int, world_size: int) -> dict[str, float]:
    """Train mixtures whose experts are computed in every way that transformers has. Returns the shares sharded."""
    shares = {}
    for name in MIXTURES:
        for way in ("eager", "batched_mm", "grouped_mm"):
            options = {**MODELS[name].options, "experts_implementation": way}
            try:
                shares[f"{name}, {way}"] = _train(replace(MODELS[name], options=options), rank, world_size, ())
            except Exception as error:
                error.add_note(f"{name}, {way}")
                raise
    return shares


def generate(rank: int, world_size: int) -> dict[str, list[int]]:
    """Generate beside the unsharded models until the ranks' own texts end. Returns the lengths of the texts."""
    lengths: dict[str, list[int]] = {}
    for name in ("Llama", "T5", "Mixtral"):
        model = _built(MODELS[name]).eval()
        whole = copy.deepcopy(model)
        etp.shard_module(model, dist.group.WORLD, config=etp.EtpConfig(timeout_s=30.0))
        batch = MODELS[name].inputs(torch.Generator().manual_seed(rank))
        batch = {key: value.to(device()) for key, value in batch.items() if key != "labels"}
        ends = list(range(3 + 40 * (rank + 1)))  # other tokens end rank 1's texts, too
        options = {"max_new_tokens": 8, "eos_token_id": ends, "pad_token_id": 0, "synced_gpus": True}
        for way, more in (("greedy", {}), ("sampled", {"do_sample": True}), ("beams", {"num_beams": 2})):
            written = []
            for side in (whole, model):
                torch.manual_seed(rank)
                written.append(cast("Any", side).generate(**batch, **options, **more))
            assert torch.equal(written[0], written[1]), (name, way, written)
            lengths.setdefault(name, []).append(written[1].shape[1])
    return lengths


def save(rank: int, world_size: int, folder: str) -> dict[str, str]:
    """Save models: what is answered without whole weights; with them, what is read again is the unsharded model."""
    answers = {}
    for name in ("Llama", "Gemma 3", *MIXTURES):  # the embedding of Gemma 3 is tied
        made, whole = _built(MODELS[name]), _built(MODELS[name])
        etp.shard_module(made, dist.group.WORLD)
        model = cast("PreTrainedModel", made)
        try:
            model.save_pretrained(f"{folder}/{name}, {rank}")
        except TypeError as error:
            answers[name] = str(error)
        full = etp.full_state_dict(model)
        if rank == 0:
            model.save_pretrained(f"{folder}/{name}", state_dict=full)
            model.config.save_pretrained(f"{folder}/{name}, ungathered")
        writer = HuggingFaceStorageWriter(
            f"{folder}/{name}, ungathered", save_distributed=True, enable_consolidation=True
        )
        state = etp.ShardedCheckpoint(model).state_dict()["model"]
        if name == "Gemma 3":
            del state["lm_head.weight"]  # safetensors takes no memory twice
        dcp.save(state, storage_writer=writer)
        dist.barrier()
        for saved in (f"{folder}/{name}", f"{folder}/{name}, ungathered"):
            read = type(model).from_pretrained(saved).state_dict()
            for key, value in whole.state_dict().items():
                assert torch.equal(read[key], value), (saved, key)
        assert not list(Path(folder).glob(f"{name}, {rank}/*.safetensors"))
    return answers
