"""Extended Tensor Parallelism: every weight sharded over one more group of ranks, gathered just before its GEMM."""

from __future__ import annotations

from etp.checkpoint import ShardedCheckpoint
from etp.clip import clip_grad_norm_
from etp.config import EtpConfig, GradReduction, TransportName
from etp.errors import EtpCommunicationError, EtpError, EtpStateError, PeerMismatchError, StaleWeightError
from etp.layout import ShardLayout
from etp.modules import GroupedLinear, LayerNormLinear, Linear
from etp.muon import Muon
from etp.param import ETPShardedParam
from etp.runtime import EtpRuntime
from etp.shard_states import mark_own_shards
from etp.state import full_state_dict, load_full_state_dict
from etp.wrap import resident_nbytes, shard_module, wait_async_comms

__version__ = "0.1.0"


__all__ = [
    "ETPShardedParam",
    "EtpCommunicationError",
    "EtpConfig",
    "EtpError",
    "EtpRuntime",
    "EtpStateError",
    "GradReduction",
    "GroupedLinear",
    "LayerNormLinear",
    "Linear",
    "Muon",
    "PeerMismatchError",
    "ShardLayout",
    "ShardedCheckpoint",
    "StaleWeightError",
    "TransportName",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "mark_own_shards",
    "resident_nbytes",
    "shard_module",
    "wait_async_comms",
]
