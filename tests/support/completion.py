"""What an engine has added to a prompt, and how much of the prompt it found in its prefix cache."""

from __future__ import annotations

from typing import NamedTuple


class Completion(NamedTuple):
    """An engine's answer, always of its likeliest tokens."""

    tokens: list[int]
    log_probabilities: list[float]
    """Of each token."""
    cached: int
    """How many of the prompt's tokens were not computed, because the cache had them."""
    ended: str
    """Why there are no more tokens, as vLLM names it."""
