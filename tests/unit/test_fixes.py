"""Each fix of megatron-core's mistakes, on its own; the trainings in tests/integration show them at work."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import types
from collections.abc import Iterator
from typing import Any, Self

import pytest
import torch

from megatron_patches import seam
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.fixes import (
    aligned_grad_sync,
    dataloader_state,
    dataset_build,
    embeddings,
    evaluation,
    expert_biases,
    expert_gradients,
    expert_groups,
    frozen,
    fused_accumulation,
    graph_scopes,
    latent_yarn,
    muon,
    recomputed_biases,
    rotary_scaling,
    te_construction,
)
from megatron_patches.registry import PatchRecord
from megatron_patches.sharded_weight import MegatronShardedParam
from tests.support.fake_group import fake_group

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron warns, on import, of what is not installed


class Group:
    """A process group as far as its size, seen from its first rank."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


class TestDatasetBuild:
    @pytest.mark.parametrize(("compiled", "calls"), [(True, 0), (False, 1)])
    def test_compiles_only_what_is_not_there(self, monkeypatch: pytest.MonkeyPatch, compiled: bool, calls: int) -> None:
        made: list[str] = []

        def compile_dependencies() -> None:
            made.append("make")

        replacement = dataset_build.RECORD.replace(compile_dependencies)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object() if compiled else None)
        replacement()
        assert len(made) == calls


