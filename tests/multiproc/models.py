"""Small models with everything that sharding meets: embeddings, norms, biases, odd sizes, ties, skips, failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCAB, WIDTH, INNER, TOKENS = 23, 12, 29, 7
"""No size but WIDTH divides by 2, and none by 5; INNER and VOCAB are odd, so every cut of them has padding."""


class PlannedFailureError(Exception):
    """Raised by a model that was asked to fail."""


class Block(nn.Module):
    """Pre-norm MLP block with a residual."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER, bias=bias)
        self.down = nn.Linear(INNER, WIDTH, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """Embedding, blocks, norm, head.

    Args:
        blocks: how many.
        tied: the head's weight is the embedding's.
        bias: biases of the linears in the blocks.
        padding_idx: of the embedding.
    """

    def __init__(self, blocks: int = 3, *, tied: bool = False, bias: bool = True, padding_idx: int | None = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH, padding_idx=padding_idx)
        self.blocks = nn.ModuleList(Block(bias) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: torch.Tensor,
        *,
        order: Sequence[int] | None = None,
        checkpointed: str = "",
        fail_before: int | None = None,
        fail_behind: int | None = None,
    ) -> torch.Tensor:
        """Logits.

        Args:
            tokens: ``[batch, sequence]`` of indices.
            order: which blocks to visit, in which order, as often as named; all in turn if None.
            checkpointed: "reentrant" or "plain" runs every block under activation checkpointing.
            fail_before: raise before this visit.
            fail_behind: raise in the backward pass when it comes back to this visit.
        """
        x = self.embedding(tokens)
        for visit, index in enumerate(range(len(self.blocks)) if order is None else order):
            if visit == fail_before:
                raise PlannedFailureError(f"before visit {visit}")
            if checkpointed:
                x = checkpoint(self.blocks[index], x, use_reentrant=checkpointed == "reentrant")
            else:
                x = self.blocks[index](x)
            if visit == fail_behind:
                x.register_hook(_fail)
        return self.head(self.norm(x))


def _fail(grad: torch.Tensor) -> None:
    raise PlannedFailureError("in backward")


class Attention(nn.Module):
    """``nn.MultiheadAttention``, which stays replicated, between sharded linears."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.attention = nn.MultiheadAttention(WIDTH, 3, batch_first=True)
        self.out = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of ``[batch, sequence]`` indices, which serve as positions on a fixed wave."""
        wave = torch.arange(1, WIDTH + 1, device=tokens.device, dtype=self.out.weight.dtype)
        x = self.inner(torch.sin(tokens.unsqueeze(-1) * wave))
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class TiedByHand(nn.Module):
    """A module of the user's own holds the embedding's weight as its own parameter and passes it to F.linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.projection = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return F.linear(self.middle(self.embedding(tokens)), self.projection)


class LongSum(nn.Module):
    """One linear used three times, with a fresh non-linearity between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.same = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embedding(tokens)
        x = self.same(torch.sin(self.same(torch.tanh(self.same(x)))))
        return self.head(x)


class Transposed(nn.Module):
    """Linears whose inputs, and gradients of outputs, are laid out by columns, or with the sequence first."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.inner = nn.Linear(WIDTH, INNER)
        self.back = nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = torch.tanh(self.inner(self.embedding(tokens).transpose(0, 1)).transpose(0, 1))
        by_columns = x.flatten(0, 1).t().contiguous().t()
        return self.head(torch.tanh(self.back(by_columns)).view(*tokens.shape, WIDTH))


class Clamped(nn.Linear):
    """Its weight is kept within bounds where PyTorch does not count the change, right before it is used."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        """As ``nn.Linear``."""
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(input)


class Constrained(nn.Module):
    """Layers whose weights change inside of the forward pass, behind one that starts to gather them ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.inner = Clamped(WIDTH, INNER)
        self.head = Clamped(INNER, VOCAB)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits."""
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


def batch(step: int, rank: int, device: torch.device, sequences: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets that differ for every step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randint(VOCAB, (2, sequences, TOKENS), generator=generator).to(device)
    return drawn[0], drawn[1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy, in the logits' own dtype."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


MODELS: dict[str, Any] = {
    "tiny": Tiny,
    "tied": lambda: Tiny(tied=True),
    "no_bias": lambda: Tiny(bias=False, padding_idx=None),
    "attention": Attention,
    "tied_by_hand": TiedByHand,
    "long_sum": LongSum,
    "constrained": Constrained,
    "transposed": Transposed,
}
