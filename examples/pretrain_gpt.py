"""Pretrains a GPT or Llama-like model with ``megatron.training``.

The model's shape, its parallelism, the data and the schedule are Megatron's own command-line arguments. Run as a plain
script, it is a stock Megatron run; through the launcher it also accepts ``--etp-size``::

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py ...
    torchrun --nproc-per-node 4 -m megatron_patches examples/pretrain_gpt.py ... --etp-size 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks, mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor]


def loss_function(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of a microbatch's losses, the number of tokens in the sum, and both together for the log.

    Args:
        loss_mask: ``[batch, sequence]``, 1 for tokens that count and 0 for others.
        losses: ``[batch, sequence]``, the model's output.
    """
    mask = loss_mask.flatten().float()
    loss = torch.sum(losses.flatten().float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.to(loss.dtype)])}


def needs_data(config: Any, vp_stage: int | None) -> bool:
    """Whether this rank's model chunk reads tokens or labels: the first, the last, and those with MTP layers.

    Args:
        config: the model's ``TransformerConfig``.
        vp_stage: the chunk, under an interleaved pipeline schedule.
    """
    return is_first_or_last_pipeline_stage(vp_stage) or mtp_on_this_rank(
        config.pipeline_model_parallel_layout, config.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage
    )


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that share the word embeddings: the first, the last if tied, and those with MTP layers.

    With MTP layers, Megatron's default, the first and the last, would add an untied output layer to the embeddings at
    startup, and leave out the embeddings of a stage in between.
    """
    args = get_args()
    tied = [] if args.untie_embeddings_and_output_weights else pp_ranks[-1:]
    return sorted({pp_ranks[0], *tied, *get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args))})


def forward_step(
    data_iterator: Iterator[Batch] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Batch]]]:
    """Run one microbatch through this rank's model chunk; Megatron's schedule calls the returned loss function.

    With ``--overlap-moe-expert-parallel-comm`` the schedule asks for a plan instead, which it runs itself.
    """
    run = model.build_schedule_plan if return_schedule_plan else model
    if not needs_data(get_attr_wrapped_model(model, "config"), get_attr_wrapped_model(model, "vp_stage")):
        # The model takes its input from the previous stage and reads neither tokens nor labels.
        return run(None, None, None), partial(loss_function, torch.empty(0))
    if data_iterator is None:
        raise RuntimeError("this pipeline stage needs data and has none; is the data set too small?")
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    # With context parallelism, this rank computes on its pieces of each sequence.
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    losses = run(batch["tokens"], batch["position_ids"], batch.get("attention_mask"), labels=batch["labels"])
    return losses, partial(loss_function, batch["loss_mask"])


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> list[Any]:
    """Build the training, validation and test sets.

    Args:
        num_samples: how many samples each of the three needs.
        vp_stage: this rank's model chunk under an interleaved pipeline schedule.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )
    builder = BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        num_samples,
        partial(needs_data, core_transformer_config_from_args(args), vp_stage),
        config,
    )
    return list(builder.build())


# Every tensor-parallel rank reads its own batches from a memory-mapped file, so no broadcast is needed.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Train as specified on the command line."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    ours = not torch.distributed.is_initialized()
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step, get_embedding_ranks=embedding_ranks)
    if ours:
        # Threads of a process group that still exists may abort the process when the interpreter exits.
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