class TestRotaryScaling:
    @pytest.mark.parametrize(("args", "factor"), [({"load_hf": None}, 32.0), ({}, 8.0)])
    def test_the_factor_is_that_of_the_flag_unless_stock_megatron_trained(
        self, args: dict[str, object], factor: float, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def gpt_config_from_args(args: object, config: object = None) -> Any:
            return types.SimpleNamespace(rope_scaling_factor=8.0)

        replacement = rotary_scaling.RECORD.replace(gpt_config_from_args)
        given = types.SimpleNamespace(rope_scaling_factor=32.0, use_rope_scaling=True, **args)
        assert replacement(given, config=None).rope_scaling_factor == factor
        said = "rotary positions are scaled by 32, as --rope-scaling-factor says; stock Megatron scales them by 8"
        assert (said in capsys.readouterr().out) == (factor == 32.0)


class TestLatentYarn:
    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ({"load_hf": None, "multi_latent_attention": True}, (2048, 32.0, 0.5)),
            ({"load_hf": None, "multi_latent_attention": False}, (4096, 32.0, 1.0)),
            ({"multi_latent_attention": True}, (4096, 32.0, 1.0)),
        ],
        ids=["launcher", "no_latent_attention", "stock"],
    )
    def test_given_flags_have_an_effect_unless_stock_megatron_trained(
        self, args: dict[str, object], expected: tuple[object, ...]
    ) -> None:
        config = types.SimpleNamespace(original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
        flags = {"yarn_original_max_position_embeddings": 2048, "yarn_beta_fast": None, "yarn_beta_slow": 0.5}
        latent_yarn.RECORD.replace(lambda *_: None)(config, types.SimpleNamespace(**flags, **args))
        assert (config.original_max_position_embeddings, config.beta_fast, config.beta_slow) == expected


class TestAlignedGradSync:
    def test_shards_have_their_gradients_before_replicas_reduce_them_and_none_is_counted(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bucket_group = types.SimpleNamespace(is_last_microbatch=True)
        happened: list[tuple[str, bool]] = []

        def runtime(name: str) -> types.SimpleNamespace:
            return types.SimpleNamespace(wait=lambda: happened.append((name, bucket_group.is_last_microbatch)))

        chunk = types.SimpleNamespace(module=None, bucket_groups=[bucket_group], expert_parallel_bucket_groups=[])
        monkeypatch.setattr(aligned_grad_sync, "runtimes_of", lambda _module: [runtime("first"), runtime("second")])

        def start(_self: object, *_unused: object) -> None:
            happened.append(("start", bucket_group.is_last_microbatch))

        aligned_grad_sync.RECORD.replace(start)(chunk, iter([]))
        assert happened == [("first", False), ("second", False), ("start", True)]


class TestExpertGradients:
    @pytest.mark.parametrize(("dense", "expert", "data"), [(1, 1, 8), (4, 2, 8), (2, 4, 8), (4, 1, 4), (1, 4, 4)])
    def test_scale_gives_the_mean_over_all_data(self, dense: int, expert: int, data: int) -> None:
        """``data`` ranks with a gradient of 1 each: averaged over the expert's shards, scaled, summed over the rest."""
        stock_scale = 1.0 / (data // dense)
        scale = stock_scale * expert_gradients.correction(dense, expert, per_token_loss=False)
        averaged_over_shards = 1.0
        replicas = data // expert
        assert averaged_over_shards * scale * replicas == 1.0

    def test_per_token_loss_is_normalised_elsewhere(self) -> None:
        assert expert_gradients.correction(4, 2, per_token_loss=True) == 1.0

    @pytest.mark.parametrize(("expert_shards", "expected"), [(1, 0.125), (4, 0.5)])
    def test_expert_buffers_and_their_buckets_are_corrected(self, expert_shards: int, expected: float) -> None:
        def init(self: Any, config: Any, *_args: object) -> None:
            def buffer() -> types.SimpleNamespace:
                bucket = types.SimpleNamespace(gradient_scaling_factor=0.5)
                return types.SimpleNamespace(gradient_scaling_factor=0.5, buckets=[bucket])

            self.buffers, self.expert_parallel_buffers = [buffer()], [buffer()]

        config = types.SimpleNamespace(
            gtp_weight_remat_size=4, expert_gtp_weight_remat_size=expert_shards, calculate_per_token_loss=False
        )
        wrapped = types.SimpleNamespace()
        expert_gradients.RECORD.replace(init)(wrapped, config, None, None)
        (expert,), (dense,) = wrapped.expert_parallel_buffers, wrapped.buffers
        assert expert.gradient_scaling_factor == expert.buckets[0].gradient_scaling_factor == expected
        assert dense.gradient_scaling_factor == dense.buckets[0].gradient_scaling_factor == 0.5


class TestExpertBiases:
    def test_no_gradient_of_an_expert_is_added_up_over_tensor_parallel_ranks(self) -> None:
        def init(self: Any, experts: int) -> None:
            torch.nn.Module.__init__(self)
            self.local_experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(experts))
            for expert in self.local_experts:
                expert.bias.sequence_parallel = True

        layer = torch.nn.Module()
        expert_biases.RECORD.replace(init)(layer, 2)
        assert not any(getattr(parameter, "sequence_parallel", False) for parameter in layer.parameters())


class TestExpertGroups:
    @pytest.mark.parametrize(("dense", "expert", "marked"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, True)])
    def test_experts_have_their_own_groups_when_anything_is_sharded(
        self, dense: int, expert: int, marked: bool
    ) -> None:
        def init(self: Any, _config: Any) -> None:
            self.router, self.experts = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            for parameter in (*self.router.parameters(), *self.experts.parameters()):
                parameter.allreduce = True

        config = types.SimpleNamespace(gtp_weight_remat_size=dense, expert_gtp_weight_remat_size=expert)
        layer = types.SimpleNamespace()
        expert_groups.RECORD.replace(init)(layer, config)
        assert [parameter.allreduce for parameter in layer.experts.parameters()] == [not marked] * 2
        assert [parameter.allreduce for parameter in layer.router.parameters()] == [True] * 2


class TestEvaluation:
    @staticmethod
    def model(all_data: Group | None) -> types.SimpleNamespace:
        groups = types.SimpleNamespace(dp_cp=Group(2), dp_cp_gtp_remat=all_data)
        return types.SimpleNamespace(pg_collection=groups)

    def test_losses_are_reduced_over_all_data(self) -> None:
        model = self.model(Group(4))
        seen: list[int] = []

        def evaluate(_step: object, _data: object, chunks: list[Any], verbose: bool = False) -> str:
            seen.append(chunks[0].pg_collection.dp_cp.size())
            return "result"

        assert evaluation.RECORD.replace(evaluate)(None, None, [model], verbose=True) == "result"
        assert seen == [4]
        assert model.pg_collection.dp_cp.size() == 2

    def test_groups_are_restored_after_an_error(self) -> None:
        model = self.model(Group(4))

        def evaluate(*_args: object) -> None:
            raise KeyError("loss")

        with pytest.raises(KeyError):
            evaluation.RECORD.replace(evaluate)(None, None, [model])
        assert model.pg_collection.dp_cp.size() == 2

    @pytest.mark.parametrize("all_data", [None, Group(2)])
    def test_nothing_changes_without_shards(self, all_data: Group | None) -> None:
        model = self.model(all_data)
        groups = model.pg_collection

        def evaluate(_step: object, _data: object, chunks: list[Any]) -> bool:
            return chunks[0].pg_collection is groups

        assert evaluation.RECORD.replace(evaluate)(None, None, [model])


class TestDataloaderState:
    @pytest.mark.parametrize(("shards", "size"), [(1, 2), (2, 4)])
    def test_each_rank_with_data_of_its_own_has_a_file(
        self, monkeypatch: pytest.MonkeyPatch, shards: int, size: int
    ) -> None:
        from megatron.core import parallel_state

        monkeypatch.setattr(parallel_state, "get_gtp_weight_remat_world_size", lambda: shards)
        monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda: Group(4))
        seen: list[tuple[object, ...]] = []

        def save_state(iterator: object, iteration: int, path: str, *, pp_group: Group, dp_group: Group) -> None:
            seen.append((iterator, iteration, path, pp_group.size(), dp_group.size()))

        save = dataloader_state.RECORD.replace(save_state)
        save("iterator", 3, "folder", pp_group=Group(1), dp_group=Group(2))
        assert seen == [("iterator", 3, "folder", 1, size)]


