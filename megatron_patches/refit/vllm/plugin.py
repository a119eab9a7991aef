"""The ``vllm.general_plugins`` entry point: registers the engine ``etp`` in each of vLLM's processes.

vLLM calls it wherever this package is installed beside it, also for servers that take no weights. It therefore changes
nothing in a release that it does not know, and raises nothing: there ``etp`` is an engine that cannot be started.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.vllm.releases import check_known

ENGINE_NAME = "etp"


class RefusedEngine:
    """What ``etp`` is in a release of vLLM that has no adapter.

    Raises:
        UnsupportedEngineError: when vLLM starts it, with what is known of the release.
    """

    def __init__(self, *settings: Any) -> None:
        del settings
        import vllm

        check_known(vllm.__version__)


def register() -> None:
    """Registers the weight-transfer engine under ``etp``; on a CPU, also applies what vLLM needs there."""
    import vllm

    try:
        check_known(vllm.__version__)
    except UnsupportedEngineError:
        _register(RefusedEngine)
        return
    _register("megatron_patches.refit.vllm.engine", "EtpWeightTransferEngine")
    from vllm.platforms import current_platform

    _log_as_vllm_does()
    if current_platform.is_cpu():
        from megatron_patches.refit.vllm import cpu

        cpu.apply()


def _register(*engine: Any) -> None:
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # a release that has no engines to choose from
        return
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, *engine)


def _log_as_vllm_does() -> None:
    """Lets an operator see who pushes what: vLLM's handlers are its own loggers' alone."""
    ours, vllm = logging.getLogger("megatron_patches"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.setLevel(vllm.level)
        for handler in vllm.handlers:
            ours.addHandler(handler)
