"""Receives versions in serving memory, with a backup to restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_patches.refit.errors import LostWeightsError
from megatron_patches.refit.layout.manifest import Storage
from megatron_patches.refit.vllm.backup import Backup
from megatron_patches.refit.vllm.layers import Layers


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
