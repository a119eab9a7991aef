"""One of two parties of which the first writes into the memory of the second over NIXL.

Over TCP, UCX stripes writes, as it stripes reads and writes over RDMA.

python -m tests.integration.nixl_write FOLDER first|second NICS
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

from megatron_patches.refit.transports.nixl_agent import NixlAgent, range_of
from tests.integration.refit_nics import sent
from tests.support.two_hosts import ADDRESSES

NBYTES = 32 << 20


def main() -> None:
    """Writes, and notes how many bytes each interface has sent; or is written to."""
    folder, is_first = Path(sys.argv[1]), sys.argv[2] == "first"
    agent = NixlAgent(1 + is_first, "cpu", ADDRESSES[0 if is_first else 1], sys.argv[3])
    memory = np.full(NBYTES, is_first, dtype=np.uint8)
    region = range_of(memory)
    agent.register(region)
    metadata, address, done = (folder / name for name in ("metadata", "address", "done"))
    if is_first:
        while not address.exists():
            time.sleep(0.01)
        own, theirs = (np.array([each], np.uint64) for each in (region.address, int(address.read_text())))
        sizes = np.array([NBYTES], np.uint64)
        tables = [agent._descriptors(where, sizes, 0, "DRAM") for where in (own, theirs)]
        handle = agent._agent.initialize_xfer("WRITE", *tables, agent.meet(metadata.read_bytes()))
        before, state = sent(), agent.begin(handle)
        while state == "PROC":
            state = agent.state(handle)
        done.write_text(json.dumps({name: nbytes - before[name] for name, nbytes in sent().items()}))
        assert state == "DONE"
    else:
        metadata.write_bytes(agent.metadata)
        (folder / "address-to-be").write_text(str(region.address))
        (folder / "address-to-be").rename(address)
        while not done.exists():
            agent.poll()
        assert memory.all()


if __name__ == "__main__":
    main()
