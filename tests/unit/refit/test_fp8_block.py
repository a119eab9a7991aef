"""Block FP8 at the source, against a loop over the blocks of the whole tensors in float64."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import accumulate, pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef

from etp.formats import quantize_blocks, scale_of
from megatron_patches.refit.control.exchange import Exchange
from megatron_patches.refit.control.messages import Held
from megatron_patches.refit.errors import RefitError, UnsupportedModelError
from megatron_patches.refit.layout.boxes import Box, View, row_major_strides
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.layout.weight_format import (
    WeightFormat,
    quantization_config,
    quantized_weights,
    scales_of,
    with_scales,
)
from megatron_patches.refit.memory.ports import FlatMemory
from megatron_patches.refit.planning.tensors import agree_on_tensors
from megatron_patches.refit.source import block_parts, block_quantizer
from megatron_patches.refit.source.block_parts import BlockPart, HostParts, KernelParts, _grouped
from megatron_patches.refit.source.block_quantizer import BlockQuantizer
from megatron_patches.refit.source.fp8_block import Fp8BlockSource
from megatron_patches.refit.source.modules import ModuleSource
from tests.support.e4m3 import is_near
from tests.support.launch import run_distributed
from tests.support.quick import examples

CPU = torch.device("cpu")
WEIGHT = "model.layers.3.mlp.down_proj.weight"


class Meeting:
    """Ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.given = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=20.0)

    def all_of[T](self, rank: int, value: T) -> list[T]:
        self.given[rank] = value  # type: ignore[call-overload]
        self._barrier.wait()
        found = list(self.given)
        self._barrier.wait()
        return found  # type: ignore[return-value]


class Member(Exchange):
    """One of them; counts what it sends."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, meeting.size
        self.sent: list[int] = []

    def gather[T](self, value: T) -> list[T]:
        return self._meeting.all_of(self.rank, value)

    def take_largest(self, values: torch.Tensor) -> None:
        self.sent.append(values.numel())
        values.copy_(torch.stack(self._meeting.all_of(self.rank, values.clone())).amax(0))


def members(size: int) -> list[Member]:
    meeting = Meeting(size)
    return [Member(meeting, rank) for rank in range(size)]


def in_all[T](work: Iterable[T], do: Callable[[T], None]) -> None:
    """Does something with each rank's part, all at once."""
    parts = list(work)
    with ThreadPoolExecutor(len(parts)) as pool:
        for _ in pool.map(do, parts):
            pass


