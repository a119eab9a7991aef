"""Publishes versions of a LoRA adapter to running engines, beside the weights that they serve.

Most of it is :class:`megatron_patches.refit.trainer.publisher.WeightPublisher`: an adapter is a few more tensors to
move, and what engines do with them is in :mod:`megatron_patches.refit.trainer.engine_client`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from megatron_patches.refit.control.adapter_names import ADAPTER_NAME, version_name
from megatron_patches.refit.control.exchange import together
from megatron_patches.refit.control.kv_scales import KVScalesOfLayers
from megatron_patches.refit.errors import RefitError
from megatron_patches.refit.layout.weight_format import WeightFormat
from megatron_patches.refit.memory.delta import PayloadKind
from megatron_patches.refit.source.adapter import AdapterSource
from megatron_patches.refit.trainer.engine_client import AdapterEngine, EngineClient
from megatron_patches.refit.trainer.engines import HttpEngine
from megatron_patches.refit.trainer.publisher import PublishHandle, WeightPublisher
from megatron_patches.refit.trainer.push_options import RefitOptions

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup


class AdapterPublisher(WeightPublisher):
    """Publishes a LoRA adapter of PEFT, as :class:`WeightPublisher` does weights. The base weights are not sent.

    Version 7 of the adapter ``math`` is the model ``math@7`` of a server, and requests choose it by that name. An
    engine commits a version without pausing. Every worker of it receives both factors of every module whole.

    Args:
        model: a model with the adapter, the same on every rank, under :func:`etp.shard_module`, or under
            ``fully_shard``; see :class:`megatron_patches.refit.source.adapter.AdapterSource`.
        name: name of the adapter in requests: letters, digits, and ``._-``.
        adapter: PEFT's name for the adapter.
        keep: how many versions requests may choose. The oldest ones beyond are dropped; requests that run on one
            finish.
        folder: absolute path of a folder on the engines' hosts. The workers of an engine write each version to a
            folder in it that only their user can read, from which vLLM loads it, and remove it after its last use.
        options: as for :class:`WeightPublisher`. ``pause`` and ``memory`` mean nothing here. ``fan_out``, deltas and
            quantized formats are refused.
        group: as for :class:`WeightPublisher`.

    Raises:
        UnsupportedModelError: if the model has no such adapter, or vLLM could not serve it as it is trained.
        RefitError: naming a module whose scale is not a finite number, or into whose weight the adapter is merged.
        ValueError: if the name, the folder or ``keep`` is invalid, or deltas, ``fan_out`` or a quantized format are
            asked for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        name: str,
        *,
        adapter: str = "default",
        keep: int = 2,
        folder: str = "/tmp",  # noqa: S108 - workers make a folder in it that is theirs alone
        options: RefitOptions | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if not re.fullmatch(ADAPTER_NAME, name):
            raise ValueError(f"the adapter's name is {name!r}; it must match {ADAPTER_NAME}")
        if keep < 1:
            raise ValueError(f"keep is {keep}; an engine keeps one version at least")
        if not folder.startswith("/"):
            raise ValueError(f"folder is {folder!r}; it must be an absolute path on the engines' hosts")
        if options is not None and options.fan_out:
            raise ValueError("fan_out is on; engines send each other no adapters, which are small")
        if options is not None and options.payload is PayloadKind.DELTA:
            raise ValueError("payload is delta; versions of an adapter are sent whole, with payload whole")
        if options is not None and options.weight_format.is_quantized:
            raise ValueError(
                f"weight_format is {options.weight_format}; an adapter's factors are sent as they are trained, with "
                f"weight_format {WeightFormat.TRAINED}"
            )
        self._adapter = AdapterSource(model, adapter)
        super().__init__(self._adapter, options=options, group=group)
        self._name, self._keep, self._folder = name, keep, folder

    def attach(self, engine: str | EngineClient) -> str:
        """Attaches an engine, as :meth:`WeightPublisher.attach` does.

        Args:
            engine: URL of a vLLM server that was started with ``--enable-lora`` and a guard. Or any engine client
                that is an :class:`megatron_patches.refit.trainer.engine_client.AdapterServer` too, and that no other
                publisher uses, such as a ``LocalEngine(llm)`` of its own.
        """
        client = HttpEngine(engine, self._options.timeout_s) if isinstance(engine, str) else engine
        return super().attach(AdapterEngine(client, self._name, self._keep, self._folder))

    def publish(self, version: int, *, kv_scales: KVScalesOfLayers | None = None) -> PublishHandle:
        """Sends the adapter, as :meth:`WeightPublisher.publish` sends weights. The base weights may change meanwhile.

        Raises:
            ValueError: as :meth:`WeightPublisher.publish`; or if scales are given, which belong to the base weights.
            RefitError: as :meth:`WeightPublisher.publish`; or on every rank, before anything is sent, if some rank
                cannot publish the adapter as it is now, for example because its scale is not a finite number.
        """
        if kv_scales is not None:
            raise ValueError("kv_scales is given; scales of a KV cache are published with weights")
        together(self._session.exchange, f"publishing {self.name_of(version)}", self._adapter.check, RefitError)
        return super().publish(version)

    def name_of(self, version: int) -> str:
        """The name by which requests choose a version."""
        return version_name(self._name, version)
