"""The engine's errors. Messages name the weight or the ranks involved, and what to change."""

from __future__ import annotations


class EtpError(RuntimeError):
    """Base of the engine's own errors."""


class EtpStateError(EtpError):
    """A call that the engine's current state does not allow, such as an invalid transition of a weight group."""


class StaleWeightError(EtpError):
    """A weight in a slot, or as published to peers, is no longer, or not yet, what its reader expects."""


class EtpCommunicationError(EtpError):
    """A collective failed or timed out, usually because a peer is gone."""


class PeerMismatchError(EtpError):
    """The ranks of a shard group disagree about names, shapes or values of the weights, or the order of their use."""