def reference(weight: torch.Tensor, *, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 numbers as bytes and the scales of a whole weight, block by block."""
    rows, columns = weight.shape
    data = torch.zeros(rows, columns, dtype=torch.uint8)
    scales = torch.zeros(-(-rows // 128), -(-columns // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[at].double()
            scale = np.float32(448) / np.float32(float(block.abs().max())) if bool(block.any()) else np.float32(1)
            if power_of_two:
                scale = np.float32(2.0 ** np.floor(np.log2(float(scale))))
            scaled = (block * float(scale)).float().clamp(-448, 448)
            data[at] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
            scales[i, j] = float(np.float32(1) / scale)
    return data, scales


def uneven(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Numbers whose magnitude differs from place to place, with a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(3).exp2()
    weight[:128, :128] = 0
    return weight.to(dtype)


def held_by(
    rank: int, weights: Mapping[str, torch.Tensor], boxes: list[Box], padding: int = 5
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Boxes of some weights, one after another in a memory for each weight, with NaN behind them."""
    storages, placements, memory = [], [], {}
    for name in dict.fromkeys(box.tensor for box in boxes):
        mine = [box for box in boxes if box.tensor == name]
        *offsets, total = accumulate((box.volume for box in mine), initial=0)
        flat = torch.full((total + padding,), float("nan"), dtype=weights[name].dtype)
        for box, offset in zip(mine, offsets, strict=True):
            view = View(f"memory of {name}", offset, box.shape, row_major_strides(box.shape))
            view.tensor(flat).copy_(weights[name][tuple(map(slice, box.start, box.stop))])
            placements.append(Placement(box, view))
        dtype = str(flat.dtype).removeprefix("torch.")
        storages.append(Storage(f"memory of {name}", dtype, total + padding, total))
        memory[f"memory of {name}"] = flat
    return Manifest(rank, "host", tuple(storages), tuple(placements)), memory


def quantizer(
    weights: Mapping[str, torch.Tensor], held: Manifest, member: Member, *, power_of_two: bool = True
) -> BlockQuantizer:
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return BlockQuantizer(shapes, held, power_of_two=power_of_two, device=CPU, exchange=member)


def run(one: BlockQuantizer, memory: FlatMemory) -> None:
    one.measure(memory)
    one.agree()
    one.cast(memory)
    one.check()


def check(one: BlockQuantizer, wanted: Mapping[str, torch.Tensor]) -> int:
    """Compares everything that a rank holds after quantization, where it says it is; returns how many boxes."""
    for placement in one.manifest.placements:
        box = placement.box
        found = placement.view.tensor(one.quantized[placement.view.storage])
        found = found.view(torch.uint8) if found.dtype == torch.float8_e4m3fn else found
        assert torch.equal(found, wanted[box.tensor][tuple(map(slice, box.start, box.stop))]), box
    return len(one.manifest.placements)


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_ranks_that_cut_blocks_quantize_them_as_one_would(
    power_of_two: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random cuts of rows and columns, several boxes a rank, changed weights, memory of another version in place."""
    generator = np.random.default_rng(7)
    for case in range(4):
        monkeypatch.setattr(block_parts, "_CHUNK", (1 << 18, 1 << 16, 1, 1 << 24)[case])  # of one block or more
        shape = tuple(int(extent) for extent in generator.integers(60, 420, 2))
        cuts = [[0, *sorted(int(cut) for cut in generator.integers(1, extent, 3)), extent] for extent in shape]
        boxes = [
            Box(WEIGHT, (a, c), (b, d)) for a, b in pairwise(cuts[0]) for c, d in pairwise(cuts[1]) if a < b and c < d
        ]
        boxes = [boxes[at] for at in generator.permutation(len(boxes))]
        ranks = [boxes[rank::3] for rank in range(3)]
        given = members(3)
        quantizers: list[BlockQuantizer] = []
        for version in range(2):
            weights = {WEIGHT: uneven(shape, 10 * case + version, dtype)}
            held = [held_by(rank, weights, mine) for rank, mine in enumerate(ranks)]
            if not quantizers:
                quantizers = [
                    quantizer(weights, manifest, member, power_of_two=power_of_two)
                    for (manifest, _), member in zip(held, given, strict=True)
                ]
            for one in quantizers:
                for memory in one.quantized.values():
                    memory.view(torch.uint8).fill_(0x55)
            in_all(
                list(zip(quantizers, (memory for _, memory in held), strict=True)), lambda pair: run(pair[0], pair[1])
            )
            data, scales = reference(weights[WEIGHT], power_of_two=power_of_two)
            wanted = {WEIGHT: data, scales_of(WEIGHT): scales}
            assert sum(check(one, wanted) for one in quantizers) > len(boxes)
        # Every scale is held, and all holders agree on types and shapes.
        specs = agree_on_tensors(with_scales({WEIGHT: shape}), [one.manifest for one in quantizers])
        assert [spec.dtype for spec in specs] == ["float8_e4m3fn", "float32"]
        assert all(member.sent == given[0].sent and len(member.sent) <= 2 for member in given)


def test_boxes_of_one_form_may_share_blocks() -> None:
    """Of 128 rows each, that begin in the middle of a block."""
    weights = {WEIGHT: uneven((64 + 3 * 128, 128), 5)}
    boxes = [Box(WEIGHT, (low, 0), (low + 128, 128)) for low in (64, 192, 320)] + [Box(WEIGHT, (0, 0), (64, 128))]
    manifest, memory = held_by(0, weights, boxes)
    one = quantizer(weights, manifest, members(1)[0])
    run(one, memory)
    data, scales = reference(weights[WEIGHT], power_of_two=True)
    assert check(one, {WEIGHT: data, scales_of(WEIGHT): scales}) == 5


def test_only_blocks_that_straddle_ranks_are_agreed_on() -> None:
    weights = {WEIGHT: uneven((384, 256), 0)}
    halves = [Box(WEIGHT, (0, 0), (192, 256)), Box(WEIGHT, (192, 0), (384, 256))]
    thirds = [Box(WEIGHT, (0, 0), (128, 256)), Box(WEIGHT, (128, 0), (384, 256))]
    for boxes, sent in ((halves, [2]), (thirds, [])):
        given = members(2)
        held = [held_by(rank, weights, [box]) for rank, box in enumerate(boxes)]
        made = [quantizer(weights, one[0], member) for one, member in zip(held, given, strict=True)]
        in_all(list(zip(made, held, strict=True)), lambda pair: run(pair[0], pair[1][1]))
        assert [member.sent for member in given] == [sent, sent]


class WholeParts(HostParts):
    """Parts of whole blocks, which are not measured and whose scales follow as they are cast, as with kernels."""

    measures = False

    def measure(self, weights: FlatMemory, amax: torch.Tensor) -> None:
        """Leaves out all."""

    def quantize(self, group: int, weights: FlatMemory, scales: torch.Tensor, inverse: torch.Tensor) -> None:
        amax = torch.zeros_like(scales)
        HostParts.measure(self, weights, amax)
        scales.copy_(scale_of(amax, power_of_two=True, epsilon=0.0))
        inverse.copy_(1 / scales)
        super().quantize(group, weights, scales, inverse)


def test_what_cut_blocks_had_in_an_earlier_version_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has a block whole, and two have parts of it: scales follow smaller weights, and bad ones are gone."""
    boxes = [Box(WEIGHT, (low, 0), (high, 128)) for low, high in ((0, 128), (0, 50), (50, 128))]
    given, weight = members(3), uneven((128, 128), 9).add(1)
    held = [held_by(rank, {WEIGHT: weight}, [box]) for rank, box in enumerate(boxes)]
    made = []
    for rank, ((manifest, _), member) in enumerate(zip(held, given, strict=True)):
        monkeypatch.setattr(block_quantizer, "HostParts", HostParts if rank else WholeParts)
        made.append(quantizer({WEIGHT: weight}, manifest, member))
    for factor in (1.0, torch.inf, 0.125):
        held = [held_by(rank, {WEIGHT: weight * factor}, [box]) for rank, box in enumerate(boxes)]
        for one, (_, memory) in zip(made, held, strict=True):
            one.measure(memory)
        in_all(made, lambda one: one.agree())
        for one, (_, memory) in zip(made, held, strict=True):
            one.cast(memory)
            with pytest.raises(RefitError, match="infinite") if factor == torch.inf else nullcontext():
                one.check()
        if factor != torch.inf:
            data, scales = reference(weight * factor, power_of_two=True)
            assert sum(check(one, {WEIGHT: data, scales_of(WEIGHT): scales}) for one in made) == 6


@pytest.mark.parametrize("power_of_two", [True, False])
def test_shards_of_whole_blocks_become_the_bytes_and_scales_of_gathered_weights(power_of_two: bool) -> None:
    """Those of the engine's format for GEMMs, which are compared with Transformer Engine's elsewhere."""
    weight = uneven((512, 320), 1)
    (member,) = members(1)
    for low, high in ((0, 256), (256, 512)):
        manifest, memory = held_by(0, {WEIGHT: weight}, [Box(WEIGHT, (low, 0), (high, 320))])
        one = quantizer({WEIGHT: weight}, manifest, member, power_of_two=power_of_two)
        run(one, memory)
        data, scales = quantize_blocks(weight[low:high], power_of_two=power_of_two)
        (bytes_, found) = one.quantized.values()
        assert torch.equal(bytes_.view(torch.uint8).view(high - low, 320), data)
        assert torch.equal(found.view(2, 3), scales)


class Weights:
    """A source of one weight and one norm."""

    device = CPU

    def __init__(self, weight: torch.Tensor, box: Box) -> None:
        self.weight, self.box, self.failure, self.unsettled = weight, box, "", False

    def describe(self, rank: int) -> Held:
        shapes = {WEIGHT: tuple(self.weight.shape), "model.norm.weight": (3,)}
        manifest, _ = self._held(rank)
        return Held({"model_type": "llama"}, shapes, manifest)

    def settle(self) -> None:
        if self.unsettled:
            raise OSError("the weights are still on their way")

    def look_up(self) -> FlatMemory:
        if self.failure:
            raise MemoryError(self.failure)
        return self._held(0)[1]

    def _held(self, rank: int) -> tuple[Manifest, dict[str, torch.Tensor]]:
        norm = Box("model.norm.weight", (0,), (3,))
        weights = {WEIGHT: self.weight, "model.norm.weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)}
        return held_by(rank, weights, [self.box, norm])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_no_number_fails_the_push_of_all_its_ranks_alone(value: float) -> None:
    """The ranks of its block, one of which does not hold it; the next version is quantized again."""
    good = uneven((384, 192), 2)
    bad = good.clone()
    bad[190, 7] = value
    boxes = [Box(WEIGHT, (0, 0), (130, 192)), Box(WEIGHT, (130, 0), (256, 192)), Box(WEIGHT, (256, 0), (384, 192))]
    inner = [Weights(good, box) for box in boxes]
    sources = [
        Fp8BlockSource(one, WeightFormat.FP8_BLOCK, member) for one, member in zip(inner, members(3), strict=True)
    ]
    held = [source.describe(rank) for rank, source in enumerate(sources)]
    assert held[0].config["quantization_config"] == quantization_config({WEIGHT: (384, 192)})
    assert held[0].shapes[scales_of(WEIGHT)] == (3, 2)
    for weight in (good, bad, good):
        for one in inner:
            one.weight = weight
        in_all(sources, Fp8BlockSource.settle)
        for rank, source in enumerate(sources):
            if weight is bad and rank < 2:
                source.look_up()  # it is found while the weights are on their way
                with pytest.raises(
                    RefitError,
                    match=r"down_proj\.weight\[128:256, 0:128\] cannot be quantized: a weight in it is infinite",
                ):
                    source.confirm()
            else:
                memory = source.look_up()
                source.confirm()
                assert memory["memory of model.norm.weight"].tolist()[:3] == [1.0, 2.0, 3.0]
                assert {len(memory[one.name]) for one in held[rank].manifest.storages} > {3 + 5}


def test_a_rank_whose_weights_have_gone_does_not_leave_the_others_waiting() -> None:
    weight = uneven((256, 128), 3)
    inner = [Weights(weight, Box(WEIGHT, (0, 0), (100, 128))), Weights(weight, Box(WEIGHT, (100, 0), (256, 128)))]
    sources = [
        Fp8BlockSource(one, WeightFormat.FP8_BLOCK, member) for one, member in zip(inner, members(2), strict=True)
    ]
    for rank, source in enumerate(sources):
        source.describe(rank)
    inner[0].failure = "the weights are on holiday"
    in_all(sources, Fp8BlockSource.settle)
    with pytest.raises(MemoryError, match="on holiday"):
        sources[0].look_up()
    inner[0].failure, inner[0].unsettled = "", True
    in_all(sources, Fp8BlockSource.settle)
    with pytest.raises(OSError, match="still on their way"):
        sources[0].look_up()
    inner[0].unsettled = False
    in_all(sources, Fp8BlockSource.settle)
    assert len(sources[0].look_up()) == 3


def test_weights_are_let_go_of_after_a_push() -> None:
    """Or a trainer that moves them to the host between two phases would not get their memory back."""
    source = Fp8BlockSource(
        Weights(uneven((256, 128), 4), Box(WEIGHT, (0, 0), (256, 128))), WeightFormat.FP8_BLOCK, Exchange()
    )
    source.describe(0)
    source.settle()
    left = StorageWeakRef(source.look_up()["memory of model.norm.weight"].untyped_storage())
    assert not left.expired()
    source.finish()
    assert left.expired()


def test_a_module_is_quantized_under_its_own_names() -> None:
    """One of transformers: its state dict is the reference."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(
        Qwen3Config(
            num_hidden_layers=1,
            hidden_size=96,
            intermediate_size=160,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            vocab_size=37,
        )
    ).bfloat16()
    source = Fp8BlockSource(ModuleSource(model), WeightFormat.FP8_BLOCK, Exchange())
    held = source.describe(0)
    source.settle()
    memory, state = source.look_up(), model.state_dict()
    quantized = quantized_weights({name: tuple(tensor.shape) for name, tensor in state.items()})
    assert len(quantized) == 7
    assert held.shapes.keys() == {*state, *map(scales_of, quantized)}
    views = {one.box.tensor: one.view for one in held.manifest.placements}

    def sent(name: str) -> torch.Tensor:
        return views[name].tensor(memory[views[name].storage])

    for name in quantized:
        data, scales = reference(state[name], power_of_two=True)
        assert torch.equal(sent(name).view(torch.uint8), data)
        assert torch.equal(sent(scales_of(name)), scales)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.float64])
@pytest.mark.parametrize("weight_format", [WeightFormat.FP8_BLOCK, WeightFormat.FP8_BLOCK_FP32_SCALES])
def test_a_weight_that_is_quantized_already_without_scales_of_blocks_is_refused_by_name(
    dtype: torch.dtype, weight_format: WeightFormat
) -> None:
    """As with one scale for the tensor, under another name."""
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    layer: Any = model.layers[0]
    layer.up = torch.nn.Module()
    layer.up.register_buffer("weight", torch.ones(8, 8).to(dtype))
    layer.up.register_buffer("weight_scale", torch.ones(1))
    source = Fp8BlockSource(ModuleSource(model, {}), weight_format, Exchange())
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        RefitError, match=rf"^layers\.0\.up\.weight is {name} and has no layers\.0\.up\.weight_scale_inv; only weights"
    ):
        source.describe(0)


def test_what_is_quantized_follows_the_published_checkpoints() -> None:
    layer = "model.layers.61"
    quantized = {
        f"{layer}.self_attn.kv_b_proj.weight": (512, 128),
        f"{layer}.self_attn.kv_a_proj_with_mqa.weight": (576, 512),
        f"{layer}.mlp.experts.255.gate_proj.weight": (256, 512),
        f"{layer}.mlp.shared_experts.down_proj.weight": (512, 256),
    }
    kept: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (1000, 512),
        "lm_head.weight": (1000, 512),
        f"{layer}.mlp.gate.weight": (256, 512),
        f"{layer}.eh_proj.weight": (512, 1024),
        f"{layer}.embed_tokens.weight": (1000, 512),
        f"{layer}.shared_head.head.weight": (1000, 512),
        f"{layer}.input_layernorm.weight": (512,),
        f"{layer}.self_attn.q_proj.bias": (512,),
    }
    assert quantized_weights(kept | quantized) == list(quantized)
    assert with_scales(quantized)[f"{layer}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"] == (5, 4)
    left_out = quantization_config(kept | quantized)["modules_to_not_convert"]
    assert left_out == [name.removesuffix(".weight") for name, shape in kept.items() if len(shape) == 2]
    assert quantized_weights(with_scales(kept | quantized)) == []  # quantized already
    with pytest.raises(UnsupportedModelError, match="A_log belongs to a Mamba mixer"):
        quantized_weights(quantized | {"backbone.layers.0.mixer.A_log": (4,)})


@settings(max_examples=examples(100), deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=60), data=st.data())
def test_groups_write_ascending_bytes_and_tell_what_no_later_one_writes(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Boxes of a few tensors, whose scales lie in any order."""
    places = data.draw(st.permutations(range(len(sizes))))
    parts, start = [], 0
    for (tensor, blocks), place in zip(sizes, places, strict=True):
        box = Box(f"t{tensor}", (0, 0), (128 * blocks, 128))
        parts.append(BlockPart(box, View("s", 7, box.shape, (128, 1)), start, box.shape, 20 * place, 1))
        start += box.volume
    groups = _grouped(parts)
    assert len(groups) <= 16
    pieces = [(*group.whole, *group.others) for group in groups]
    assert [piece for group in pieces for piece in group] == parts
    for number, group in enumerate(groups):
        later = [piece for group in pieces[number:] for piece in group]
        assert group.begins == (later[0].first_byte, min(piece.place for piece in later))
    largest = max(part.box.volume for part in parts)
    for group in groups:
        limit = sum(part.box.volume for part in parts) / block_parts._GROUPS + largest
        assert sum(piece.box.volume for piece in group.whole) <= limit


def quantizes_with_kernels(rank: int, world_size: int) -> int:
    """Triton's kernels under its interpreter, which does not round to E4M3: numbers are equal, and bytes are near."""
    os.environ["TRITON_INTERPRET"] = "1"
    block_parts._GROUPS = 16  # each of the parts below is a group
    shape, columns = (200, 260), (0, 130, 260)
    weight, compared = uneven(shape, 1), 0
    parts, memory = [], torch.full((80_000,), float("nan"), dtype=weight.dtype)
    for (a, b), (c, d) in product(pairwise((0, 40, 200)), pairwise(columns)):
        box, view = Box(WEIGHT, (a, c), (b, d)), View("m", 300 * a + c, (b - a, d - c), (300, 1))
        parts.append(BlockPart(box, view, 11, shape, a // 128 * 3 + c // 128, 3))
        view.tensor(memory).copy_(weight[a:b, c:d])
    for power_of_two in (True, False):
        wanted, scales = reference(weight, power_of_two=power_of_two)
        for kind in (HostParts, KernelParts):
            bytes_ = torch.full((80_000,), 0x55, dtype=torch.uint8)
            by_kind = kind(parts[::-1], bytes_, power_of_two=power_of_two)
            amax = torch.zeros(6)
            by_kind.measure({"m": memory}, amax)
            # All but one of zeros; kernels measure no whole blocks.
            assert amax.nonzero().flatten().tolist() == ([1, 2, 3, 4, 5] if kind is HostParts else [1, 2, 4])
            scale = scale_of(amax, power_of_two=power_of_two, epsilon=0.0)
            inverse = 1.0 / scale
            for group in range(len(by_kind.begins)):
                by_kind.quantize(group, {"m": memory}, scale, inverse)
            if kind is KernelParts:  # blocks 0 to 2 lie in the second row of parts, too
                assert by_kind.begins == [(11, 0), (141, 0), (12_011, 0), (12_141, 1)]
                assert torch.equal(inverse, scales.flatten())
            for part in parts:
                found = part.bytes_in(bytes_)
                assert is_near(found, wanted[tuple(map(slice, part.box.start, part.box.stop))])
                found.fill_(0x55)
                compared += found.numel()
            assert (bytes_ == 0x55).all()
    memory[300 * 150 + 5] = float("nan")  # in block 3, which is whole
    memory[300 * 7 + 258] = -torch.inf  # in block 2, which is cut
    by_kind.measure({"m": memory}, amax)
    for group in range(len(by_kind.begins)):
        by_kind.quantize(group, {"m": memory}, scale, inverse)
    assert amax.isinf().nonzero().flatten().tolist() == [2]
    assert inverse.isnan().nonzero().flatten().tolist() == [3]
    left = StorageWeakRef(memory.untyped_storage())
    del memory
    assert left.expired()  # a trainer that moves its weights to the host gets their memory back
    return compared


def test_kernels_quantize_parts_of_any_size() -> None:
    assert run_distributed(quantizes_with_kernels, 1, None, fresh=True) == [4 * 200 * 260]


def test_a_rank_without_weights_to_quantize_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a first pipeline stage that has the embeddings alone."""
    monkeypatch.setattr(block_quantizer, "HostParts", KernelParts)
    weights = {"model.norm.weight": torch.randn(3)}
    manifest, memory = held_by(0, weights, [Box("model.norm.weight", (0,), (3,))])
    one = quantizer({WEIGHT: torch.empty(256, 128), **weights}, manifest, members(1)[0])
    run(one, memory)
    assert one.manifest == manifest
    assert not one.quantized


def test_a_transposed_weight_is_refused_where_kernels_would_read_it_wrongly() -> None:
    part = BlockPart(Box(WEIGHT, (0, 0), (128, 256)), View("m", 0, (128, 256), (1, 128)), 0, (128, 256), 0, 2)
    with pytest.raises(RefitError, match=r"down_proj\.weight\[0:128, 0:256\] lies transposed"):
        KernelParts([part], torch.empty(0, dtype=torch.uint8), power_of_two=True)
