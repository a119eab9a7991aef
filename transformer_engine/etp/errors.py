"""What the engine raises. Every message names the weight, the ranks and the way out."""

from __future__ import annotations


class EtpError(RuntimeError):
    """Base of the engine's own errors."""


class EtpStateError(EtpError):
    """A weight group was driven through a transition that its state machine does not have."""


class StaleWeightError(EtpError):
    """A consumer asked a slot for a gathered weight that the slot no longer holds."""


class EtpCommunicationError(EtpError):
    """A collective failed or timed out, usually because a peer is gone."""


class PeerMismatchError(EtpError):
    """The ranks of a shard group disagree about names, shapes or values of the weights."""
