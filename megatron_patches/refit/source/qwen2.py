"""Dense Qwen2-like models: Llama's layout with biases on query, key and value only (``--add-qkv-bias``)."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_patches.refit.source.llama import LlamaFamily, common_config


class Qwen2Family(LlamaFamily):
    """``Qwen2ForCausalLM``."""

    @property
    def architecture(self) -> str:
        """Name of the class in ``transformers``."""
        return "Qwen2ForCausalLM"

    def config(self) -> Mapping[str, object]:
        """Content of ``config.json``, without the dtype."""
        return {
            "architectures": [self.architecture],
            "model_type": "qwen2",
            "use_sliding_window": False,
            **common_config(self.traits),
        }
