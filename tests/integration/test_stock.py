"""With every patch applied and ``--etp-size 1``, a training is bit by bit what it is without this package."""

from __future__ import annotations

import pytest

from tests.integration.cases import GPT2, LLAMA, MOE, SCHEDULE
from tests.integration.megatron_run import MegatronPool, train, train_without_patches
from tests.support.prepared import stock_megatron

pytestmark = [pytest.mark.integration, pytest.mark.multiproc]

# What the launcher sets by itself on a machine without CUDA; stock Megatron has to be told.
CPU_FLAGS = (
    "--distributed-backend gloo --transformer-impl local --use-cpu-initialization --attention-backend unfused "
    "--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion "
    "--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --num-workers 0"
)
MODELS = {
    "dense": f"{LLAMA} --hidden-dropout 0.1",
    "tied, biases, bf16": f"{GPT2} --bf16 --use-distributed-optimizer",
    "experts": f"{LLAMA} {MOE} --expert-model-parallel-size 2",
}


def test_one_shard_is_bitwise_stock() -> None:
    stock_pool, patched_pool = MegatronPool(stock_megatron), MegatronPool()
    try:
        for name, model in MODELS.items():
            arguments = tuple(f"{model} {SCHEDULE} {CPU_FLAGS}".split())
            stock = stock_pool.run(train_without_patches, 2, 240.0, (arguments,))
            patched = patched_pool.run(train, 2, 240.0, ((*arguments, "--etp-size", "1"),))
            for expected, found in zip(stock, patched, strict=True):
                assert len(expected.losses) == 20, name
                assert found.losses == expected.losses, name
                assert found.grad_norms == expected.grad_norms, name
                assert found.evaluations == expected.evaluations, name
                assert found.parameter_bytes == expected.parameter_bytes, name
    finally:
        stock_pool.close()
        patched_pool.close()
