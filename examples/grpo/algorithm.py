"""Computes GRPO's advantages within groups of samples, and the loss of their tokens.

GRPO is "group relative policy optimization": Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300. All tokens
have the same weight, regardless of the length of their sample, as in DAPO (https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EPSILON = 1e-4


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each sample is than the others of the same prompt, in standard deviations.

    Args:
        rewards: ``[prompts, samples]``.

    Returns:
        ``[prompts, samples]``; exactly 0 if all samples of a prompt have the same reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    same = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(same, 0.0, centred / (rewards.std(dim=1, correction=0, keepdim=True) + _EPSILON))


def kl_estimate(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(of || to) from each token drawn from ``of``; never negative, and unbiased.

    This is the estimator k3 of http://joschu.net/blog/kl-approx.html.

    Args:
        of: log-probabilities of the tokens, any shape.
        to: the same tokens' log-probabilities under the other model.
    """
    difference = to - of
    return torch.expm1(difference) - difference


@dataclass(frozen=True)
class Losses:
    """Sums over the tokens that count.

    Attributes:
        loss: to be divided by the number of tokens of the whole batch and minimized.
        kl_engine: sum of the estimates of KL(engine || trainer).
        kl_reference: sum of the estimates of KL(trainer || reference); 0 without a reference.
        clipped: number of tokens whose ratio was clipped.
        tokens: number of tokens.
    """

    loss: torch.Tensor
    kl_engine: torch.Tensor
    kl_reference: torch.Tensor
    clipped: torch.Tensor
    tokens: torch.Tensor


def grpo_loss(
    trainer: torch.Tensor,
    engine: torch.Tensor,
    advantage: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip: float,
    reference: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Losses:
    """The clipped objective, with ratios of the trainer's probabilities to the engine's sampling probabilities.

    Args:
        trainer: ``[batch, sequence]``, log-probabilities under the trained weights; the gradient flows here.
        engine: ``[batch, sequence]``, those that the engine reported.
        advantage: ``[batch]``, one per sample.
        mask: ``[batch, sequence]``, 1 for tokens that the engine generated, otherwise 0.
        clip: how far the ratio may move from 1 before the objective is clipped.
        reference: ``[batch, sequence]``, log-probabilities under the reference model; None for none.
        kl_coefficient: weight of KL(trainer || reference).
    """
    # Where the mask is 0, log-probabilities may be anything, and inf times 0 would be nan, in the gradient as well.
    counts = mask.bool()
    trainer, engine = torch.where(counts, trainer, 0.0), torch.where(counts, engine, 0.0)
    ratio = (trainer - engine).exp()
    unclipped = ratio * advantage[:, None]
    clipped = ratio.clamp(1.0 - clip, 1.0 + clip) * advantage[:, None]
    loss = -(torch.minimum(unclipped, clipped) * mask).sum()
    kl_reference = torch.zeros_like(loss)
    if reference is not None:
        kl_reference = kl_estimate(trainer, torch.where(counts, reference, 0.0)).sum()
        loss = loss + kl_coefficient * kl_reference
    return Losses(
        loss=loss,
        kl_engine=kl_estimate(engine, trainer.detach()).sum(),
        kl_reference=kl_reference.detach(),
        clipped=(clipped < unclipped).sum(),
        tokens=mask.sum(),
    )
