"""A model's memory, looked up version after version while the model changes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_patches.refit.errors import RefitError, UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.memory.ports import Memory
from megatron_patches.refit.source import live
from megatron_patches.refit.source.describe import describe_model
from megatron_patches.refit.source.live import MegatronSource


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)
        self.register_buffer("bias", torch.randn(4))
        self.register_buffer("counts", torch.randn(4), persistent=False)

    def _maintain_float32_expert_bias(self) -> None:
        if "bias" in self._buffers:
            self.bias.data = self.bias.data.float()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(1), Layer(2)])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()
        self.output = nn.Linear(4, 6, bias=False, dtype=torch.bfloat16)
        self.tied = self.output.weight

    @property
    def first(self) -> Layer:
        layer = self.decoder.layers[0]
        assert isinstance(layer, Layer)
        return layer


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each description of the whole model."""
    calls: list[int] = []

    def count(*args: object) -> object:
        calls.append(1)
        return describe_model(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(live, "describe_model", count)
    return calls


def prepared(model: Model) -> MegatronSource:
    """The source of a model that was described."""
    source = MegatronSource([model], 6, None)
    source.prepare()
    return source


def check(found: Memory, model: nn.Module) -> None:
    """It is what a description of the model as it is now says."""
    expected = {item.shard.storage: item.memory for item in describe_model([model])}
    assert {name: flat.tolist() for name, flat in found.items()} == {n: flat.tolist() for n, flat in expected.items()}
    assert {name: flat.data_ptr() for name, flat in found.items()} == {  # type: ignore[union-attr]
        name: flat.data_ptr() for name, flat in expected.items()
    }


def test_values_and_memory_may_change(described: list[int]) -> None:
    model = Model()
    memory = prepared(model)
    check(memory.look_up(), model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    check(memory.look_up(), model)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = torch.randn(tensor.shape).to(tensor.dtype)
    check(memory.look_up(), model)
    assert len(described) == 1


def test_biases_of_routers_are_put_back_to_float32_each_time() -> None:
    model = Model()
    memory = prepared(model)
    for _ in range(3):
        model.bfloat16()
        assert model.first.bias.dtype == torch.bfloat16
        found = memory.look_up()
        assert model.first.bias.dtype == torch.float32
        check(found, model)


def _another_parameter(model: Model) -> None:
    model.first.linear.weight = nn.Parameter(torch.randn(4, 6, dtype=torch.bfloat16))


def _another_module(model: Model) -> None:
    model.first.linear = nn.Linear(6, 4, bias=False, dtype=torch.bfloat16)


def _another_buffer(model: Model) -> None:
    model.first.bias = torch.randn(4)


@pytest.mark.parametrize("change", [_another_parameter, _another_module, _another_buffer])
def test_other_tensors_of_the_same_form_are_found(change: Callable[[Model], None], described: list[int]) -> None:
    model = Model()
    memory = prepared(model)
    change(model)
    check(memory.look_up(), model)
    assert len(described) == 2
    check(memory.look_up(), model)
    assert len(described) == 2


def test_a_single_number_is_named() -> None:
    model = Model()
    model.first.register_buffer("steps", torch.tensor(3))
    with pytest.raises(UnmappedParameterError, match=r"decoder\.layers\.0\.steps, which is a single number"):
        prepared(model)


def test_parameters_on_the_host_beside_others_on_a_device_are_named() -> None:
    model = Model()
    memory = prepared(model)
    model.tied = model.output.weight = nn.Parameter(torch.empty(6, 4, dtype=torch.bfloat16, device="meta"))
    with pytest.raises(RefitError, match=r"decoder\.layers\.0\.linear\.weight \(and 3 more\) is in the host's memory"):
        memory.look_up()


def _another_shape(model: Model) -> None:
    model.first.linear.weight.data = torch.randn(8, 6, dtype=torch.bfloat16)


def _another_type(model: Model) -> None:
    model.first.linear.weight.data = torch.randn(4, 6)


def _transposed(model: Model) -> None:
    weight = model.first.linear.weight
    weight.data = weight.data.t().contiguous()


def _one_more(model: Model) -> None:
    model.first.register_parameter("added", nn.Parameter(torch.randn(3)))


def _one_less(model: Model) -> None:
    del model.first.bias


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_another_shape, r"layers\.0\.linear\.weight was bfloat16 \(4, 6\) and is bfloat16 \(8, 6\)"),
        (_another_type, r"layers\.0\.linear\.weight was bfloat16 \(4, 6\) and is float32 \(4, 6\)"),
        (_transposed, r"layers\.0\.linear\.weight was bfloat16 \(4, 6\) and is bfloat16 \(6, 4\)"),
        (_one_more, r"layers\.0\.added is new"),
        (_one_less, r"layers\.0\.bias is gone"),
    ],
)
def test_another_model_is_refused(change: Callable[[Model], None], said: str) -> None:
    model = Model()
    memory = prepared(model)
    memory.look_up()
    change(model)
    for _ in range(2):
        with pytest.raises(RefitError, match=rf"others than at prepare\(\): decoder\.{said}; call prepare\(\) again"):
            memory.look_up()


