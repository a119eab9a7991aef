"""The ``vllm.general_plugins`` entry point: registers the engine ``etp`` in each of vLLM's processes.

vLLM calls it wherever both packages are installed, even in servers that receive no weights. In a release without an
adapter it therefore raises nothing and changes nothing, except that starting the engine ``etp`` fails.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.vllm.releases import check_known

ENGINE_NAME = "etp"


class RefusedEngine:
    """The engine ``etp`` in a vLLM release that has no adapter.

    Raises:
        UnsupportedEngineError: when vLLM starts it, with what is known of the release.
    """

    def __init__(self, *settings: Any) -> None:
        del settings
        import vllm

        check_known(vllm.__version__)


def register() -> None:
    """Registers the weight-transfer engine ``etp``; on CPUs, also applies the changes that vLLM needs there."""
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
        from megatron_patches.refit.vllm import patches

        patches.adapt_to_cpu()


def _register(*engine: Any) -> None:
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:  # a release without weight-transfer engines
        return
    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(ENGINE_NAME, *engine)


def _log_as_vllm_does() -> None:
    """Logs through vLLM's logger, whose handlers serve only its own children, so that operators see who pushes.

    As a child, because vLLM may configure its logger later.
    """
    ours = logging.getLogger("megatron_patches")
    ours.parent = logging.getLogger("vllm")
    ours.setLevel(logging.NOTSET)  # clears what the loggers below remember of levels
