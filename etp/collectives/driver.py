"""The CUDA driver calls that the engine needs and PyTorch does not have, through ctypes.

The copy-engine transport consists of copies, and of stream operations that wait for or write values in memory.
Dispatching a tensor copy would cost several times what the copy's launch does. None of these calls launches a kernel:
copies from and to peers run on the copy engines, and the stream's front end waits for and writes values. All of them
can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from etp.errors import EtpCommunicationError
from etp.stack import PitchedCopy

_WAIT_VALUE_32 = 1
_WRITE_VALUE_32 = 2
_WAIT_UNTIL_EQUAL = 1
_CAPTURE_ACTIVE = 1
_DEVICE_MEMORY = 2
_CAPTURE_MODE_RELAXED = 2


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


class MemoryOperations:
    """A batch of writes to and waits for 32-bit words in memory, made once and enqueued any number of times.

    Once all earlier work of the stream is visible, each word of ``raised``, own or a peer's, is set to ``value``. Then
    the stream waits until each word of ``taken``, on this device, is ``value``, and sets all of these to 0.
    """

    def __init__(self, value: int, *, raised: Sequence[int] = (), taken: Sequence[int] = ()) -> None:
        operations = [(_WRITE_VALUE_32, address, value, 0) for address in raised]
        operations += [(_WAIT_VALUE_32, address, value, _WAIT_UNTIL_EQUAL) for address in taken]
        operations += [(_WRITE_VALUE_32, address, 0, 0) for address in taken]
        self.count = len(operations)
        self.batch = (_MemoryOperation * self.count)(*(_MemoryOperation(*each, 0, 0) for each in operations))
        self.address = ctypes.addressof(self.batch)


class _PitchedCopy(ctypes.Structure):
    """``CUDA_MEMCPY2D``."""

    _fields_ = (
        ("source_x", ctypes.c_size_t),
        ("source_y", ctypes.c_size_t),
        ("source_kind", ctypes.c_uint),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("destination_x", ctypes.c_size_t),
        ("destination_y", ctypes.c_size_t),
        ("destination_kind", ctypes.c_uint),
        ("destination_host", ctypes.c_void_p),
        ("destination_device", ctypes.c_uint64),
        ("destination_array", ctypes.c_void_p),
        ("destination_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Copies:
    """Copies between device memories, either of which may be a peer's: made once and enqueued any number of times.

    Each takes one call, whatever its height. Sources may be relative to an address that is given with each call.
    """

    def __init__(self, copies: Sequence[PitchedCopy]) -> None:
        self.flat = [(copy.destination, copy.source, copy.width) for copy in copies if copy.height == 1]
        """Destination, source and bytes of those that are not pitched."""
        self.pitched = [
            (
                _PitchedCopy(
                    source_kind=_DEVICE_MEMORY,
                    source_pitch=copy.source_pitch,
                    destination_kind=_DEVICE_MEMORY,
                    destination_device=copy.destination,
                    destination_pitch=copy.destination_pitch,
                    width=copy.width,
                    height=copy.height,
                ),
                copy.source,
            )
            for copy in copies
            if copy.height > 1
        ]
        """The others, each without its source, and the source."""


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
        self._copy_2d = self._library.cuMemcpy2DAsync_v2
        self._copy_2d.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
        self._batch = self._library.cuStreamBatchMemOp_v2
        self._batch.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_void_p, ctypes.c_uint)
        self._capture_info = self._library.cuStreamGetCaptureInfo_v2
        self._capture_info.argtypes = (ctypes.c_void_p,) * 6

    def copy(self, copies: Copies, stream: int, origin: int = 0) -> None:
        """Enqueue the copies on ``stream``; ``origin``: what their sources are relative to."""
        for destination, source, nbytes in copies.flat:
            status = self._copy(destination, origin + source, nbytes, stream)
            if status:
                self._check("cuMemcpyAsync", status)
        for pitched, source in copies.pitched:
            pitched.source_device = origin + source
            status = self._copy_2d(ctypes.addressof(pitched), stream)
            if status:
                self._check("cuMemcpy2DAsync", status)

    def enqueue(self, operations: MemoryOperations, stream: int) -> None:
        """Enqueue the operations on ``stream``."""
        status = self._batch(stream, operations.count, operations.address, 0)
        if status:
            self._check("cuStreamBatchMemOp", status)

    def capture_id(self, stream: int) -> int | None:
        """Number of the capture that ``stream`` takes part in, unique in the process; None if it does not."""
        status, number = ctypes.c_int(), ctypes.c_uint64()
        result = self._capture_info(stream, ctypes.byref(status), ctypes.byref(number), None, None, None)
        self._check("cuStreamGetCaptureInfo", result)
        return number.value if status.value == _CAPTURE_ACTIVE else None

    def allow_calls_during_capture(self) -> None:
        """Let this thread query events while another thread captures, without ending that capture."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        self._check(
            "cuThreadExchangeStreamCaptureMode", self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        )

    def _check(self, call: str, status: int) -> None:
        if status == 0:
            return
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(text))
        raise EtpCommunicationError(f"{call} failed with CUDA error {status}: {(text.value or b'unknown').decode()}")
