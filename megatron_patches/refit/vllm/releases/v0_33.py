"""vLLM 0.33.0, for torch 2.14. Tested on CPUs with the kernels of 0.32.0's build, as it has none, and on one H200.

Differences from 0.32.0 that affect refit:

- Processing keeps parameters, and gives them other memory or new content; before, it made new ones.
- Some of a model's experts may be constants, which a checkpoint has under names of its own.
- Kernels for a whole layer may pack weights for themselves.
- Plugins may bring other ways to sleep.
- vLLM configures its log after it has loaded plugins.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.expert_substitution import get_expert_substitution_spec

from megatron_patches.refit.vllm.releases.v0_32 import Vllm032


class Vllm033(Vllm032):
    """vLLM 0.33.0."""

    names = (
        *Vllm032.names,
        "vllm.config:KernelConfig.monokernel",
        "vllm.config:ModelConfig.sleep_mode_backend",
    )

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also refuses constant experts, kernels that pack weights for themselves, and other ways to sleep."""
        yield from super().refusals(config)
        if config.model_config is not None and get_expert_substitution_spec(config.model_config) is not None:
            yield "some of its experts are constants (approximate_experts or expert_substitution in its config.json)"
        model = config.model_config
        if model is not None and model.enable_sleep_mode and model.sleep_mode_backend != "cumem":
            yield f"it would not show here whether they are asleep (--sleep-mode-backend {model.sleep_mode_backend})"
        if config.kernel_config.monokernel:
            yield "kernels for a whole layer pack its weights for themselves (--monokernel)"


ADAPTER = Vllm033()
