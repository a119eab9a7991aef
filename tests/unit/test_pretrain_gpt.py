"""Which stages of a pipeline the example's training script gives data, and which share the word embeddings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from examples import pretrain_gpt

RANKS = [3, 8, 21]


@pytest.mark.parametrize(
    ("layout", "mtp_layers", "untied", "sharing", "with_data"),
    [
        (None, None, True, [3], [True, False, True]),
        (None, None, False, [3, 21], [True, False, True]),
        (None, 1, True, [3, 21], [True, False, True]),
        ("Ett|m|L", 1, True, [3, 8], [True, True, True]),
        ("Ett|m|L", 1, False, [3, 8, 21], [True, True, True]),
        ("Et|t|mL", 1, True, [3, 21], [True, False, True]),
    ],
)
def test_stages_with_mtp_layers_have_data_and_a_copy_of_the_embeddings(
    monkeypatch: pytest.MonkeyPatch,
    layout: str | None,
    mtp_layers: int | None,
    untied: bool,
    sharing: list[int],
    with_data: list[bool],
) -> None:
    stages = PipelineParallelLayerLayout(layout, len(RANKS)) if layout else None
    config = SimpleNamespace(pipeline_model_parallel_layout=stages, mtp_num_layers=mtp_layers)
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: SimpleNamespace(untie_embeddings_and_output_weights=untied))
    monkeypatch.setattr(pretrain_gpt, "core_transformer_config_from_args", lambda _: config)
    assert pretrain_gpt.embedding_ranks(RANKS) == sharing
    monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", len(RANKS))
    found = []
    for rank in range(len(RANKS)):
        monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)
        found.append(pretrain_gpt.needs_data(config, None))
    assert found == with_data
