"""Elements arrive as the trainer has them and end up with the bits that the engine's loader would have given them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from megatron_patches.refit.errors import DigestError, ProofError, TransferError
from megatron_patches.refit.layout.boxes import Box, TensorSpec, View, row_major_strides
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp, Rule
from megatron_patches.refit.layout.dtypes import holds
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.memory.ports import host_bytes
from megatron_patches.refit.memory.sender import Sender
from megatron_patches.refit.planning.plan import PartOf, PlanOptions, make_part, make_plan
from megatron_patches.refit.planning.proof import Verdict, prove
from megatron_patches.refit.target.recorded import FillRecord, recorded_manifest
from megatron_patches.refit.target.replay import finish, replay
from megatron_patches.refit.vllm.recording import record_loading
from tests.support.memory_transport import Receiver, refit

Tensors = dict[str, torch.Tensor]
Weights = Iterator[tuple[str, torch.Tensor]]
Load = Callable[[Tensors, Weights], None]

_UNSIGNED = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
WIDEN = ElementOp(CONVERT, "float32")
NARROW = ElementOp(CONVERT, "bfloat16")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_UNSIGNED[tensor.element_size()])


def name_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def specs_of(tensors: Tensors) -> list[TensorSpec]:
    return [TensorSpec(name, tuple(tensor.shape), name_of(tensor)) for name, tensor in tensors.items()]


def record(load: Load, parameters: Tensors, tensors: Tensors) -> tuple[Manifest, list[FillRecord]]:
    done = record_loading(lambda weights: load(parameters, weights), parameters, specs_of(tensors))
    by_name = {spec.name: spec for spec in specs_of(tensors)}
    return recorded_manifest(0, "", done, by_name), done.fills


def arrived(manifest: Manifest, tensors: Tensors) -> Tensors:
    """What a transport leaves: every box, as it is in the trainer, at its place."""
    memory = {item.name: torch.zeros(item.numel, dtype=getattr(torch, item.dtype)) for item in manifest.storages}
    for placement in manifest.placements:
        box = placement.box
        region = tuple(slice(low, high) for low, high in zip(box.start, box.stop, strict=True))
        where = placement.view.tensor(memory[placement.view.storage])
        assert where.dtype is tensors[box.tensor].dtype
        where.copy_(tensors[box.tensor][region])
    return memory


def check(load: Load, parameters: Tensors, tensors: Tensors) -> Manifest:
    """The same loader, run on memory, is the oracle."""
    real = {name: tensor.clone() for name, tensor in parameters.items()}
    load(real, iter(tensors.items()))
    manifest, fills = record(load, parameters, tensors)
    memory = arrived(manifest, tensors)
    found = finish(manifest, fills, memory)
    assert not memory  # nothing is kept twice
    assert set(found) == set(real)
    for name, tensor in real.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(bits(found[name]), bits(tensor.view(-1)))
    return manifest


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda x: x.float(),
    "bfloat16": lambda x: x.bfloat16(),
    "exp": torch.exp,
    "neg": torch.neg,
    "add": lambda x: x + 1,
    "add_alpha": lambda x: torch.add(x, 3, alpha=2),
    "from_one": lambda x: 1 - x,
    "mul": lambda x: x * 0.37,
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(min=-0.5),
    "square": lambda x: x**2,
    "abs_log1p": lambda x: x.abs().log1p(),
}
FLOATS = [torch.bfloat16, torch.float16, torch.float32]


@settings(max_examples=200, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_replaying_gives_the_bits_of_the_loader(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 37))
    types = st.sampled_from(FLOATS)
    tensors = {
        name: torch.randn(2 * rows, columns, generator=torch.Generator().manual_seed(7)).to(data.draw(types))
        for name in ("first", "second")
    }
    chains = {name: data.draw(st.lists(st.sampled_from(list(OPERATIONS)), max_size=4)) for name in tensors}
    read_back = data.draw(st.booleans())  # as vLLM's composed_weight_loader does
    parameters = {"p": torch.zeros(2 * rows + 1, columns, dtype=data.draw(types))}

    def load(into: Tensors, weights: Weights) -> None:
        for number, (name, tensor) in enumerate(weights):
            target = into["p"].narrow(0, number * rows, rows)
            part = tensor.narrow(0, rows if number else 0, rows)
            if read_back:
                target.copy_(part)
                part = target
            for operation in chains[name]:
                part = OPERATIONS[operation](part)
            target.copy_(part)
        into["p"][2 * rows :].fill_(0.25)

    manifest = check(load, parameters, tensors)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest) == manifest


def minus_exp(into: Tensors, weights: Weights) -> None:
    for _, tensor in weights:
        into["A"].copy_(tensor.narrow(0, 2, 5))
        into["A"].copy_(-torch.exp(into["A"].float()))


def test_a_loader_that_reads_back_is_one_rule() -> None:
    manifest = check(minus_exp, {"A": torch.zeros(5)}, {"A_log": torch.randn(9).bfloat16()})
    (storage,), (placement,) = manifest.storages, manifest.placements
    assert (storage.name, storage.dtype, storage.target, storage.final_dtype) == (
        "A@bfloat16",
        "bfloat16",
        "A",
        "float32",
    )
    assert storage.rule is not None
    assert storage.rule.steps == (
        WIDEN,
        ElementOp("exp.default", "float32"),
        ElementOp("neg.default", "float32"),
    )
    assert str(storage.rule) == "to float32, exp, neg"
    assert placement.box == Box("A_log", (2,), (7,))


def test_the_type_decides_how_elements_arrive() -> None:
    def load(into: Tensors, weights: Weights) -> None:
        for number, (_, tensor) in enumerate(weights):
            into["p"][4 * number : 4 * number + 4].copy_(tensor * number if number == 3 else tensor)

    tensors = {
        "a": torch.randn(4).bfloat16(),
        "b": torch.randn(4),
        "c": torch.randn(4).bfloat16(),
        "d": torch.randn(4).bfloat16(),
    }
    manifest = check(load, {"p": torch.zeros(16)}, tensors)
    assert {item.name: str(item.rule) for item in manifest.storages} == {
        "p": "None",
        "p@bfloat16": "to float32",
        "p@bfloat16.2": "mul.Tensor(3), to float32",
    }


def test_an_operation_that_does_not_exist_or_gives_another_type_is_refused() -> None:
    with pytest.raises(TransferError, match=r"no operation frobnicate\.default"):
        replay([ElementOp("frobnicate.default", "float32")], torch.ones(2))
    with pytest.raises(TransferError, match=r"exp\.default gave torch\.bfloat16; it was recorded to give float32"):
        replay([ElementOp("exp.default", "float32")], torch.ones(2, dtype=torch.bfloat16))


SMALL = ["float8_e4m3fn", "float8_e5m2", "float16", "bfloat16"]


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("other", [*SMALL, "float32", "float64"])
def test_a_type_holds_another_if_every_value_comes_back(small: str, other: str) -> None:
    width = getattr(torch, small).itemsize
    every = torch.arange(256**width).to(_UNSIGNED[width]).view(getattr(torch, small))
    there = every.to(getattr(torch, other))
    same = torch.equal(there.double().nan_to_num(-1.0, 7e99, -7e99), every.double().nan_to_num(-1.0, 7e99, -7e99))
    assert holds(other, small) == same


def test_wide_types_are_held_by_wider_ones_alone() -> None:
    assert holds("float64", "float32")
    assert not any(holds(name, "float32") for name in SMALL)
    assert not any(holds(name, "float64") for name in [*SMALL, "float32"])
    assert holds("int32", "int32")
    assert not holds("float32", "int32")


def storage(name: str, dtype: str, size: int, rule: Rule | None = None) -> Storage:
    return Storage(name, dtype, size, size, rule)


def manifest_of(rank: int, *held: tuple[Storage, Box]) -> Manifest:
    places = (Placement(box, View(item.name, 0, box.shape, row_major_strides(box.shape))) for item, box in held)
    return Manifest(rank, "", tuple(item for item, _ in held), tuple(places))


def proved(
    sources: Sequence[Manifest], wanted: Sequence[Manifest], dtype: str, options: PlanOptions | None = None
) -> Verdict:
    options = options or PlanOptions()
    return prove(make_plan([TensorSpec("w", (6,), dtype)], sources, wanted, options), sources, wanted, options)


WHOLE = Box("w", (0,), (6,))


def test_the_proof_lists_what_is_converted() -> None:
    rule = Rule(
        "p",
        (
            WIDEN,
            ElementOp("exp.default", "float32"),
            ElementOp("add.Tensor", "float32", (1,), (("alpha", 2.0),)),
        ),
    )
    source = manifest_of(0, (storage("w", "bfloat16", 6), WHOLE))
    wanted = [manifest_of(rank, (storage("p@bfloat16", "bfloat16", 6, rule), WHOLE)) for rank in range(2)]
    verdict = proved([source], wanted, "bfloat16")
    assert [str(item) for item in verdict.conversions] == [
        f"p of destination rank {rank}: bfloat16, to float32, exp, add.Tensor(1, alpha=2.0)" for rank in range(2)
    ]
    assert proved([source], [source], "bfloat16").conversions == ()
    spec = TensorSpec("w", (6,), "bfloat16")
    part = make_part([spec], [source], wanted, PartOf("destination", 1))
    assert part.digests == {(0, 1): make_plan([spec], [source], wanted).digests[0, 1]}
    assert [item.rank for item in prove(part, [source], wanted).conversions] == [1]


def test_all_parties_must_know_the_rule() -> None:
    source = manifest_of(0, (storage("w", "bfloat16", 6), WHOLE))
    wanted = manifest_of(0, (storage("p", "bfloat16", 6, Rule("q", (WIDEN,))), WHOLE))
    other = manifest_of(
        0, (storage("p", "bfloat16", 6, Rule("q", (WIDEN, ElementOp("neg.default", "float32")))), WHOLE)
    )
    spec = TensorSpec("w", (6,), "bfloat16")
    plan = make_plan([spec], [source], [wanted])
    assert plan.digest != make_plan([spec], [source], [other]).digest
    with pytest.raises(ProofError, match="does not list the rules"):
        prove(plan, [source], [other])
    ruled = manifest_of(0, (storage("w", "bfloat16", 6, Rule("q", (WIDEN,))), WHOLE))
    with pytest.raises(ProofError, match="source rank 0 has a rule for w; only destinations convert"):
        prove(plan, [ruled], [wanted])


@pytest.mark.parametrize(
    ("dtype", "steps", "lost_in"),
    [
        ("float32", (NARROW,), "bfloat16"),
        ("float32", (NARROW, WIDEN), "bfloat16"),
        ("bfloat16", (ElementOp(CONVERT, "float16"),), "float16"),
        ("bfloat16", (WIDEN, NARROW), None),
        ("bfloat16", (WIDEN, ElementOp("exp.default", "float32"), NARROW), None),
    ],
)
def test_what_loses_value_is_refused_unless_allowed(
    dtype: str, steps: tuple[ElementOp, ...], lost_in: str | None
) -> None:
    source = manifest_of(0, (storage("w", dtype, 6), WHOLE))
    wanted = manifest_of(3, (storage("gate", dtype, 6, Rule("bias", steps)), WHOLE))
    if lost_in is not None:
        reason = rf"w is {dtype} in the trainer, and destination rank 3 makes {lost_in} of it \(.*\) for bias"
        with pytest.raises(ProofError, match=reason) as refused:
            proved([source], [wanted], dtype)
        for way_out in (
            "RefitOptions(allow_narrowing=True)",
            "--refit-allow-narrowing",
            "--allow-narrowing of refit push",
        ):
            assert way_out in str(refused.value)
    allowed = PlanOptions(allow_narrowing=lost_in is not None)
    assert len(proved([source], [wanted], dtype, allowed).conversions) == 1


def test_a_rule_must_start_from_the_trainers_type() -> None:
    source = manifest_of(0, (storage("w", "float32", 6), WHOLE))
    wanted = manifest_of(0, (storage("p@bfloat16", "bfloat16", 6, Rule("p", (WIDEN,))), WHOLE))
    with pytest.raises(ProofError, match=r"w\[0:6\] is float32 on source rank 0 and bfloat16 on destination rank 0"):
        proved([source], [wanted], "float32")


def test_storages_with_one_target_must_not_meet_there() -> None:
    first, second = Box("w", (0,), (4,)), Box("w", (3,), (6,))
    source = manifest_of(0, (storage("w", "bfloat16", 6), WHOLE))
    wide, plain = storage("p@bfloat16", "bfloat16", 6, Rule("p", (WIDEN,))), storage("p", "float32", 6)
    places = (Placement(first, View(wide.name, 0, (4,), (1,))), Placement(second, View(plain.name, 3, (3,), (1,))))
    on_the_way = PlanOptions(conversions=frozenset({("bfloat16", "float32")}))
    with pytest.raises(ProofError, match=r"w\[0:4\] and w\[3:6\] share element 3 of p"):
        proved([source], [Manifest(0, "", (wide, plain), places)], "bfloat16", on_the_way)
    for other, what in (
        (replace(plain, numel=7, logical_numel=7), "7 of float32"),
        (replace(plain, dtype="float16"), "6 of float16"),
    ):
        with pytest.raises(ProofError, match=rf"p would have 6 elements of float32 by p@bfloat16, and {what} by p"):
            proved([source], [Manifest(0, "", (wide, other), ())], "bfloat16")
    with pytest.raises(ValueError, match="the rule for p has no step"):
        Rule("p", ())


class Moved:
    """Two trainer ranks that halve what an engine's loader converts, and the engine's memory."""

    def __init__(self) -> None:
        self.tensors: Tensors = {"A_log": torch.randn(9).bfloat16(), "gate": torch.randn(4, 3).bfloat16()}
        self.parameters: Tensors = {"A": torch.zeros(5), "gate": torch.zeros(4, 3)}
        self.manifest, self.fills = record(self.load, self.parameters, self.tensors)
        held: list[Tensors] = [{}, {}]
        sources = []
        for rank in range(2):
            places = []
            for spec in specs_of(self.tensors):
                box = spec.box.split(2, 0)[rank]
                held[rank][spec.name] = self.tensors[spec.name][box.start[0] : box.stop[0]].reshape(-1).clone()
                places.append((storage(spec.name, "bfloat16", box.volume), box))
            sources.append(manifest_of(rank, *places))
        self.plan = make_plan(specs_of(self.tensors), sources, [self.manifest])
        self.verdict = prove(self.plan, sources, [self.manifest])
        self.senders = [
            Sender(self.plan, rank, {name: bits(tensor).numpy() for name, tensor in held[rank].items()})
            for rank in range(2)
        ]
        self.staged = {
            item.name: torch.zeros(item.numel, dtype=getattr(torch, item.dtype)) for item in self.manifest.storages
        }
        memory = {name: bits(tensor).numpy() for name, tensor in self.staged.items()}
        self.receiver = Receiver(self.plan, self.manifest, memory)

    @staticmethod
    def load(into: Tensors, weights: Weights) -> None:
        for name, tensor in weights:
            if name == "gate":
                into["gate"].copy_(tensor)
            else:
                minus_exp(into, iter([(name, tensor)]))


def test_the_trainers_bits_travel_and_the_engine_converts_them() -> None:
    moved = Moved()
    assert [item.rule.target for item in moved.verdict.conversions] == ["A", "gate"]
    refit(moved.senders, {0: moved.receiver}, 1)
    found = finish(moved.manifest, moved.fills, moved.staged)
    moved.load(moved.parameters, iter(moved.tensors.items()))
    for name, tensor in moved.parameters.items():
        assert torch.equal(found[name], tensor.view(-1))


def test_a_flipped_bit_is_caught_before_anything_is_converted() -> None:
    moved = Moved()
    moved.receiver.begin(1)
    for packet, payload in (packet for sender in moved.senders for packet in sender.pack(1)):
        for piece in moved.receiver._unpacker._batches[packet.source, packet.destination, packet.number].pieces:
            if piece.view.storage == "A@bfloat16":
                host_bytes(payload)[piece.offset] ^= 4
        moved.receiver.accept(packet, payload)
    with pytest.raises(DigestError, match=r"A_log\[2:7\] in A@bfloat16 of destination rank 0"):
        moved.receiver.verify()
    assert not any(tensor.any() for tensor in moved.staged.values())


@pytest.mark.parametrize("allow_narrowing", [False, True])
@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("float8_e4m3fn", "bfloat16"),
        ("bfloat16", "float8_e4m3fn"),
        ("float8_e5m2", "bfloat16"),
        ("float8_e8m0fnu", "float32"),
        ("int8", "bfloat16"),
        ("float32", "int8"),
        ("float8_e5m2", "float8_e4m3fn"),
    ],
)
def test_weights_that_one_side_alone_quantizes_are_no_conversion(sent: str, kept: str, allow_narrowing: bool) -> None:
    """Not even where the type of the other side holds all numbers of the one: they lack their scales."""
    source = manifest_of(0, (storage("w", sent, 6), WHOLE))
    rule = Rule("p", (ElementOp(CONVERT, kept),))
    wanted = manifest_of(0, (storage("p@", sent, 6, rule), WHOLE))
    with pytest.raises(
        ProofError, match=f"^w is {sent} in the trainer, and destination rank 0 makes {kept} of it for p;"
    ):
        proved([source], [wanted], sent, PlanOptions(allow_narrowing=allow_narrowing))
