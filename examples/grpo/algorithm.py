"""What GRPO computes: advantages within groups of samples, and the loss of their tokens.

GRPO is "group relative policy optimization": Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300. Tokens weigh
the same, however long their sample is, as in DAPO (https://arxiv.org/abs/2503.14476).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EPSILON = 1e-4


def advantages(rewards: torch.Tensor) -> torch.Tensor:
    """How much better each sample is than the others of its prompt, in standard deviations.

    Args:
        rewards: ``[prompts, samples]``.

    Returns:
        ``[prompts, samples]``; exactly 0 where all samples of a prompt got the same reward.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    same = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return torch.where(same, 0.0, centred / (rewards.std(dim=1, correction=0, keepdim=True) + _EPSILON))


def kl_estimate(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(of || to) from each token that was drawn from ``of``: never negative, and right on average.

    Source: http://joschu.net/blog/kl-approx.html, the estimator k3.

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
        loss: to be divided by the number of tokens of the whole batch, and minimized.
        kl_engine: of the estimates of KL(engine || trainer).
        clipped: number of tokens whose ratio the clipping cut off.
        tokens: number of tokens.
    """

    loss: torch.Tensor
    kl_engine: torch.Tensor
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
    """The clipped objective: ratios are of the trainer's probabilities to those with which the engine drew the tokens.

    Args:
        trainer: ``[batch, sequence]``, log-probabilities under the weights that are trained; the gradient goes here.
        engine: ``[batch, sequence]``, those that the engine reported.
        advantage: ``[batch]``, of each sample.
        mask: ``[batch, sequence]``, 1 for tokens that the engine wrote, else 0.
        clip: how far the ratio may move from 1 before it earns nothing more.
        reference: ``[batch, sequence]``, log-probabilities under a model to stay near; None for none.
        kl_coefficient: weight of KL(trainer || reference).
    """
    # Where the mask is 0, log-probabilities may be anything; inf times 0 would be nan.
    counts = mask.bool()
    difference = torch.where(counts, trainer - engine, 0.0)
    ratio, gain = difference.exp(), advantage[:, None]
    kept = ratio.clamp(1.0 - clip, 1.0 + clip)
    loss = -torch.minimum(ratio * gain, kept * gain)
    if reference is not None:
        loss = loss + kl_coefficient * torch.where(counts, kl_estimate(trainer, reference), 0.0)
    with torch.no_grad():
        kl_engine = (kl_estimate(engine, trainer).masked_fill(~counts, 0.0)).sum()
        clipped = ((kept * gain < ratio * gain) & counts).sum()
    return Losses((loss * mask).sum(), kl_engine, clipped, mask.sum())
