"""The ``vllm.general_plugins`` entry point: registers the engine ``etp`` in each of vLLM's processes."""

from __future__ import annotations

ENGINE_NAME = "etp"


def register() -> None:
    """Registers the weight-transfer engine under ``etp``; on a CPU, also applies what vLLM needs there."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if ENGINE_NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            ENGINE_NAME, "megatron_patches.refit.vllm.engine", "EtpWeightTransferEngine"
        )
    if current_platform.is_cpu():
        from megatron_patches.refit.vllm import cpu

        cpu.apply()
