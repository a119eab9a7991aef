"""The memory in which a worker receives a version: newly allocated, or the serving memory, with a backup to restore.

[Note: base] A version may be sent relative to the one that serves. Most weights serve exactly as they arrived, so they
are their own base. Of the others (converted, processed, or sharing memory), a copy is kept as it arrived.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from vllm.device_allocator.cumem import CuMemAllocator

from megatron_patches.refit.errors import LostWeightsError, RefitError
from megatron_patches.refit.layout.manifest import Manifest, Storage
from megatron_patches.refit.memory.delta import Base, PayloadKind
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.vllm.layers import Layers
from megatron_patches.refit.vllm.swap import span_of

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 256 << 20  # a power of two, as torch rounds pinned memory up to one


class Backup:
    """Copies whole spans of memory, so that it does not matter how tensors share them.

    Args:
        tensors: what to copy; they may share memory.
        device: where they are.

    Attributes:
        nbytes: size of the copy.

    Raises:
        RuntimeError: if the host has not enough memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        self._device = device
        self._stretches = list(_stretches(tensors))
        self.nbytes = sum(stretch.numel() for stretch in self._stretches)
        self._host = [
            torch.empty(min(_CHUNK_BYTES, self.nbytes - start), dtype=torch.uint8, pin_memory=device.type == "cuda")
            for start in range(0, self.nbytes, _CHUNK_BYTES)
        ]
        self._is_complete = False
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts to copy the serving weights while they serve."""
        self._is_complete, self._failure = False, None  # first: the next lines may fail, and the copy is outdated
        self._await_device()
        thread = threading.Thread(target=self._run, name="refit-backup", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError as error:  # the system has no more threads: finish() makes the copy
            self._thread, self._failure = None, error

    def finish(self, timeout_s: float) -> None:
        """Waits until the copy is complete. Copies again if the copy failed.

        Raises:
            RefitError: if the copy is not complete in time, or fails again.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise RefitError(f"the copy of {self.nbytes} bytes of weights took more than {timeout_s:.0f} s")
        if not self._is_complete:
            self._run()
        if self._failure is not None:
            raise RefitError(f"the weights that serve could not be copied ({self._failure})") from self._failure

    def restore(self) -> None:
        """Restores the weights from the copy. Returns once that has ended and no earlier operation still writes.

        Raises:
            RefitError: if there is no complete copy.
        """
        if not self._is_complete:
            raise RefitError("there is no complete copy of the weights that served")
        self._await_device()
        with torch.no_grad():
            for serving, copy in self._parts():
                serving.copy_(copy, non_blocking=True)
        self._await_device()

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream(self._device)):
                    self._copy()
                    torch.cuda.current_stream().synchronize()
            else:
                self._copy()
            self._is_complete, self._failure = True, None
        except Exception as error:  # noqa: BLE001 - raised when the copy is needed
            self._failure = error

    def _copy(self) -> None:
        with torch.no_grad():
            for serving, copy in self._parts():
                copy.copy_(serving, non_blocking=True)

    def _parts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces of serving memory, each with its copy."""
        chunk, offset = 0, 0
        for stretch in self._stretches:
            done = 0
            while done < stretch.numel():
                count = min(stretch.numel() - done, self._host[chunk].numel() - offset)
                yield stretch[done : done + count], self._host[chunk][offset : offset + count]
                done, offset = done + count, offset + count
                if offset == self._host[chunk].numel():
                    chunk, offset = chunk + 1, 0

    def _await_device(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def _stretches(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The memory of tensors as flat byte tensors. Every byte occurs once."""
    spans = sorted(((span_of(tensor), tensor) for tensor in tensors if tensor.numel()), key=lambda item: item[0])
    index = 0
    while index < len(spans):
        (storage, low, high), tensor = spans[index]
        index += 1
        while index < len(spans) and spans[index][0][0] == storage and spans[index][0][1] <= high:
            high = max(high, spans[index][0][2])
            index += 1
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        yield whole.set_(tensor.untyped_storage(), low, (high - low,), (1,))


def serving_storages(layers: Layers, storages: Sequence[Storage]) -> dict[str, torch.Tensor]:
    """Flat serving memory of the storages that have exactly the form in which their elements arrive, by name.

    Args:
        layers: layers of the model.
        storages: what the worker wants, in loader form.
    """
    found = layers.in_loader_form([storage.name for storage in storages if storage.rule is None])
    return {
        storage.name: found[storage.name]
        for storage in storages
        if storage.name in found
        and found[storage.name].numel() == storage.numel
        and found[storage.name].dtype is getattr(torch, storage.dtype)
    }


