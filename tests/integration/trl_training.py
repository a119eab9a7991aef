"""Trains a tiny model with TRL's AsyncGRPOTrainer, as the documentation says, against a running vLLM server.

::

    python -m tests.integration.trl_training MODEL URL OUTPUT
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

STEPS = 25
_EARLY = 128


def share_of_early_bytes(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """The reward of each answer: which part of its tokens is in the first half of the vocabulary."""
    return [sum(token < _EARLY for token in ids) / len(ids) for ids in completion_ids]


def attend(  # noqa: PLR0913 - a kernel's signature
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """``flash_attn_varlen_func`` of FlashAttention, whose kernels no CPU has; causal, aligned to the end.

    Args:
        query: [tokens, heads, size].
        key: [keys, groups, size].
        value: likewise.
        cu_seqlens_q: where each sequence begins in ``query``, and the end of the last one.
        cu_seqlens_k: likewise in ``key``.
        max_seqlen_q: not needed here.
        max_seqlen_k: likewise.
        softmax_scale: of the scores.
        causal: always.
        window_size: none.
    """
    assert causal
    assert window_size == (-1, -1)
    parts = []
    ends = zip(*(torch.stack([ends[:-1], ends[1:]], 1).tolist() for ends in (cu_seqlens_q, cu_seqlens_k)), strict=True)
    for (q0, q1), (k0, k1) in ends:
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        q, k, v = (x.transpose(0, 1)[None] for x in (query[q0:q1], key[k0:k1], value[k0:k1]))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
        )
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def main() -> None:
    """Trains, and saves the model and what the trainer logged."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import chat_template_utils
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_grpo_trainer, packing

    from megatron_patches.refit.trl import EtpWeightTransfer

    model, url, output = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.response_template = chat_template_utils.qwen3_template  # TRL knows it by a model's own chat template
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # it asks the GPU for its name
    packing._flash_attn = lambda: types.SimpleNamespace(flash_attn_varlen_func=attend)
    transfer = EtpWeightTransfer(url)
    trainer = AsyncGRPOTrainer(
        model,
        reward_funcs=share_of_early_bytes,
        args=AsyncGRPOConfig(
            output,
            vllm_server_base_url=url,
            dtype="bfloat16",
            max_steps=STEPS,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=1,
            num_generations=8,
            max_completion_length=12,
            token_budget=512,
            max_staleness=1,
            learning_rate=1e-2,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict(
            {"prompt": [[{"role": "user", "content": text}] for text in ("one", "two", "three", "four")]}
        ),
        processing_class=tokenizer,
        weight_transfer=transfer,
    )
    versions: list[int] = []

    class Versions(TrainerCallback):
        """Notes after each step which version the server has."""

        def on_step_end(self, *_: Any, **__: Any) -> None:
            versions.append(transfer.version)

    trainer.add_callback(Versions())
    trainer.train()
    trainer.save_model(f"{output}/trained")
    found = {
        "log": trainer.state.log_history,
        "versions": versions,
        "version": transfer.version,
        "policy": trainer.model_version,
    }
    Path(output, "log.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    main()
