"""Checksums of weights on a GPU equal those on a CPU: ranks compare what is in either memory."""

from __future__ import annotations

import pytest
import torch

from etp import digest
from etp.digest import tensor_digest
from tests.gpu.devices import needs_gpus


@needs_gpus(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
@pytest.mark.parametrize("numel", [1, 2, 1023, 4 * digest._CHUNK, 9 * digest._CHUNK + 3])
def test_digests_of_a_gpu_are_those_of_a_cpu(numel: int, dtype: torch.dtype) -> None:
    whole = torch.randint(-100, 100, (numel + 1,), generator=torch.Generator().manual_seed(7)).to(dtype)
    # Behind the first element, where no word of four bytes begins.
    for tensor in (whole, whole[1:]):
        assert tensor_digest(tensor.cuda()) == tensor_digest(tensor)
        assert tensor_digest(whole.cuda()[-tensor.numel() :]) == tensor_digest(tensor)
