"""Receives versions in the serving memory, with a backup to restore."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_patches.refit.errors import LostWeightsError
from megatron_patches.refit.manifest import Storage
from megatron_patches.refit.vllm.backup import Backup
from megatron_patches.refit.vllm.layers import Layers


class InPlace:
    """One worker's memory that serves, as far as versions can be received in it, and a copy of all that they replace.

    Args:
        layers: of the model.
        storages: what the worker wants, in loader form.
        device: where the model is.

    Attributes:
        backup: the copy.
        begun: whether the memory holds something else than the version that served last.
    """

    def __init__(self, layers: Layers, storages: Sequence[Storage], device: torch.device) -> None:
        found = layers.in_loader_form([storage.name for storage in storages if storage.rule is None])
        self._serving = {
            storage.name: found[storage.name]
            for storage in storages
            if storage.name in found
            and found[storage.name].numel() == storage.numel
            and found[storage.name].dtype is getattr(torch, storage.dtype)
        }
        self.backup = Backup(layers.serving(sorted({storage.target for storage in storages})), device)
        self.begun = False

    def begin(self, timeout_s: float) -> dict[str, torch.Tensor]:
        """Makes sure of the copy; from now on the memory may be written to.

        Args:
            timeout_s: seconds to wait for a copy that is under way.

        Returns:
            Memory that serves, flat, by the names of the storages that can be received in it.

        Raises:
            RefitError: if there is no copy.
        """
        self.backup.finish(timeout_s)
        self.begun = True
        return dict(self._serving)

    def put_back(self, derive: Callable[[], None]) -> None:
        """Puts the version back that served last.

        Args:
            derive: computes anew what is derived from the weights and is not among the copies.

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
        """What the memory holds serves from now on; copies it meanwhile."""
        self.begun = False
        self.backup.start()
