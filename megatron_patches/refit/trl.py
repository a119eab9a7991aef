"""Publishes weights from TRL's ``AsyncGRPOTrainer``: an implementation of its ``WeightTransferProtocol``.

The protocol is structural, so TRL is not imported. It hands over whole tensors, in the main process alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.trainer.engine_client import EngineClient, PauseMode, why_not_up
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.publisher import PublishHandle, WeightPublisher
from megatron_patches.refit.trainer.push_options import OnEngineFailure, RefitOptions

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

_POLL_S = 1.0


class EtpWeightTransfer:
    """Pass it to ``AsyncGRPOTrainer(weight_transfer=...)``, in every process; TRL uses that of the main process.

    Each sync is one version. The engines pause themselves, and only while they commit it, so :meth:`pause` does
    nothing: requests go on during the transfer. :meth:`resume` returns when the version serves, and only then does TRL
    count it as the policy. Requests in flight continue on the new weights, as with TRL's own transfer, or with
    ``RefitOptions(pause="wait")`` finish on the old ones first.

    The tensors are copied into memory that stays, so that it is registered with the transport once.

    Args:
        engines: URLs of the vLLM servers, or engines of other kinds.
        config: content of ``config.json``, with which engines compare their own; None to compare only names, shapes and
            dtypes.
        options: how to push. None for the defaults with :attr:`PauseMode.KEEP`: any engine that fails ends the
            training. With :attr:`OnEngineFailure.DROP` it continues as long as one engine serves the version.
        first_version: number of the first version, at least 0. With 1, versions are TRL's ``model_version``.
        startup_s: seconds that :meth:`init_weight_transfer` waits for engines that are still loading.
        device: where the copy of the weights is kept; None for the device of each tensor.

    Attributes:
        version: number of the last version that was sent; ``first_version - 1`` before.

    Raises:
        ValueError: if there is no engine, one is given twice or is no URL of a server, ``first_version`` is negative,
            or requests are to be aborted, which TRL would take for short answers.
    """

    def __init__(
        self,
        engines: str | Sequence[str | EngineClient],
        *,
        config: Mapping[str, Any] | None = None,
        options: RefitOptions | None = None,
        first_version: int = 1,
        startup_s: float = 240.0,
        device: torch.device | str | None = None,
    ) -> None:
        self._options = options or RefitOptions(pause=PauseMode.KEEP)
        given = [engines] if isinstance(engines, str) else engines
        self._engines = [HttpEngine(one, self._options.timeout_s) if isinstance(one, str) else one for one in given]
        names = [engine.name for engine in self._engines]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"engines is {names}; it must name at least one server, and each once")
        if first_version < 0:
            raise ValueError(f"first_version is {first_version}; versions begin with 0")
        if self._options.pause is PauseMode.ABORT:
            raise ValueError("options.pause is abort, and TRL would train on the aborted answers; use keep or wait")
        self.version = first_version - 1
        self._config, self._startup_s = dict(config or {}), startup_s
        self._copies = StayingCopies(device)
        self._group: ProcessGroup | None = None
        self._publisher: WeightPublisher | None = None
        self._handle: PublishHandle | None = None

    def init_weight_transfer(self) -> None:
        """Waits until all engines are up.

        Raises:
            RefitError: with the engine and the reason, if one is not up within ``startup_s`` seconds.
        """
        deadline = time.monotonic() + self._startup_s
        for engine in self._engines:
            while (reason := why_not_up(engine)) is not None:
                if time.monotonic() > deadline:
                    raise RefitError(f"{engine.name} was not up within {self._startup_s:g} s: {reason}")
                time.sleep(min(_POLL_S, self._startup_s))

    def pause(self) -> None:
        """Does nothing: each engine pauses itself while it commits."""

    def send_weights(self, iterator: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Sends a version. Engines have received and verified it when this returns; they commit it meanwhile.

        Args:
            iterator: names and whole tensors; the same names, shapes and dtypes in each sync.

        Raises:
            RefitError: if names, shapes or dtypes differ from the first sync's, or a tensor is given twice; or if an
                engine cannot be reached, refuses the model or fails, with its reason. Old weights serve.
        """
        if self._publisher is None:
            self._copies.free()  # those of an attempt that failed
        self._copies.take(iterator)
        self._publish()

    def _publish(self) -> None:
        if self._publisher is None:
            self._publisher = self._new_publisher()
        self.version += 1
        self._handle = self._publisher.publish(self.version)

    def resume(self) -> None:
        """Waits until the engines serve what was sent.

        Raises:
            PartyFailedError: if an engine does not, with its reason; with :attr:`OnEngineFailure.DROP`, if none does.
        """
        if self._handle is None:
            return
        report, self._handle = self._handle.result(), None
        report.check_served(all_must=self._options.on_engine_failure is OnEngineFailure.RAISE)

    def destroy(self) -> None:
        """Disconnects and frees the copies. Engines keep what they serve; another sync connects to them again."""
        import torch.distributed as dist

        publisher, self._publisher, self._handle = self._publisher, None, None
        self._copies.free()
        try:
            if publisher is not None:
                publisher.close()
        finally:
            if self._group is not None and dist.is_initialized():
                dist.destroy_process_group(self._group)
            self._group = None

    def _new_publisher(self) -> WeightPublisher:
        """A publisher of this process alone, whatever other processes train."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            self._group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        publisher = WeightPublisher(
            module_of(self._copies.tensors), config=self._config, options=self._options, group=self._group
        )
        for engine in self._engines:
            publisher.attach(engine)
        return publisher


class StayingCopies:
    """Copies of tensors in memory that stays from one sync to the next.

    Args:
        device: where they are; None for the device of each tensor.

    Attributes:
        tensors: the copies, by name.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._device = device
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors.

        Raises:
            RefitError: if names, shapes or dtypes differ from before, there is no tensor, or one is given twice.
        """
        import torch

        copies, is_first, given = self.tensors, not self.tensors, set[str]()
        if is_first:
            copies = {}
        for name, tensor in tensors:
            if name in given:
                raise RefitError(f"{name} was given twice")
            given.add(name)
            if is_first:
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device or tensor.device)
            copy = copies.get(name)
            now = f"{tensor.dtype} {tuple(tensor.shape)}"
            before = "absent" if copy is None else f"{copy.dtype} {tuple(copy.shape)}"
            if copy is None or now != before:
                raise RefitError(f"{name} is {now}; in the first sync it was {before}, and it must stay the same")
            copy.copy_(tensor.detach())
        if not given:
            raise RefitError("there are no tensors to send (TRL leaves out frozen parameters)")
        missing = sorted(copies.keys() - given)
        if missing:
            raise RefitError(f"{missing[0]} was in the first sync and is no more; {len(missing)} in all are missing")
        self.tensors = copies

    def free(self) -> None:
        """Lets go of the copies; the next sync makes others."""
        self.tensors = {}


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """A module whose state has these names, without copies."""
    from torch import nn

    root = nn.Module()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        part = root
        for step in path:
            # Not by add_module(), which refuses names of nn.Module's own attributes, such as "type".
            part = part._modules.setdefault(step, nn.Module())  # type: ignore[assignment]
        part._buffers[last] = tensor
    return root
