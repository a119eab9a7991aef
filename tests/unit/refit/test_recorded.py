"""A loader's copies, recorded on tensors without memory, put every element where the loader itself puts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import UnmappedParameterError, UnsupportedModelError
from megatron_patches.refit.layout.boxes import TensorSpec
from megatron_patches.refit.layout.manifest import Manifest
from megatron_patches.refit.target.recorded import FillRecord, recorded_manifest
from megatron_patches.refit.vllm.recording import record_loading

Weights = Iterator[tuple[str, torch.Tensor]]
Load = Callable[[Weights], None]


def record(
    load: Load, parameters: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]
) -> tuple[Manifest, list[FillRecord]]:
    specs = [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()]
    before = {name: tensor.clone() for name, tensor in parameters.items()}
    done = record_loading(load, parameters, specs)
    assert all(torch.equal(parameters[name], before[name]) for name in parameters)  # nothing was written
    by_name = {spec.name: spec for spec in specs}
    return recorded_manifest(0, "host", done, by_name), done.fills


def placed(manifest: Manifest, tensors: dict[str, torch.Tensor], parameters: dict[str, torch.Tensor]) -> None:
    """Writes the tensors as the manifest says."""
    for placement in manifest.placements:
        view, box = placement.view, placement.box
        where = parameters[view.storage].as_strided(view.shape, view.strides, view.offset)
        where.copy_(tensors[box.tensor][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])


def check(
    load_into: Callable[[dict[str, torch.Tensor]], Load], tensors: dict[str, torch.Tensor], **shapes: int
) -> None:
    """The same loader, run on memory, is the oracle."""
    real = {name: torch.full((size,), -1.0) for name, size in shapes.items()}
    found = {name: torch.full((size,), -1.0) for name, size in shapes.items()}
    manifest, fills = record(load_into(found), found, tensors)
    placed(manifest, tensors, found)
    for fill in fills:
        region = fill.write
        found[fill.storage].as_strided(region.shape, region.strides, region.offset).fill_(fill.value)
    load_into(real)(iter(tensors.items()))
    assert all(torch.equal(found[name], real[name]) for name in real)


def numbered(*shape: int) -> torch.Tensor:
    return torch.randperm(torch.Size(shape).numel()).float().view(shape)


def kinds_after(steps: list[tuple[str, tuple[int, ...]]]) -> list[str]:
    """What may be done to a view next: a cut of flattened dimensions is no box."""
    kinds = ["transpose", "unsqueeze", "flatten", "clone"]
    return kinds if any(kind == "flatten" for kind, _ in steps) else ["narrow", *kinds]


@settings(max_examples=300, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_chain_of_views_is_followed(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    source = numbered(*shape)
    steps: list[tuple[str, tuple[int, ...]]] = []
    view = source
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(kinds_after(steps)))
        dim = data.draw(st.integers(0, view.dim() - 1))
        args: tuple[int, ...] = (dim,)
        if kind == "narrow":
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            args = dim, start, data.draw(st.integers(1, view.shape[dim] - start))
        elif kind == "transpose":
            args = dim, data.draw(st.integers(0, view.dim() - 1))
        elif kind == "flatten":
            if dim + 1 >= view.dim() or view.stride(dim) != view.shape[dim + 1] * view.stride(dim + 1):
                continue  # would copy
            args = dim, dim + 1
        elif kind == "clone":
            args = ()
        steps.append((kind, args))
        view = getattr(view, kind)(*args)
        if kind == "clone":
            break  # a cut of a copy is refused
    offset = data.draw(st.integers(0, 3))
    shuffled = data.draw(st.permutations(range(view.dim())))

    def load_into(parameters: dict[str, torch.Tensor]) -> Load:
        def load(weights: Weights) -> None:
            for _, given_tensor in weights:
                tensor = given_tensor
                for kind, args in steps:
                    tensor = getattr(tensor, kind)(*args)
                whole = parameters["p"]
                target = whole[offset : offset + tensor.numel()].view([tensor.shape[d] for d in shuffled])
                target.permute([shuffled.index(d) for d in range(tensor.dim())]).copy_(tensor)
                whole[:offset].fill_(7.0)
                whole[offset + tensor.numel() :].zero_()

        return load

    check(load_into, {"t": source}, p=offset + view.numel() + 2)


def test_repeated_elements_are_written_everywhere() -> None:
    def load_into(parameters: dict[str, torch.Tensor]) -> Load:
        def load(weights: Weights) -> None:
            for _, tensor in weights:
                parameters["p"].view(3, 4, 5).copy_(tensor.view(4, 1))

        return load

    check(load_into, {"t": numbered(4)}, p=60)


def test_padding_may_be_none() -> None:
    def load_into(parameters: dict[str, torch.Tensor]) -> Load:
        def load(weights: Weights) -> None:
            for _, tensor in weights:
                parameters["p"][3:3].fill_(0.0)
                parameters["p"].copy_(tensor)

        return load

    check(load_into, {"t": numbered(6)}, p=6)


@pytest.mark.parametrize("start", [2, 6])
def test_a_part_may_be_only_padding(start: int) -> None:
    def load_into(parameters: dict[str, torch.Tensor]) -> Load:
        def load(weights: Weights) -> None:
            for _, tensor in weights:
                part = tensor.narrow(0, start, 0)  # as vLLM's loader of a vocabulary takes it
                parameters["p"].view(4, 3)[: part.shape[0]].copy_(part)
                parameters["p"].view(4, 3)[part.shape[0] :].fill_(0.0)

        return load

    check(load_into, {"t": numbered(6, 3)}, p=12)
    found = {"p": torch.full((12,), -1.0)}
    manifest, _ = record(load_into(found), found, {"t": numbered(6, 3)})
    assert not manifest.placements


def test_what_the_loader_leaves_is_named() -> None:
    def load(weights: Weights) -> None:
        for _, tensor in weights:
            parameters["p"][:6].copy_(tensor)

    parameters = {"p": torch.zeros(8)}
    with pytest.raises(UnmappedParameterError, match=r"left 2 of the 8 elements of p as they were, the first at 6"):
        record(load, parameters, {"t": numbered(6)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t, p: p.copy_(t.exp().cumsum(0)), r"puts exp, aten\.cumsum\.default of t into p"),
        (lambda t, p: p.copy_(-t.cumsum(0)), r"puts aten\.cumsum\.default, aten\.neg\.default of t into p"),
        (lambda t, p: p.copy_(t.clone().neg_()), r"puts aten\.neg_\.default of t into p"),
        (lambda t, p: p.copy_(t.mul_(2.0)), r"puts aten\.mul_\.Tensor of t into p"),
        (lambda t, p: p.copy_(t * t), r"puts aten\.mul\.Tensor of t into p"),
        (lambda t, p: p.copy_(t.view(1, 6) * torch.ones(2, 1, device="meta"))[:1], r"puts aten\.mul\.Tensor of t"),
        (lambda t, p: p.copy_(torch.bernoulli(t)), r"puts aten\.bernoulli\.default of t into p"),
        (lambda t, p: torch.exp(t, out=p), r"changes p with aten\.exp\.out"),
        (lambda t, p: (p.copy_(t), p[:4].copy_(p[:4].exp())), r"reads elements of p back \(offset 0, shape \(4,\)\)"),
        (lambda t, p: p.copy_(t.clone()[:].flip(0)), r"of t into p"),
        (lambda _, p: p.copy_(torch.ones(6)), r"puts values of its own into p"),
        (lambda t, p: p.add_(t), r"changes p with aten\.add_"),
        (lambda t, p: p.copy_(torch.cat([t, t])[3:9]), r"puts aten\.cat\.default of t into p"),
        (lambda t, p: p[::2].copy_(t[::2]), r"are no box of it"),
        (lambda t, p: (p.zero_(), p.copy_(t)), r"fills elements of p before it copies to them"),
        (lambda t, p: (p.copy_(t), p[5:].fill_(2.0), p.copy_(p.exp())), r"reads elements of p back \(offset 0, "),
    ],
)
def test_other_than_copies_are_refused(
    change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], reason: str
) -> None:
    def load(weights: Weights) -> None:
        for _, tensor in weights:
            change(tensor, parameters["p"])

    parameters = {"p": torch.zeros(6)}
    with pytest.raises(UnsupportedModelError, match=reason):
        record(load, parameters, {"t": numbered(6)})
