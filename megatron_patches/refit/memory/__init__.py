"""Bytes in the memory of one process: packed, unpacked, compared and staged, on a CPU and on a GPU."""
