"""A program whose engines are Ray actors: publishes versions, and prints what the engines hold and answer, as JSON.

Run as ``python -m tests.integration.ray_publishing FOLDER``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_patches.refit import OnEngineFailure, RefitOptions, WeightPublisher
from megatron_patches.refit.ray_engine import RayEngine, RefitActor
from tests.integration.live_refit import PROMPTS
from tests.integration.tiny_models import QWEN3
from tests.support.prepared import vllm_on_cpu
from tests.support.ray_program import start_ray
from tests.support.vllm_digests import digests_of
from tests.support.vllm_host import LLM_OPTIONS


class Generator(RefitActor):
    """An engine, and what it holds and answers."""

    def __init__(self, model: str) -> None:
        vllm_on_cpu()
        from vllm import LLM

        super().__init__(LLM(model=model, distributed_executor_backend="uni", **LLM_OPTIONS))

    def found(self) -> list[Any]:
        """Digests of all weights, and the tokens that follow each prompt."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False)
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in PROMPTS]
        answers = self.llm.generate(prompts, sampling, use_tqdm=False)
        return [self.llm.collective_rpc(digests_of), [list(answer.outputs[0].token_ids) for answer in answers]]


def build(seed: int) -> Any:
    """A tiny Qwen3 with random weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    settings = {key: value for key, value in QWEN3.items() if key not in {"model_type", "architectures"}}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(str(QWEN3["model_type"]), **settings)).bfloat16()


def main(folder: Path) -> None:
    """Publishes one version to an engine, and one after an engine was killed."""
    import ray

    for seed in (0, 1):
        build(seed).save_pretrained(folder / f"model_{seed}")
    start_ray(2)
    actor = ray.remote(num_cpus=1)(Generator)
    first, other = (actor.remote(str(folder / f"model_{seed}")) for seed in (0, 1))
    fresh = ray.get(other.found.remote())
    before = ray.get(first.found.remote())
    with WeightPublisher(
        build(1), options=RefitOptions(timeout_s=20.0, on_engine_failure=OnEngineFailure.DROP)
    ) as publisher:
        for name, handle in (("first", first), ("other", other)):
            publisher.attach(RayEngine(handle, name, timeout_s=20.0))
        fates = {name: one.fate for name, one in publisher.publish(1).result(60.0).engines.items()}
        after = ray.get(first.found.remote())
        ray.kill(other)
        report = publisher.publish(2).result(60.0)
        reasons = {name: one.reason for name, one in report.engines.items()}
        served = {name: one.fate for name, one in report.engines.items()}
    found = {"before": before, "after": after, "fresh": fresh, "fates": fates, "served": served, "reasons": reasons}
    (folder / "found.json").write_text(json.dumps(found))
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
