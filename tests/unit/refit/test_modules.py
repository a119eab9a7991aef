"""What modules with names of their own are described as, and what is refused by its name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from etp.layout import ShardLayout
from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.source.live import MegatronSource
from megatron_patches.refit.source.modules import ModuleSource, describe_tensor, named_tensors
from megatron_patches.refit.source.weight_source import source_of


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("forgotten", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


NAMES = ["0.kept", "0.linear.weight", "0.linear.bias", "1.kept", "1.linear.weight", "1.linear.bias"]


def test_names_are_those_of_the_state_without_wrappers(group: None) -> None:
    bare = nn.Sequential(Block(), Block())
    assert sorted(bare.state_dict()) == sorted(NAMES)
    parts: list[Any] = [checkpoint_wrapper(Block()), torch.compile(Block())]
    wrapped = nn.Sequential(*parts)
    for model in (bare, wrapped, torch.compile(nn.parallel.DistributedDataParallel(wrapped))):
        held = ModuleSource(model, {}).describe(3)  # type: ignore[arg-type]
        assert sorted(held.shapes) == sorted(NAMES)
        assert held.manifest.rank == 3
        assert {one.name: one.numel for one in held.manifest.storages} == {
            name: torch.Size(shape).numel() for name, shape in held.shapes.items()
        }


def test_tied_weights_have_their_first_name() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    assert [name for name, _ in named_tensors(model)] == ["embed.weight"]


def test_memory_is_the_module_s_own_and_may_move() -> None:
    model = Block()
    source = ModuleSource(model, {})
    source.describe(0)
    for _ in range(2):
        for name, flat in source.look_up().items():
            tensor = model.get_parameter(name) if "linear" in name else model.get_buffer(name)
            assert isinstance(flat, torch.Tensor)
            assert flat.data_ptr() == tensor.data_ptr()
        model.linear.weight.data = torch.randn(5, 3)
        model.kept = torch.zeros(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "more", nn.Parameter(torch.ones(2))), r"described: more is new"),
        (lambda m: delattr(m, "kept"), r"described: kept is gone"),
        (lambda m: m.bfloat16(), r"described: kept was float32 .*, linear.bias was .*, linear.weight was float32 \(5"),
        (lambda m: m.linear.weight.untyped_storage().resize_(0), r"linear.weight has no memory now"),
    ],
)
def test_a_module_that_has_changed_is_not_sent(change: Callable[[Any], object], message: str) -> None:
    model = Block()
    source = ModuleSource(model, {})
    source.describe(0)
    change(model)
    for _ in range(2):  # it is not described anew by being looked up
        with pytest.raises(RefitError, match=message):
            source.look_up()


class OnlyPadding(nn.Parameter):
    """The shard of the last of four ranks, which have two rows."""

    layout = ShardLayout((2, 3), 4, 2)  # type: ignore[assignment]
    group = SimpleNamespace(rank=lambda: 3)


def test_a_shard_of_padding_alone_needs_no_memory() -> None:
    """Nothing of it is sent."""
    model = Block()
    model.padding = OnlyPadding(torch.randn(2, 3))
    source = ModuleSource(model, {})
    source.describe(0)
    memory = model.padding.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    try:
        assert sorted(source.look_up()) == ["kept", "linear.bias", "linear.weight"]
    finally:
        memory.resize_(size)  # pytest shows it if this fails


class Odd(nn.Parameter):
    """Of a kind of its own, as quantized weights are."""


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.empty(2, 3, device="meta"), "w is on the meta device, so there is no memory"),
        (torch.eye(3).to_sparse(), "w is a tensor of layout torch.sparse_coo"),
        (torch.ones(3, dtype=torch.complex64), "w is complex64, which no checkpoint can hold"),
        (torch.ones(0, 3), r"w has shape \(0, 3\), and so no elements"),
        (torch.ones(2, 3).t(), r"w is not contiguous in memory \(strides \(1, 3\)\)"),
        (Odd(torch.ones(3)), "w is of type Odd, neither a plain tensor nor a known shard"),
        (nn.parameter.UninitializedParameter(), "w is of type UninitializedParameter"),
    ],
)
def test_what_cannot_be_described_is_refused_by_name(tensor: torch.Tensor, message: str) -> None:
    with pytest.raises(RefitError, match=message):
        describe_tensor("w", tensor)


def test_placements_that_make_no_block_are_refused_by_name(group: None) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    good = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1), Shard(0)])
    assert describe_tensor("w", good).extent == (4, 6)
    assert describe_tensor("w", distribute_tensor(torch.ones(4), mesh, [Replicate(), Shard(0)])).extent == (4,)
    strange = DTensor.from_local(torch.ones(4), mesh, [_StridedShard(0, split_factor=3), Shard(0)], run_check=False)
    partial = DTensor.from_local(torch.ones(4), mesh, [Replicate(), Partial()], run_check=False)
    nested = DTensor.from_local(torch.ones(4), mesh, [Shard(0), _StridedShard(0, split_factor=2)], run_check=False)
    for bad in (strange, partial, nested):
        with pytest.raises(
            UnsupportedModelError, match=f"w is a DTensor with placements {re.escape(str(bad.placements))}"
        ):
            describe_tensor("w", bad)


def test_fsdp1_is_refused(group: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has one rank
        model = nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    with pytest.raises(UnsupportedModelError, match=r"0 is in FullyShardedDataParallel, .* use .*fully_shard"):
        ModuleSource(model, {})


def test_the_configuration_is_what_would_be_saved(group: None, tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 7, "head_dim": 4}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, rope_theta=77.0))
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    fully_shard(model)
    config = ModuleSource(model).describe(0).config
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert {name: value for name, value in config.items() if name != "dtype"} == {
        name: value for name, value in saved.items() if name != "dtype"
    }


def test_a_module_without_a_configuration_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"Linear has no configuration .* pass config=, .* vocab_size="):
        ModuleSource(nn.Linear(2, 2))


def test_arguments_say_which_kind_of_model_it_is() -> None:
    model = nn.Linear(2, 2)
    assert isinstance(source_of(model, 7, None, None), MegatronSource)
    assert isinstance(source_of([], 7, None, None), MegatronSource)
    assert isinstance(source_of(model, None, {}, None), ModuleSource)
    wrong: list[tuple[Any, str]] = [
        (([model], None, {}, None), "model is a list of chunks, as Megatron has them; pass vocab_size too"),
        ((model, 7, {}, None), "config is given, and vocab_size is 7"),
        ((model, None, {}, object()), "tp_group is given without vocab_size"),
    ]
    for arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            source_of(*arguments)
