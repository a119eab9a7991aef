"""What NeMo-RL's checkpoint engine reads from a policy and from names of actors, and refuses."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from megatron_patches.refit.errors import RefitError
from tests.support.nemo_rl_stand_in import create, documented, dtensor_params_generator, install

ENGINE = "megatron_patches.refit.nemo_rl"


@pytest.fixture(autouse=True)
def _nemo_rl() -> Iterator[None]:
    install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl" or name == ENGINE]:
        del sys.modules[name]


def test_the_documented_settings_make_an_engine_whose_part_in_vllm_yields_nothing() -> None:
    settings = documented()
    transport = settings["refit_transport"]
    options = settings["refit_cfg"][transport]
    options.pop("update_weights_bucket_memory_ratio")  # NeMo-RL makes it the bucket's size
    engine: Any = create(transport, 1 << 20, {"release_after_refit": False, **options})
    assert engine.version == -1

    async def received() -> list[Any]:
        return [batch async for batch in engine.receive_weight_batches()]

    engine.init_rollout_process_group(rollout_rank=0, train_world_size=1, rollout_world_size=1, metadata=[])
    assert asyncio.run(received()) == []
    engine.finalize()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"pause": "keep"}, "refit_cfg.pause is 'keep', but NeMo-RL itself decides"),
        ({"on_engine_failure": "drop"}, "refit_cfg.on_engine_failure is 'drop', but NeMo-RL uses all"),
        ({"lag_s": 1}, "refit_cfg.lag_s is 1, but no engine misses"),
        ({"no": 1}, "refit_cfg: .*'no'; it takes the options of RefitOptions"),
        ({"transport": "pigeon"}, "pigeon"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(option: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        create(f"{ENGINE}:EtpNemoRlCheckpointEngine", 1 << 20, option)


def test_the_module_is_found_before_a_tensor_is_gathered() -> None:
    from megatron_patches.refit.nemo_rl import module_behind

    weights = dtensor_params_generator(model := nn.Linear(2, 2), torch.bfloat16)
    assert module_behind(weights) is model
    assert next(weights)[0] == "weight"  # nothing was taken from it


class LoRA(nn.Linear):
    """As Automodel's LoRA names its parameters."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lora_A = nn.Linear(2, 1, bias=False)


class Converted(nn.Linear):
    """As Automodel's own models say how their tensors differ from a checkpoint's."""

    state_dict_adapter = "some"


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (lambda: iter([("weight", torch.ones(2))]), r"enabled=true in policy.dtensor_cfg"),
        (lambda: (("weight", tensor) for tensor in [torch.ones(2)]), r"enabled=true in policy.dtensor_cfg"),
        (lambda: dtensor_params_generator(LoRA(), torch.bfloat16), "lora_cfg.enabled=false"),
        (
            lambda: dtensor_params_generator(Converted(2, 2), torch.bfloat16),
            "Converted is Automodel's own .*force_hf=true",
        ),
    ],
)
def test_weights_that_are_not_the_modules_own_are_refused(weights: Any, said: str) -> None:
    engine = create(f"{ENGINE}:EtpNemoRlCheckpointEngine", 1 << 20, {})
    with pytest.raises(RefitError, match=said):
        asyncio.run(engine.send_weights(weights()))


def test_owners_of_engines_are_found_by_name() -> None:
    from megatron_patches.refit.nemo_rl import engine_sizes

    others = ["lm_policy-0-0", "lm_policy-grp0-0", "vllm_policy-0-0-more", "vllm_policy"]
    assert engine_sizes([*others, "vllm_policy-0-0", "vllm_policy-1-3"], 2, [1, 1]) == {
        "vllm_policy-0-0": 1,
        "vllm_policy-1-3": 1,
    }
    grouped = [f"vllm_policy-grp{group}-{rank}" for group in range(2) for rank in (1, 0)]
    assert engine_sizes(grouped, 4, [2] * 4) == {"vllm_policy-grp0-0": 2, "vllm_policy-grp1-0": 2}
    with pytest.raises(RefitError, match=r"own 2 workers of vLLM and NeMo-RL has 4; this release"):
        engine_sizes(grouped[:2], 4, [2] * 4)
    with pytest.raises(RefitError, match=r"groups of \[4\] processes .* \[2\] workers; set vllm_cfg.expert_parallel"):
        engine_sizes(grouped, 4, [4] * 4)
