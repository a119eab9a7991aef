"""``python -m megatron_patches.refit check``: whether trainer and engines give the same tokens the same probability."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from megatron_patches.refit.checkpoints.checkpoint_model import CheckpointModel, positive
from megatron_patches.refit.command import run_together
from megatron_patches.refit.control.exchange import default_exchange, describe_error, on_first
from megatron_patches.refit.control.http_calls import HttpCalls
from megatron_patches.refit.errors import ModelMismatchError, RefitError
from megatron_patches.refit.progress import Progress
from megatron_patches.refit.tools import push_command
from megatron_patches.refit.trainer import push_flags


@dataclass(frozen=True)
class Samples:
    """Text that an engine has generated.

    Attributes:
        tokens: ``[samples, prompt + answer]``.
        log_probabilities: log-probabilities of the answers' tokens, as the engine sampled them.
    """

    tokens: list[list[int]]
    log_probabilities: list[list[float]]


class _Model(msgspec.Struct):
    """An entry of ``v1/models``."""

    id: str


class _Models(msgspec.Struct):
    """What ``v1/models`` answers."""

    data: Annotated[list[_Model], msgspec.Meta(min_length=1)]


class _Scores(msgspec.Struct):
    """Log-probabilities of the tokens of one answer."""

    token_logprobs: list[float]


class _Choice(msgspec.Struct):
    """The answer to one prompt."""

    index: int
    token_ids: list[int]
    logprobs: _Scores


class _Completion(msgspec.Struct):
    """What ``v1/completions`` answers."""

    choices: list[_Choice]


@dataclass(frozen=True)
class Agreement:
    """How a trainer's log-probabilities of an engine's samples differ from the engine's own.

    Attributes:
        tokens: number of tokens compared.
        kl: estimate of KL(engine || trainer) in nats per token: the mean of ``r - 1 - log r``, where r is the ratio of
            the trainer's probability to the engine's. Unbiased and never negative
            (http://joschu.net/blog/kl-approx.html, k3).
        mean: mean absolute difference of log-probabilities.
        largest: largest absolute difference.
    """

    tokens: int
    kl: float
    mean: float
    largest: float

    @classmethod
    def of(cls, engine: torch.Tensor, trainer: torch.Tensor) -> Agreement:
        """Compares two tensors of one shape."""
        difference = trainer.double() - engine.double()
        kl = (difference.exp() - 1 - difference).mean()
        return cls(difference.numel(), float(kl), float(difference.abs().mean()), float(difference.abs().max()))


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``check``."""
    check = commands.add_parser(
        "check",
        help="push a checkpoint into running vLLM servers, and compare probabilities",
        description="Pushes a Megatron checkpoint as `push` does. Before and after, the servers continue random "
        "prompts, and the model of the checkpoint says how likely it finds each of their tokens. After the push both "
        "must agree.",
    )
    push_command.add_push_options(check, "checking")
    check.add_argument(
        "--samples", type=positive, default=16, metavar="N", help="of each server; %(default)s by default"
    )
    check.add_argument(
        "--prompt-tokens", type=positive, default=8, metavar="N", help="in a prompt; %(default)s by default"
    )
    check.add_argument(
        "--answer-tokens", type=positive, default=32, metavar="N", help="in an answer; %(default)s by default"
    )
    check.add_argument("--seed", type=int, default=1, help="of prompts and samples; %(default)s by default")
    check.add_argument(
        "--most-kl",
        type=float,
        default=1e-2,
        metavar="NATS",
        help="of engine and trainer after the push, a token; what two implementations in bfloat16 differ by is less; "
        "%(default)s by default",
    )


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns the exit status."""
    found: dict[str, tuple[Agreement, Agreement]] = {}

    def compare(progress: Progress) -> str:
        found.update(_check(options, progress))
        return _table(found)

    # A table printed before the progress ends would be drawn over by its bars.
    return run_together(compare, (RefitError, ValueError)) or run_together(lambda _: _judge(found, options.most_kl))


def _judge(found: Mapping[str, tuple[Agreement, Agreement]], most_kl: float) -> str:
    """Returns, in words, that the engines agree with the trainer after the push.

    Raises:
        ModelMismatchError: if one does not.
    """
    for url, (_, after) in found.items():
        if not after.kl <= most_kl:
            raise ModelMismatchError(
                f"KL({url} || trainer) is {after.kl:.2g} after the push, more than --most-kl {most_kl:g}; the weights "
                "arrived bit for bit, so the two compute another model from them: compare their configurations and "
                "kernels"
            )
    return f"trainer and {len(found)} engine(s) agree"


def _check(options: argparse.Namespace, progress: Progress) -> dict[str, tuple[Agreement, Agreement]]:
    """The agreement of each engine with the trainer, before and after a push.

    Raises:
        RefitError: if that fails, or an option is out of range.
    """
    if options.chunks > 1 and options.samples % options.pipeline:
        raise RefitError(
            f"--samples is {options.samples}; a virtual pipeline needs a multiple of the "
            f"{options.pipeline} stages (--pipeline-model-parallel-size)"
        )
    if not -(2**63) <= options.seed < 2**63:
        raise RefitError(f"--seed is {options.seed}; it must have 64 bits at most")
    if not options.most_kl >= 0:
        raise RefitError(f"--most-kl is {options.most_kl}; it must be 0 or a positive number of nats")
    timeout_s, credentials = options.timeout_minutes * 60, push_flags.credentials_from(options)
    asked = [HttpCalls(url, timeout_s, credentials) for url in options.engines]
    with push_command.session_of(options, progress) as (session, found):
        progress.phase("ask before", 0)
        before = [_agreement(server, found, options) for server in asked]
        push_command.prepare_and_push(session, found, options, progress)
        progress.phase("ask after", 0)
        after = [_agreement(server, found, options) for server in asked]
    return {server.url: pair for server, pair in zip(asked, zip(before, after, strict=True), strict=True)}


def _agreement(server: HttpCalls, model: CheckpointModel, options: argparse.Namespace) -> Agreement:
    """The model's agreement with a server on the server's samples. Collective."""
    exchange = default_exchange()
    samples = on_first(exchange, partial(_ask, server, model.vocab_size, options))
    scores = log_probabilities(model.chunks, torch.tensor(samples.tokens))
    known = next(
        scores for scores in exchange.gather(None if scores is None else scores.tolist()) if scores is not None
    )
    return Agreement.of(torch.tensor(samples.log_probabilities), torch.tensor(known)[:, options.prompt_tokens - 1 :])


def _ask(server: HttpCalls, vocab_size: int, options: argparse.Namespace) -> Samples:
    """Samples from a server, drawn from the model's own distribution.

    Raises:
        RefitError: if the server does not answer, or refuses such requests.
    """
    generator = torch.Generator().manual_seed(options.seed)
    prompts = torch.randint(vocab_size, (options.samples, options.prompt_tokens), generator=generator).tolist()
    (model, *_) = _read(server, "v1/models", server.call("GET", "v1/models"), _Models).data
    route = "v1/completions"
    answer = server.call(
        "POST",
        route,
        {
            "model": model.id,
            "prompt": prompts,
            "max_tokens": options.answer_tokens,
            "seed": options.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            # Every setting that a model's generation_config.json may change.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        },
    )
    choices = sorted(_read(server, route, answer, _Completion).choices, key=lambda choice: choice.index)
    length = options.answer_tokens
    found = [(choice.index, len(choice.token_ids), len(choice.logprobs.token_logprobs)) for choice in choices]
    if found != [(number, length, length) for number in range(len(prompts))]:
        raise RefitError(
            f"{server.url}/{route} did not answer each of {len(prompts)} prompts (--samples) with {length} tokens "
            "(--answer-tokens) and their log-probabilities; is it a vLLM server?"
        )
    if foreign := [token for choice in choices for token in choice.token_ids if not 0 <= token < vocab_size]:
        raise RefitError(
            f"{server.url} wrote token {foreign[0]}, and the checkpoint's model has {vocab_size} tokens; pass "
            "--vocab-size, or the server of a model with this vocabulary"
        )
    return Samples(
        [[*prompt, *choice.token_ids] for prompt, choice in zip(prompts, choices, strict=True)],
        [choice.logprobs.token_logprobs for choice in choices],
    )


def _read[T](server: HttpCalls, route: str, answer: dict[str, Any], kind: type[T]) -> T:
    """The fields of an answer that are needed.

    Raises:
        RefitError: if one is missing or of another type.
    """
    try:
        return msgspec.convert(answer, kind)
    except msgspec.ValidationError as error:
        raise RefitError(f"{server.url}/{route} does not answer as a vLLM server does: {error}") from error


def _table(found: Mapping[str, tuple[Agreement, Agreement]]) -> str:
    """The table as text, in the width and style of standard output."""
    table = Table(title="log-probabilities of what the engines write: trainer less engine")
    for column in ("engine", "push", "tokens", "KL, nats", "mean |d|", "largest |d|"):
        table.add_column(column, justify="left" if column in ("engine", "push") else "right")
    for url, pair in found.items():
        for when, one in zip(("before", "after"), pair, strict=True):
            table.add_row(url, when, str(one.tokens), f"{one.kl:.2e}", f"{one.mean:.2e}", f"{one.largest:.2e}")
    console = Console()
    with console.capture() as shown:
        console.print(table)
    return shown.get().rstrip("\n")


def log_probabilities(chunks: list[torch.nn.Module], tokens: torch.Tensor) -> torch.Tensor | None:
    """Log-probability of each token after the first. Collective over the model's ranks.

    Args:
        chunks: this rank's part of the model, one module per virtual pipeline stage.
        tokens: ``[sequences, length]``, int64, equal on all ranks. With a virtual pipeline, the number of sequences
            must be a multiple of the number of stages.

    Returns:
        ``[sequences, length - 1]``, float32; None on ranks that do not have the end of the model.

    Raises:
        RefitError: if Megatron cannot run the model here.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = next(chunks[0].parameters()).device
    inputs, labels = tokens[:, :-1].to(device), tokens[:, 1:].to(device)
    positions = torch.arange(inputs.shape[1], device=device)[None]

    def step(numbers: Iterator[int], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        number = next(numbers)
        one = slice(number, number + 1)
        losses: torch.Tensor = model(inputs[one], positions, None, labels=labels[one])
        return losses, lambda output, non_loss_data: output  # noqa: ARG005 - Megatron names it

    modes = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            outputs: list[torch.Tensor] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[iter(range(len(inputs))) for _ in chunks],
                model=chunks,
                num_microbatches=len(inputs),
                seq_length=inputs.shape[1],
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
    except (NotImplementedError, AssertionError) as error:
        raise RefitError(f"Megatron cannot run this model here: {describe_error(error)}") from error
    finally:
        for chunk, mode in zip(chunks, modes, strict=True):
            chunk.train(mode)
    return -torch.cat(outputs).float().cpu() if outputs else None