class ShardedWeight(torch.nn.Parameter):
    """A weight that counts its gathers; every gather is a new tensor, as if the buffer had been reused."""

    is_gtp_weight_remat = True
    full: torch.Tensor
    gathers: list[tuple[str, torch.Tensor]]

    def __new__(cls, full: torch.Tensor) -> Self:
        weight = torch.nn.Parameter.__new__(cls, full[: full.shape[0] // 2].clone(), False)
        weight.full = full
        weight.gathers = []
        return weight

    @property
    def layout(self) -> types.SimpleNamespace:  # type: ignore[override]
        return types.SimpleNamespace(shape=tuple(self.full.shape))

    def _gather(self, direction: str) -> torch.Tensor:
        for _, buffer in self.gathers:
            buffer.fill_(float("nan"))
        buffer = self.full.clone()
        self.gathers.append((direction, buffer))
        return buffer

    def all_gather_and_prefetch(self, fwd: bool = True) -> torch.Tensor:
        return self._gather("forward" if fwd else "backward")

    def all_gather_and_prefetch_bwd(self) -> torch.Tensor:
        return self._gather("backward")


class TestEmbeddings:
    class OutputLayer(torch.nn.Module):
        """Megatron's output layer with tied embeddings, as far as its weight."""

        output_size_per_partition = 8
        input_size = 3

        def __init__(self) -> None:
            super().__init__()
            self.weight = None

    @staticmethod
    def forward(layer: Any, input_: Any, weight: Any, gather: bool | None) -> tuple[Any, Any, bool | None]:
        return weight if weight is not None else layer.weight, input_, gather

    def test_a_sharded_weight_takes_the_place_of_the_layers_own(self) -> None:
        layer, weight = self.OutputLayer(), ShardedWeight(torch.randn(8, 3))
        used, input_, gather = embeddings.RECORD.replace(self.forward)(layer, "input", weight, True)
        assert used is weight
        assert (input_, gather) == ("input", True)
        assert layer.weight is None
        assert list(layer.parameters()) == []

    def test_a_layer_may_be_given_its_own_weight(self) -> None:
        layer, weight = self.OutputLayer(), ShardedWeight(torch.randn(8, 3))
        del layer.weight
        layer.register_parameter("weight", weight)
        assert embeddings.RECORD.replace(self.forward)(layer, None, weight)[0] is weight
        assert layer.weight is weight

    def test_it_is_given_back_after_an_error(self) -> None:
        def forward(*_args: object) -> None:
            raise KeyError("vocabulary")

        layer = self.OutputLayer()
        with pytest.raises(KeyError):
            embeddings.RECORD.replace(forward)(layer, None, ShardedWeight(torch.randn(8, 3)))
        assert layer.weight is None

    def test_a_weight_of_another_shape_is_refused(self) -> None:
        with pytest.raises(RuntimeError, match=r"has the shape \(6, 3\), not \(8, 3\)"):
            embeddings.RECORD.replace(self.forward)(self.OutputLayer(), None, ShardedWeight(torch.randn(6, 3)))

    def test_a_whole_weight_is_passed_on(self) -> None:
        weight = torch.randn(8, 3)
        assert embeddings.RECORD.replace(self.forward)(self.OutputLayer(), None, weight)[0] is weight


class TestFrozen:
    def test_backward_gathers_again_and_the_gradient_is_right(self) -> None:
        full = torch.randn(8, 3)
        weight = ShardedWeight(full)
        bias = torch.randn(8)
        inputs = torch.randn(5, 2, 3, requires_grad=True)
        output = frozen.FrozenShardedLinear.apply(inputs, weight, bias, None)
        torch.testing.assert_close(output, torch.nn.functional.linear(inputs, full, bias))
        upstream = torch.randn_like(output)
        weight._gather("forward")  # another layer takes the buffer
        (gradient,) = torch.autograd.grad(output, inputs, upstream)
        torch.testing.assert_close(gradient, upstream @ full, rtol=0, atol=0)
        assert [direction for direction, _ in weight.gathers] == ["forward", "forward", "backward"]

    def test_nothing_of_full_size_is_saved(self) -> None:
        saved: list[tuple[int, ...]] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            inputs = torch.randn(4, 3, requires_grad=True)
            frozen.FrozenShardedLinear.apply(inputs, ShardedWeight(torch.randn(8, 3)), None, None)
        assert saved == []

    def test_an_unsharded_layer_runs_megatrons_own(self) -> None:
        calls: list[tuple[Any, ...]] = []

        def original(*args: Any) -> str:
            calls.append(args)
            return "stock"

        replacement = frozen.RECORD.replace(original)
        assert replacement(1, 2, 3, False, True, False, None, gtp_remat_size=1) == "stock"
        assert calls == [(1, 2, 3, False, True, False, None)]


class TestFusedAccumulation:
    """With Megatron's own ``ColumnParallelLinear``, on a machine without APEX."""

    @pytest.fixture(autouse=True)
    def without_apex(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from megatron.core.tensor_parallel import layers

        monkeypatch.setattr(layers, "_grad_accum_fusion_available", False)

    @staticmethod
    def build(dense: int, expert: int, is_expert: bool, *, fused: bool = True, fixed: bool = True) -> Any:
        """A layer of a model whose weights have ``dense`` shards, and ``expert`` shards in its experts."""
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear

        config: Any = ModelParallelConfig(
            gradient_accumulation_fusion=fused, use_cpu_initialization=True, perform_initialization=False
        )
        config.gtp_weight_remat_size, config.expert_gtp_weight_remat_size = dense, expert
        init: Any = ColumnParallelLinear.__init__
        init = fused_accumulation.RECORD.replace(init) if fixed else init
        layer = ColumnParallelLinear.__new__(ColumnParallelLinear)
        init(layer, 7, 5, config=config, init_method=torch.nn.init.normal_, tp_group=Group(1), is_expert=is_expert)
        return layer

    @pytest.mark.parametrize(("dense", "expert", "is_expert"), [(2, 1, False), (1, 2, True), (4, 2, False)])
    def test_a_sharded_layer_is_built_without_apex(self, dense: int, expert: int, is_expert: bool) -> None:
        from megatron.core.tensor_parallel import layers

        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            self.build(dense, expert, is_expert, fixed=False)
        layer = self.build(dense, expert, is_expert)
        assert layer.gradient_accumulation_fusion
        assert tuple(layer.weight.shape) == (5, 7)
        assert not layers._grad_accum_fusion_available

    @pytest.mark.parametrize(("dense", "expert", "is_expert"), [(1, 1, False), (1, 2, False), (2, 1, True)])
    def test_a_whole_weight_still_needs_apex(self, dense: int, expert: int, is_expert: bool) -> None:
        with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
            self.build(dense, expert, is_expert)

    def test_without_the_option_nothing_changes(self) -> None:
        assert not self.build(2, 2, False, fused=False).gradient_accumulation_fusion

    def test_what_is_known_of_apex_is_put_back_after_an_error(self) -> None:
        from megatron.core.tensor_parallel import layers

        seen: list[bool] = []

        def init(_self: object, *, config: object) -> None:
            del config
            seen.append(layers._grad_accum_fusion_available)
            raise KeyError("weight")

        config = types.SimpleNamespace(gtp_weight_remat_size=2, gradient_accumulation_fusion=True)
        with pytest.raises(KeyError):
            fused_accumulation.RECORD.replace(init)(object(), config=config)
        assert seen == [True]
        assert not layers._grad_accum_fusion_available


class TestRecomputedBiases:
    @pytest.mark.parametrize("record", recomputed_biases.RECORDS)
    def test_a_recomputed_layer_may_return_a_parameter(self, record: PatchRecord) -> None:
        torch.manual_seed(5)
        weight, bias = (torch.nn.Parameter(torch.randn(*shape)) for shape in ((3, 3), (3,)))
        inputs = torch.randn(4, 3, requires_grad=True)
        times = 0

        def layer(x: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.nn.Parameter, None]:
            nonlocal times
            times += 1
            if times > 2:
                raise RecursionError("the backward pass computes the layer without end")
            return (x @ weight).tanh() * scale, bias, None

        def gradients(output: torch.Tensor, added: torch.Tensor) -> list[torch.Tensor | None]:
            (output + added).square().sum().backward()
            found = [tensor.grad for tensor in (inputs, weight, bias)]
            inputs.grad = weight.grad = bias.grad = None
            return found

        expected = gradients(*layer(inputs, scale=3.0)[:2])
        times = 0
        checkpoint = record.replace(functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True))
        output, added, nothing = checkpoint(functools.partial(layer, scale=3.0), inputs)
        assert nothing is None
        assert bias.is_leaf
        found = gradients(output, added)
        assert times == 2
        assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("record", recomputed_biases.RECORDS)
    def test_other_outputs_and_arguments_stay(self, record: PatchRecord) -> None:
        given: list[object] = []

        def checkpoint(function: Any, *args: object, **kwargs: object) -> object:
            given.append((args, kwargs))
            return function(*args, **kwargs)

        tensor = torch.randn(2)
        replacement = record.replace(checkpoint)
        assert replacement(lambda x, **_: x, tensor, more=1) is tensor
        assert replacement(lambda x: (x, 7), tensor) == (tensor, 7)
        assert given == [((tensor,), {"more": 1}), ((tensor,), {})]


class TestTransformerEngineConstruction:
    @pytest.fixture
    def wrapped(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
        """What is cut, as (names, shards), through a seam of the test's own."""
        seen: list[tuple[list[str], int]] = []
        module = types.ModuleType(seam.SEAM)

        def wrap_module_params_gtp(_module: Any, names: list[str], group: Group, is_grouped: bool) -> None:
            seen.append((names, group.size()))

        module.wrap_module_params_gtp = wrap_module_params_gtp  # type: ignore[attr-defined]
        monkeypatch.setitem(__import__("sys").modules, seam.SEAM, module)
        return seen

    @staticmethod
    @contextlib.contextmanager
    def original(*_args: object, **_kwargs: object) -> Iterator[int]:
        yield -1

    def test_the_layer_is_built_whole_and_cut_afterwards(self, wrapped: list[tuple[list[str], int]]) -> None:
        keywords: dict[str, Any] = {}
        context = te_construction.RECORD.replace(self.original)
        with context(object(), 64, Group(2), keywords, out_split_size=2) as output_size:
            assert output_size == 64
            assert wrapped == []
        assert wrapped == [(["weight"], 2)]
        assert keywords == {}

    def test_grouped_layers_have_one_weight_an_expert(self, wrapped: list[tuple[list[str], int]]) -> None:
        module = types.SimpleNamespace(num_gemms=3)
        with te_construction.RECORD.replace(self.original)(module, 64, Group(2), {}, is_expert=True, is_grouped=True):
            pass
        assert wrapped == [(["weight0", "weight1", "weight2"], 2)]

    @pytest.mark.parametrize("group", [None, Group(1)])
    def test_nothing_is_cut_without_shards(self, wrapped: list[tuple[list[str], int]], group: Group | None) -> None:
        with te_construction.RECORD.replace(self.original)(object(), 64, group, {}) as output_size:
            assert output_size == 64
        assert wrapped == []


class TestGraphScopes:
    @pytest.mark.parametrize(
        ("modules", "experts", "asked"),
        [
            (["mlp"], False, [False]),
            (["mlp"], True, []),
            (["attn", "mlp"], True, [True]),
            (["attn"], False, ["not known"]),
        ],
    )
    @pytest.mark.parametrize("old_specification", [False, True])
    def test_a_layer_is_asked_for_experts_before_it_has_them(
        self, modules: list[str], experts: bool, asked: list[object], old_specification: bool
    ) -> None:
        from megatron.core.transformer.enums import CudaGraphModule
        from megatron.core.transformer.mlp import MLP
        from megatron.core.transformer.moe.moe_layer import MoELayer
        from megatron.core.transformer.spec_utils import ModuleSpec

        found: list[object] = []
        replacement = graph_scopes.RECORD.replace(
            lambda layer, _: found.append(vars(layer).get("is_moe_layer", "not known"))
        )
        config = types.SimpleNamespace(
            gtp_weight_remat_size=2, cuda_graph_modules=[CudaGraphModule[name] for name in modules]
        )
        kind = MoELayer if experts else MLP
        built = functools.partial(kind if experts else MLP.as_mlp_submodule)
        mlp = ModuleSpec(module=kind) if old_specification else built
        replacement(types.SimpleNamespace(submodules_config=types.SimpleNamespace(mlp=mlp)), config)
        assert found == asked

    def test_nothing_changes_without_shards(self) -> None:
        from megatron.core.transformer.enums import CudaGraphModule

        found: list[dict[str, object]] = []
        replacement = graph_scopes.RECORD.replace(lambda layer, _: found.append(dict(vars(layer))))
        replacement(
            types.SimpleNamespace(),
            types.SimpleNamespace(gtp_weight_remat_size=1, cuda_graph_modules=[CudaGraphModule.mlp]),
        )
        assert found == [{}]


class TestMuon:
    def test_norms_of_experts_are_summed_over_their_shards(self) -> None:
        seen: list[Any] = []

        def build(config: Any, model_chunks: Any, config_overrides: Any, pg_collection: Any) -> None:
            seen.append(pg_collection.tp_ep_pp)

        groups = types.SimpleNamespace(tp_ep_pp="one shard", tp_ep_pp_with_egtp_remat="all shards")
        muon.RECORDS[0].replace(build)(None, [], {}, groups)
        muon.RECORDS[0].replace(build)(None, [], {}, types.SimpleNamespace(tp_ep_pp="all there is"))
        assert seen == ["all shards", "all there is"]
        assert groups.tp_ep_pp == "one shard"

    def test_a_model_without_shards_gets_megatrons_own(self) -> None:
        created = muon.RECORDS[1].replace(lambda *arguments: arguments)
        arguments: tuple[Any, ...] = ("config", [{"params": [torch.nn.Parameter(torch.ones(2, 2))]}], "muon", [], None)
        assert created(*arguments) == arguments

    def test_lion_steps_shards_as_any_parameters(self) -> None:
        created = muon.RECORDS[1].replace(lambda *arguments: arguments)
        config = types.SimpleNamespace(optimizer="lion", use_layer_wise_distributed_optimizer=False)
        with fake_group(rank=0, world_size=2) as group:
            groups = [{"params": [MegatronShardedParam.from_full(torch.ones(4, 2), group)]}]
            arguments: tuple[Any, ...] = (config, groups, "lion", [], None)
            assert created(*arguments) == arguments

    def test_query_key_and_value_are_told_apart_by_rows_of_the_whole_weight(self) -> None:
        """Of twelve rows in two groups, a shard has one. A shard of as many rows, one of padding, has none."""
        chunk = torch.nn.Module()
        chunk.linear_qkv = torch.nn.Module()
        with fake_group(rank=0, world_size=2) as group:
            for rows, expected in ((12, True), (11, False)):
                weight = MegatronShardedParam.from_full(torch.ones(rows, 2), group, pad_for_alignment=6)
                weight.requires_grad_(True)
                assert weight.shape[0] == 6
                weight.is_qkv = not expected
                chunk.linear_qkv.weight = weight
                muon._mark_whole_query_groups([chunk], [2, 2, 2])
                assert weight.is_qkv is expected
                assert weight.qkv_split_shapes == [2, 2, 2]

    @pytest.mark.parametrize(
        ("name", "layer_wise", "release", "message"),
        [
            ("muon", False, "0.30.0", r"needs emerging-optimizers 0\.3: pip install"),
            ("muon", False, "0.4.0", r"needs emerging-optimizers 0\.3: pip install"),
            ("muon", True, "0.3.0", "a layer-wise distributed optimizer gives each replica of a shard other weights"),
            ("lion", True, "0.3.0", "other weights to step; with sharded weights use optimizer lion without use_layer"),
            ("dist_muon", False, "0.3.0", "a layer-wise distributed optimizer gives each replica"),
            ("soap", False, "0.3.0", "optimizer soap would take each shard for a whole matrix"),
        ],
    )
    def test_what_shards_do_not_support_is_refused(
        self, monkeypatch: pytest.MonkeyPatch, name: str, layer_wise: bool, release: str, message: str
    ) -> None:
        monkeypatch.setattr(importlib.metadata, "version", lambda _name: release)
        config = types.SimpleNamespace(optimizer=name, use_layer_wise_distributed_optimizer=layer_wise)
        with fake_group(rank=0, world_size=2) as group:
            groups = [{"params": [MegatronShardedParam.from_full(torch.ones(4, 2), group)]}]
            with pytest.raises(UnsupportedConfigurationError, match=message):
                muon.RECORDS[1].replace(print)(config, groups, name.removeprefix("dist_"), [], None)
