"""Reasons of a failed collective are told apart by what the backends really say, and nothing is guessed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from etp.collectives.works import meaning, reported
from etp.errors import EtpCommunicationError
from tests.support.fake_group import fake_group

LATE = "A peer did not come in time"
LOST = "A peer has most likely ended"
WRONG = "The backend refused the tensors themselves"
UNKNOWN = "The backend's own message is all that is known"

# gloo's were collected from two processes of PyTorch 2.11, NCCL's from its sources and from public reports.
MESSAGES = [
    ("Operation timed out!", LATE),
    ("[/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 1000ms for send operation to complete", LATE),
    ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=BROADCAST, Timeout(ms)=1800000)", LATE),
    ("[/gloo/transport/tcp/pair.cc:538] Read error [127.0.0.1]:6830: Connection reset by peer", LOST),
    ("[/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:59560", LOST),
    ("ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.", LOST),
    ("ncclSystemError: ... It can be also caused by unexpected exit of a remote peer", LOST),
    ("NCCL communicator was aborted on rank 1.", LOST),
    ("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (100000), got (4))", WRONG),
    ("ProcessGroupGloo::allgather: invalid tensor type at index 0 (expected TensorOptions(dtype=float", WRONG),
    ("ncclInvalidArgument: Invalid value for an argument.", WRONG),
    ("No backend type associated with device type cuda", WRONG),
    ("something that no backend has said yet", UNKNOWN),
]


@pytest.mark.parametrize(("message", "start"), MESSAGES)
def test_the_reason_is_read_from_the_message(message: str, start: str) -> None:
    assert meaning(message).startswith(start)


def test_the_error_names_collective_rank_peers_and_reason() -> None:
    with fake_group(rank=1, world_size=4) as group:
        with pytest.raises(EtpCommunicationError) as error, reported("all-gather of a.weight", group):
            raise RuntimeError("Operation timed out!")
        text = str(error.value)
        assert text.startswith("all-gather of a.weight failed on rank 1 (shard group: ranks [0, 1, 2, 3]): Operation")
        assert LATE in text
        assert LOST not in text


def test_a_lack_of_memory_stays_one() -> None:
    with fake_group(rank=0, world_size=2) as group, pytest.raises(torch.OutOfMemoryError):
        _run_out_of_memory(group)


def _run_out_of_memory(group: dist.ProcessGroup) -> None:
    with reported("all-gather of a.weight", group):
        raise torch.OutOfMemoryError("CUDA out of memory")
