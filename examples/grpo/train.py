"""Trains a model with GRPO on the answers of running vLLM servers, and pushes the weights to them after each step.

This is a Megatron script: Megatron's flags set shape, parallelism and schedule, and the ``--refit-`` flags configure
pushes. Complete commands are in ``docs/rl.md``::

    PYTHONPATH=. torchrun --nproc-per-node 4 -m megatron_patches examples/grpo/train.py ... --etp-size 2 \
        --dataloader-type external --refit-engines http://127.0.0.1:8000 --refit-wait --grpo-prompts train.jsonl

Each step chooses prompts, gets ``--grpo-samples`` answers per prompt from the engines, scores them, and takes one
optimizer step. ``--global-batch-size`` counts answers.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from examples.grpo.algorithm import advantages, grpo_loss
from examples.grpo.engines import Engine, GrpoError
from examples.grpo.sampling import Reward, Sample, Sampler, read_problems
from megatron_patches.command_line import exit_with
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer import push_flags

Batch = dict[str, torch.Tensor]
Group = list[Sample]


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of GRPO."""
    group = parser.add_argument_group("grpo")
    group.add_argument(
        "--grpo-prompts", type=Path, required=True, metavar="FILE", help="prompts and correct answers, one per line"
    )
    group.add_argument("--grpo-held-out", type=Path, metavar="FILE", help="the same, for measuring accuracy")
    group.add_argument(
        "--grpo-held-out-interval", type=int, default=10, metavar="N", help="measure before each Nth step"
    )
    group.add_argument("--grpo-samples", type=int, default=8, metavar="N", help="answers per prompt")
    group.add_argument("--grpo-tokens", type=int, default=16, metavar="N", help="maximum tokens per answer")
    group.add_argument("--grpo-reward", default="examples.grpo.reward:exact_number", metavar="MODULE:FUNCTION")
    group.add_argument("--grpo-clip", type=float, default=0.2, help="how far ratios of probabilities may move from 1")
    group.add_argument("--grpo-reference", metavar="URL", help="a server of the reference model, which gets no pushes")
    group.add_argument("--grpo-kl", type=float, default=0.0, help="weight of KL(trainer || reference) in the loss")
    group.add_argument(
        "--grpo-lag", type=int, choices=(0, 1), default=0, help="1 samples the next step during training"
    )
    group.add_argument("--grpo-log", type=Path, metavar="FILE", help="file for the samples of each step, as JSON lines")
    return parser


def load_reward(name: str) -> Reward:
    """The function that ``--grpo-reward`` names.

    Raises:
        GrpoError: if it cannot be imported.
    """
    module, _, function = name.partition(":")
    try:
        found: Reward = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise GrpoError(f"--grpo-reward {name}: {error}") from error
    return found


def check(args: argparse.Namespace) -> None:
    """Refuse settings that are out of range or contradict each other.

    Raises:
        GrpoError: naming the flag.
    """
    if not args.refit_engines:
        raise GrpoError("no engine to ask: give --refit-engines")
    for name in ("grpo_samples", "grpo_tokens", "grpo_held_out_interval"):
        if getattr(args, name) < 1:
            raise GrpoError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least 1")
    if not args.grpo_clip > 0:
        raise GrpoError(f"--grpo-clip is {args.grpo_clip:g}; it must be above 0")
    if args.dataloader_type != "external":
        raise GrpoError(f"--dataloader-type is {args.dataloader_type}; samples come from outside, so give external")
    _check_batches(args)
    if args.grpo_log and (args.grpo_log.is_dir() or not args.grpo_log.absolute().parent.is_dir()):
        raise GrpoError(f"--grpo-log {args.grpo_log} cannot be written; name a file in a folder that is there")
    if args.context_parallel_size > 1:
        raise GrpoError(f"--context-parallel-size is {args.context_parallel_size}; samples are not split, so give 1")
    if args.virtual_pipeline_model_parallel_size:
        raise GrpoError("a virtual pipeline would ask for samples once per chunk; leave it out")
    if not args.grpo_kl >= 0:
        raise GrpoError(f"--grpo-kl is {args.grpo_kl:g}; the weight of a penalty must be at least 0")
    if args.grpo_kl and args.grpo_reference is None:
        raise GrpoError(f"--grpo-kl is {args.grpo_kl:g}; give --grpo-reference, the engine of the reference")
    if not args.refit_wait and args.grpo_lag == 0:
        raise GrpoError("without --refit-wait the engines may answer with the version before; add it, or --grpo-lag 1")