def test_memory_that_is_no_longer_contiguous_is_refused() -> None:
    model = Model()
    memory = prepared(model)
    model.first.linear.weight.data = torch.randn(6, 4, dtype=torch.bfloat16).t()
    with pytest.raises(RefitError, match="not contiguous"):
        memory.look_up()


def test_memory_that_was_let_go_of_is_not_read() -> None:
    """Weights may have been moved to the host, and their memory freed under the same parameter."""
    model = Model()
    memory = prepared(model)
    freed = model.first.linear.weight.untyped_storage()
    size = freed.nbytes()
    freed.resize_(0)
    with pytest.raises(RefitError, match=r"decoder\.layers\.0\.linear\.weight has no memory now.* bring it back"):
        memory.look_up()
    freed.resize_(size)
    model.first.linear.weight.data.copy_(torch.randn(4, 6))
    check(memory.look_up(), model)


def test_memory_that_is_replaced_between_two_pushes_becomes_free() -> None:
    """Weights may be moved to the host between two phases, so that their memory can be used for something else."""
    model = Model()
    weight = model.first.linear.weight
    memory = prepared(model)
    for _ in range(2):
        bits = np.random.default_rng(1).integers(0, 1000, (4, 6), dtype=np.int16)
        freed = weakref.ref(bits)
        weight.data = torch.from_numpy(bits).view(torch.bfloat16)
        del bits
        check(memory.look_up(), model)
        assert freed() is not None
        weight.data = torch.randn(4, 6, dtype=torch.bfloat16)
        assert freed() is None


class Marking(nn.Parameter):
    """Results of functions of it are of its class, as a shard's are of a class of their own."""

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
        return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]


def test_memory_is_plain_whatever_class_a_weight_is_of() -> None:
    model = Model()
    model.first.linear.weight = weight = Marking(torch.randn(4, 6, dtype=torch.bfloat16))
    assert type(weight.data) is Marking
    assert {type(live.memory) for live in describe_model([model])} == {torch.Tensor}
    memory = prepared(model)
    assert {type(flat) for flat in memory.look_up().values()} == {torch.Tensor}
    check(memory.look_up(), model)
    assert type(weight) is Marking
    assert weight.shape == (4, 6)


@pytest.mark.parametrize("tied", [True, False])
def test_an_output_layer_that_is_called_with_the_embedding_is_not_described(tied: bool) -> None:
    """As on a last stage with multi-token prediction, where Megatron makes both."""
    model = Model()
    model.add_module("embedding", nn.Embedding(6, 4))
    model.add_module("output_layer", nn.Linear(4, 6, bias=False))
    vars(model)["share_embeddings_and_output_weights"] = tied
    names = {item.shard.name for item in describe_model([model])}
    assert "embedding.weight" in names
    assert ("output_layer.weight" in names) != tied


def test_one_tensor_is_made_for_each_weight() -> None:
    """Each object that lives through a push brings Python's next full garbage collection closer."""
    memory = prepared(Model())

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    memory.look_up()
    before = tensors()
    found = memory.look_up()
    assert tensors() - before == len(found)


def test_a_weight_that_is_split_by_another_system_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model = Model()
        mesh = init_device_mesh("cpu", (1,))
        split = distribute_tensor(model.output.weight.data, mesh, [Shard(0)])
        model.output.weight = model.tied = nn.Parameter(split)
        with pytest.raises(UnsupportedModelError, match=r"tied is a DTensor, .* without --use-torch-fsdp2"):
            prepared(model)
    finally:
        dist.destroy_process_group()
