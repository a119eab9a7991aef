"""The long runs' command line, and ranks that share GPUs."""

from __future__ import annotations

import itertools

import pytest
import torch

from benchmarks.long_run import main
from benchmarks.shared_gpus import sharing_gpus


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 2), (8, 2), (8, 3), (3, 1)])
def test_ranks_of_one_gpu_are_on_different_hosts_for_nccl(ranks: int, gpus: int) -> None:
    hosts = [sharing_gpus(rank, gpus)["NCCL_HOSTID"] for rank in range(ranks)]
    for one, other in itertools.combinations(range(ranks), 2):
        # Not more hosts than necessary: ranks of one are linked as on a real one.
        assert (hosts[one] == hosts[other]) == (one // gpus == other // gpus)
        assert hosts[one] != hosts[other] or one % gpus != other % gpus


def test_more_ranks_than_gpus_are_refused_unless_they_may_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        main(["--ranks", "4"])
    assert "--ranks 4: there are 2 GPUs; see --share-gpus" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--ranks", "4", "--share-gpus", "--steps", "5"])
    assert "--steps is 5; at least 10 are needed" in capsys.readouterr().err