def _check_batches(args: argparse.Namespace) -> None:
    """Refuse steps of another size than is sampled, and tokens of different weights."""
    if args.global_batch_size % args.grpo_samples:
        raise GrpoError(f"--grpo-samples {args.grpo_samples} must divide --global-batch-size {args.global_batch_size}")
    for name in ("rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"):
        if getattr(args, name, None):
            raise GrpoError(
                f"--{name.replace('_', '-')} is {getattr(args, name)}; each step samples --global-batch-size answers, "
                "so leave it out"
            )
    if not args.calculate_per_token_loss:
        raise GrpoError(
            "without --calculate-per-token-loss a token weighs less the more tokens its microbatch has; add it"
        )


class Rollouts:
    """Samples each step from the engines, and logs the samples; only on the first rank."""

    def __init__(self, args: argparse.Namespace) -> None:
        credentials = push_flags.credentials_from(args, "refit-")
        engines = [Engine(url, args.refit_timeout, credentials) for url in args.refit_engines]
        reference = Engine(args.grpo_reference, args.refit_timeout, credentials) if args.grpo_reference else None
        self._args = args
        self._sampler = Sampler(engines, load_reward(args.grpo_reward), args.grpo_tokens, args.seed, reference)
        self._problems = read_problems(args.grpo_prompts)
        self._held_out = read_problems(args.grpo_held_out) if args.grpo_held_out else []
        self._ahead = ThreadPoolExecutor(1, "grpo-ahead")
        self._next: Future[list[Group]] | None = None

    def step(self, step: int) -> list[Group]:
        """Scored answers of a step, grouped by prompt."""
        args, started = self._args, time.monotonic()
        accuracy = None
        if self._held_out and (step % args.grpo_held_out_interval == 0 or step + 1 == args.train_iters):
            accuracy = self._sampler.accuracy(self._held_out, self._last_push(step))
        evaluated = time.monotonic()
        groups = self._sample(step) if self._next is None else self._next.result()
        seconds = {"evaluate": evaluated - started, "sample": time.monotonic() - evaluated}
        self._next = None
        if args.grpo_lag and step + 1 < args.train_iters:
            self._next = self._ahead.submit(self._sample, step + 1)
        for group in groups:
            check_length(group, args.seq_length)
        if args.grpo_log:
            entry = {"step": step, "held_out": accuracy, "seconds": seconds, "samples": logged(groups)}
            with args.grpo_log.open("a", encoding="utf-8") as file:
                print(json.dumps(entry), file=file)
        return groups

    def _sample(self, step: int) -> list[Group]:
        args = self._args
        prompts = args.global_batch_size // args.grpo_samples
        oldest = self._last_push(max(0, step - args.grpo_lag))
        return self._sampler.step(self._problems, prompts, args.grpo_samples, step, oldest)

    def _last_push(self, step: int) -> int:
        """The last version pushed before a step."""
        return step - step % self._args.refit_interval


def logged(groups: list[Group]) -> list[dict[str, Any]]:
    """What ``--grpo-log`` keeps of each sample."""
    return [
        {
            "prompt": sample.problem.prompt,
            "answer": sample.answer.text,
            "reward": sample.reward,
            "engine": sample.answer.engine,
            "versions": sample.answer.versions,
        }
        for group in groups
        for sample in group
    ]


