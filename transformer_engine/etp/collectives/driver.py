"""The CUDA driver calls that the copy-engine transport is made of, through ctypes.

PyTorch has no public call for a stream that waits for a value in memory, and dispatching a tensor copy costs several
times what the copy's launch does. None of these calls launches a kernel: copies from and to peers run on the copy
engines, values are waited for and written by the stream's front end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from etp.errors import EtpCommunicationError

_WAIT_VALUE_32 = 1
_WRITE_VALUE_32 = 2
# A wait is over when (int32)(value in memory - value) >= 0: sequence numbers may wrap around.
_WAIT_UNTIL_GREATER_OR_EQUAL = 0


class _MemoryOperation(ctypes.Structure):
    """``CUstreamBatchMemOpParams`` for a 32-bit wait or write; the driver's union is six 64-bit words."""

    _fields_ = (
        ("operation", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("_padding", ctypes.c_uint64),
    )


class CudaDriver:
    """Calls into ``libcuda``. A CUDA context must be current, as it is once torch has used the device.

    Raises:
        EtpCommunicationError: if the machine has no CUDA driver, or a call fails.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EtpCommunicationError(f"there is no CUDA driver on this machine: {error}") from error
        self._copy = self._library.cuMemcpyAsync
        self._copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)
        self._batch = self._library.cuStreamBatchMemOp_v2
        self._batch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy of ``nbytes`` between two device addresses, either of which may be a peer's."""
        self._check("cuMemcpyAsync", self._copy(destination, source, nbytes, stream))

    def wait_values(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Hold ``stream`` until the 32-bit word at each of this device's ``addresses`` has reached ``value``."""
        self._operate(_WAIT_VALUE_32, addresses, value, _WAIT_UNTIL_GREATER_OR_EQUAL, stream)

    def write_values(self, addresses: Sequence[int], value: int, stream: int) -> None:
        """Write ``value`` to each address, own or peer's, after all that ``stream`` did before is visible."""
        self._operate(_WRITE_VALUE_32, addresses, value, 0, stream)

    def _operate(self, operation: int, addresses: Sequence[int], value: int, flags: int, stream: int) -> None:
        count = len(addresses)
        operations = (_MemoryOperation * count)(
            *(_MemoryOperation(operation, address, value & 0xFFFFFFFF, flags, 0, 0) for address in addresses)
        )
        self._check("cuStreamBatchMemOp", self._batch(stream, count, ctypes.byref(operations), 0))

    def _check(self, call: str, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        raise EtpCommunicationError(f"{call} failed with CUDA error {status}: {(text.value or b'unknown').decode()}")