class InPlace:
    """The serving memory of one worker in which versions can be received, and a backup of everything they replace.

    Args:
        layers: layers of the model.
        storages: what the worker wants, in loader form.
        device: where the model is.

    Attributes:
        backup: the backup.
        begun: whether the memory may differ from the last version that served.
    """

    def __init__(self, layers: Layers, storages: Sequence[Storage], device: torch.device) -> None:
        self._serving = serving_storages(layers, storages)
        self.backup = Backup(layers.serving(sorted({storage.target for storage in storages})), device)
        self.begun = False

    def begin(self, timeout_s: float) -> dict[str, torch.Tensor]:
        """Waits for the backup. The memory may be written to afterwards.

        Args:
            timeout_s: seconds to wait for a backup that is under way.

        Returns:
            Flat serving memory, by name of the storages that can be received in it.

        Raises:
            RefitError: if there is no backup.
        """
        self.backup.finish(timeout_s)
        self.begun = True
        return dict(self._serving)

    def put_back(self, derive: Callable[[], None]) -> None:
        """Restores the last version that served.

        Args:
            derive: recomputes what is derived from the weights and is not in the backup.

        Raises:
            LostWeightsError: if that fails; it may be tried again.
        """
        try:
            self.backup.restore()
            derive()
        except Exception as error:
            raise LostWeightsError(f"the weights that served cannot be put back: {error}") from error
        self.begun = False

    def done(self) -> None:
        """The received version serves from now on; starts to back it up."""
        self.begun = False
        self.backup.start()


class VersionMemory:
    """Makes memory for successive versions.

    Of an engine in vLLM's sleep mode, which may share its GPU with a trainer, it logs what a version takes.

    Args:
        manifest: what the worker wants.
        device: where versions are received.
        in_place: serving memory in which versions are received; None to allocate all memory.
        layers: the model's layers; None if nothing serves as it arrives.
        payload: what versions travel as.

    Attributes:
        beside_bytes: size of the memory that was last allocated beside the serving weights.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device,
        in_place: InPlace | None = None,
        layers: Layers | None = None,
        payload: PayloadKind = PayloadKind.WHOLE,
    ) -> None:
        self._storages, self._device, self._in_place, self._layers = manifest.storages, device, in_place, layers
        self._keeps_base = payload is PayloadKind.DELTA
        self.beside_bytes = 0
        self._version = -1  # number of the base; -1 for none
        self._copies: dict[str, torch.Tensor] = {}  # of the base
        self._next: dict[str, torch.Tensor] = {}  # of the version that may become the base
        self._used_gib: dict[str, float] = {}  # of the GPU, by all processes, at each stage of a version

    def make(self, timeout_s: float) -> dict[str, torch.Tensor]:
        """Makes memory for the next version. In place, the serving weights may be overwritten from now on.

        Args:
            timeout_s: seconds to wait for the backup of the serving weights.

        Returns:
            Flat tensors in the arriving dtypes, by storage.

        Raises:
            RefitError: if there is no backup, or the device has too little memory.
        """
        self._note_use("before")
        self._next = {}
        made = self._in_place.begin(timeout_s) if self._in_place is not None else {}
        beside = {
            storage.name: (storage.numel, getattr(torch, storage.dtype))
            for storage in self._storages
            if storage.name not in made
        }
        self.beside_bytes = sum(numel * dtype.itemsize for numel, dtype in beside.values())
        try:
            for name, (numel, dtype) in beside.items():
                made[name] = torch.empty(numel, dtype=dtype, device=self._device)
        except torch.OutOfMemoryError as error:
            in_place = ", or push with the memory mode in_place" if self._in_place is None else ""
            raise RefitError(
                f"{self._device} has no room for {self.beside_bytes / 2**30:.2f} GiB of new weights beside those that "
                f"serve; start vLLM with a lower --gpu-memory-utilization{in_place}"
            ) from error
        self._note_use("with both")
        return made

    def keep(self, made: FlatMemory) -> None:
        """Copies the part of a base that will not serve as it arrived, before anything processes the version."""
        if self._keeps_base:
            served = self._served()
            self._next = {name: tensor.clone() for name, tensor in made.items() if name not in served}

    def committed(self, version: int) -> None:
        """The version of the last :meth:`keep` serves from now on, and the replaced weights are freed.

        Their memory is given back if a KV cache that wakes up, or a trainer, may need it.
        """
        if self._may_sleep:
            torch.cuda.empty_cache()
            self._note_use("now")
            stages = ", ".join(f"{gib:.2f} {when}" for when, gib in self._used_gib.items())
            logger.info("refit: version %d: GiB of %s in use: %s", version, self._device, stages)
        if self._keeps_base:
            self._version, self._copies, self._next = version, self._next, {}

    def base(self) -> Base | None:
        """The version that serves, as it arrived; None if none was kept. See [Note: base]."""
        return None if self._version < 0 else Base(self._version, {**self._served(), **self._copies})

    def _served(self) -> dict[str, torch.Tensor]:
        """Storages that serve as they arrive."""
        layers = self._layers
        if layers is None:
            return {}
        found = serving_storages(layers, self._storages)
        return {name: memory for name, memory in found.items() if layers.is_plain(name)}

    @property
    def _may_sleep(self) -> bool:
        return self._device.type == "cuda" and CuMemAllocator.instance is not None

    def _note_use(self, when: str) -> None:
        if self._may_sleep:
            free, total = torch.cuda.mem_get_info(self._device)
            self._used_gib[when] = (total - free) / 2**30