class Microbatches:
    """Provides this rank's part of each step's samples, which the first rank broadcasts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._rollouts = Rollouts(args) if dist.get_rank() == 0 else None
        self._left: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._left:
            groups = self._broadcast(int(self._args.curr_iteration))
            rewards = torch.tensor([[sample.reward for sample in group] for group in groups])
            samples = [sample for group in groups for sample in group]
            scored = list(zip(samples, advantages(rewards).flatten().tolist(), strict=True))
            mine = scored[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
            rows = [row(sample, advantage, self._args.seq_length) for sample, advantage in mine]
            size = self._args.micro_batch_size
            self._left = [torch.utils.data.default_collate(rows[at : at + size]) for at in range(0, len(rows), size)]
        return self._left.pop(0)

    def _broadcast(self, step: int) -> list[Group]:
        """The first rank's samples; if it failed, all ranks end."""
        found: list[Any] = [None]
        if self._rollouts is not None:
            try:
                found = [self._rollouts.step(step)]
            except GrpoError as error:
                found = [str(error)]
        dist.broadcast_object_list(found, src=0)
        if isinstance(found[0], str):
            exit_with(found[0])
        groups: list[Group] = found[0]
        return groups


def check_length(group: Group, length: int) -> None:
    """Refuse answers that do not fit into the trainer's sequences.

    Raises:
        GrpoError: naming the flag.
    """
    for sample in group:
        tokens = len(sample.answer.prompt_ids) + len(sample.answer.token_ids)
        if tokens > length + 1:
            raise GrpoError(
                f"prompt {sample.problem.prompt!r} and its answer have {tokens} tokens, and --seq-length is {length}, "
                f"which takes {length + 1}; make it longer, or --grpo-tokens smaller"
            )


def row(sample: Sample, advantage: float, length: int) -> Batch:
    """One sample as tensors ``[length]``: each position predicts its label, the next token."""
    answer = sample.answer
    tokens = torch.zeros(length + 1, dtype=torch.long)
    known = answer.prompt_ids + answer.token_ids
    tokens[: len(known)] = torch.tensor(known)
    written = slice(len(answer.prompt_ids) - 1, len(known) - 1)
    mask, engine, reference = torch.zeros(3, length)
    mask[written] = 1.0
    engine[written] = torch.tensor(answer.log_probabilities)
    if sample.reference is not None:
        reference[written] = torch.tensor(sample.reference)
    return {
        "tokens": tokens[:-1],
        "labels": tokens[1:],
        "positions": torch.arange(length),
        "mask": mask,
        "engine": engine,
        "reference": reference,
        "advantage": torch.tensor(advantage),
        "reward": torch.tensor(sample.reward),
    }


def loss_function(batch: Batch, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Loss of a microbatch, its number of tokens, and the values that Megatron averages and logs.

    Args:
        batch: stacked results of :func:`row`, ``[batch, sequence]``.
        losses: ``[batch, sequence]``, the model's output: minus the log-probability of each label.
    """
    args = get_args()
    found = grpo_loss(
        -losses.float(),
        batch["engine"],
        batch["advantage"],
        batch["mask"],
        clip=args.grpo_clip,
        reference=batch["reference"] if args.grpo_reference else None,
        kl_coefficient=args.grpo_kl,
    )
    rewards = batch["reward"]
    log = {
        "grpo loss": torch.stack([found.loss.detach(), found.tokens]),
        "reward": torch.stack([rewards.sum(), torch.ones_like(rewards).sum()]),
        "kl engine": torch.stack([found.kl_engine, found.tokens]),
        "clipped": torch.stack([found.clipped.to(found.tokens.dtype), found.tokens]),
    }
    if args.grpo_reference:
        log["kl reference"] = torch.stack([found.kl_reference, found.tokens])
    return found.loss, found.tokens.to(torch.int), log


def forward_step(
    data_iterator: Iterator[Batch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, Batch]]]:
    """Run one microbatch through this rank's part of the model."""
    batch = {name: tensor.cuda(non_blocking=True) for name, tensor in next(data_iterator).items()}
    losses = model(batch["tokens"], batch["positions"], None, labels=batch["labels"])
    return losses, partial(loss_function, batch)


def main() -> None:
    """Train as specified on the command line."""
    args = parse_and_validate_args(add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})

    def build_data(*_: Any) -> tuple[Microbatches, None, None]:
        return Microbatches(args), None, None

    build_data.is_distributed = True  # type: ignore[attr-defined]  # every rank gets its own samples
    try:
        check(args)
        config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
        pretrain(config, build_data, ModelType.encoder_or_decoder, forward_step)
    except (GrpoError, RefitError) as error:
        exit_with(" ".join(str(error).split()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
