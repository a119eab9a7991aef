"""vLLM 0.33.0, for torch 2.14. Tested on CPUs with the kernels of 0.32.0's build, as it has none, and on one H200.

Differences from 0.32.0 that affect refit:

- Processing keeps parameters, and gives them other memory or new content; before, it made new ones.
- Some of a model's experts may be constants, which a checkpoint has under names of its own.
- Kernels for a whole layer may pack weights for themselves.
- vLLM configures its log after it has loaded plugins.
"""

from __future__ import annotations

from collections.abc import Iterator

from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.expert_substitution import get_expert_substitution_spec

from megatron_patches.refit.vllm.releases.v0_32 import Vllm032


class Vllm033(Vllm032):
    """vLLM 0.33.0."""

    names = (*Vllm032.names, "vllm.config:KernelConfig.monokernel")

    def refusals(self, config: VllmConfig) -> Iterator[str]:
        """Also refuses constant experts, and kernels that pack weights for themselves."""
        yield from super().refusals(config)
        if config.model_config is not None and get_expert_substitution_spec(config.model_config) is not None:
            yield "some of its experts are constants (approximate_experts or expert_substitution in its config.json)"
        if config.kernel_config.monokernel:
            yield "kernels for a whole layer pack its weights for themselves (--monokernel)"


ADAPTER = Vllm033()
