"""An offline model of how vLLM 0.26.0 lays out its parameters, from a model's traits and the mesh alone.

It is for planning without a running engine. What tensors a layer has is in the tables of the families in ``models``;
here is how vLLM cuts, stacks and names them. A live refit uses the layout recorded from the engine's own loaders
instead. If vLLM is installed, a test compares the two, for every family at TP 1, TP 2 and with whole experts on two
ranks. The model describes weights before processing after loading, without quantization, with experts in consecutive
blocks and no redundant ones.

Where in vLLM each rule was read (published sources of several releases around 0.26.0, not that release alone):

- query, key and value in one weight, KV heads replicated on neighbouring ranks if there are more ranks than KV heads:
  ``QKVParallelLinear.__init__`` and ``.weight_loader`` in ``model_executor/layers/linear.py``;
- gate above up in one weight: ``MergedColumnParallelLinear`` in the same file; row cuts: ``RowParallelLinear``;
- vocabulary padded to a multiple of 64: ``model_executor/layers/vocab_parallel_embedding.py``;
- ``w13`` and ``w2`` of experts: ``_load_w13`` and ``_load_w2`` in ``model_executor/layers/fused_moe/layer.py``; the
  experts of each rank: ``determine_expert_map``, which gives the remainder to the first ranks;
- layers of a pipeline stage: ``get_pp_indices`` in ``distributed/utils.py``, which gives the remainder to the stages
  before the last;
- which parameters exist: ``model_executor/models/qwen3_moe.py`` and its dense relatives;
- multi-latent attention, whose down projections are one whole weight on every rank, the router's bias in float32, and
  shared experts: ``model_executor/models/deepseek_v2.py`` (0.26.0), which leaves multi-token prediction layers to the
  draft model; shared experts are whole on every rank where ``use_sequence_parallel_moe`` in ``config/parallel.py``
  holds with the default all-to-all backend;
- hybrids with Mamba layers: ``model_executor/models/nemotron_h.py`` and ``model_executor/layers/mamba/mamba_mixer2.py``
  (0.26.0). The engine keeps ``A = -exp(A_log)`` in float32. A router's weight has the model's dtype, as on GPUs for
  whose kernels the engine does not widen it.

Assumed, and neither read there nor tested: which ranks share the experts (expert parallelism spans TP x DP; without it
experts are cut over TP and DP together), the order of the engine's ranks, and a tied output layer's copy on the last
stage.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_patches.refit.errors import UnsupportedModelError
from megatron_patches.refit.layout.boxes import Box, View, row_major_strides
from megatron_patches.refit.layout.conversion import CONVERT, ElementOp, Rule
from megatron_patches.refit.layout.manifest import Manifest, Placement, Storage
from megatron_patches.refit.models.deepseek_v3 import DeepseekV3Family
from megatron_patches.refit.models.family import ModelFamily
from megatron_patches.refit.models.llama import LlamaFamily
from megatron_patches.refit.models.nemotron_h import NemotronHFamily
from megatron_patches.refit.models.params import Weight
from megatron_patches.refit.models.traits import ModelTraits
from megatron_patches.refit.target.recorded import arrival_name

VOCAB_PADDING = 64


@dataclass(frozen=True, kw_only=True)
class EngineMesh:
    """Sizes of the engine's axes.

    Attributes:
        tp: tensor parallelism.
        pp: pipeline stages.
        dp: data-parallel replicas; with experts, replicas share them.
        expert_parallel: whether ranks hold whole experts (``--enable-expert-parallel``), not a part of each.

    Raises:
        ValueError: if a size is not positive.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks of the engine. Ranks are numbered with ``tp`` innermost, then ``pp``, then ``dp``."""
        return self.tp * self.pp * self.dp


@dataclass(frozen=True, slots=True)
class _Slot:
    """A box, and its first row in a parameter (or in one expert's block of it)."""

    row: int
    box: Box


def engine_manifest(
    traits: ModelTraits, mesh: EngineMesh, rank: int, dtype: str = "bfloat16", host: str = ""
) -> Manifest:
    """What ``rank`` of the engine wants, as boxes.

    Args:
        traits: the model.
        mesh: sizes of the axes.
        rank: the rank.
        dtype: dtype of every tensor of the trainer, and of every parameter that the engine does not keep in float32.
        host: name of the rank's machine.

    Raises:
        UnsupportedModelError: if an axis does not divide what it cuts; names both.
        ValueError: if the mesh has no such rank.
    """
    if not 0 <= rank < mesh.size:
        raise ValueError(f"there is no rank {rank} among {mesh.size}")
    _check_divides(traits, mesh)
    layout = _RankLayout(traits, mesh, rank)
    storages: list[Storage] = []
    wanted: list[Placement] = []
    for parameter, shape, slots, kept in layout.parameters():
        rule = kept if isinstance(kept, Rule) else None
        name = parameter if rule is None else arrival_name(parameter, dtype)
        inner = math.prod(shape[1:])
        end = 0
        for slot in slots:
            strides = row_major_strides(shape[-len(slot.box.shape) :])  # an expert's block is a separate matrix
            view = View(name, slot.row * strides[0], slot.box.shape, strides)
            wanted.append(Placement(slot.box, view))
            end = max(end, view.span[1])
        arrives_as = kept if isinstance(kept, str) else dtype
        storages.append(Storage(name, arrives_as, shape[0] * inner, end, rule))
    return Manifest(rank, host, tuple(storages), tuple(wanted))


def is_left_out(traits: ModelTraits, tensor: str) -> bool:
    """Whether the engine leaves a tensor of the checkpoint to the draft model: multi-token prediction layers."""
    if traits.layer_kinds:
        return tensor.startswith("mtp.")
    layer = re.match(r"model\.layers\.(\d+)\.", tensor)
    return layer is not None and int(layer[1]) >= traits.num_layers


def stage_layers(num_layers: int, stages: int, stage: int) -> range:
    """Layers of a pipeline stage: as even as possible; the stages just before the last get the remainder."""
    even, remainder = divmod(num_layers, stages)
    sizes = [even + (1 if stages - 1 - remainder <= index < stages - 1 else 0) for index in range(stages)]
    start = sum(sizes[:stage])
    return range(start, start + sizes[stage])


def rank_experts(num_experts: int, ranks: int, rank: int) -> range:
    """Experts of a rank in an expert-parallel group: consecutive; the first ranks get the remainder."""
    even, remainder = divmod(num_experts, ranks)
    start = rank * even + min(rank, remainder)
    return range(start, start + even + (rank < remainder))


_Parameter = tuple[str, tuple[int, ...], list[_Slot], str | Rule | None]
"""Name, shape, boxes; and the dtype if it is not the model's, or the rule by which the engine converts elements."""


def _minus_exp(parameter: str) -> Rule:
    """The rule of the loader of Mamba's ``A``."""
    steps = (
        ElementOp(CONVERT, "float32"),
        ElementOp("exp.default", "float32"),
        ElementOp("neg.default", "float32"),
    )
    return Rule(parameter, steps)


class _RankLayout:
    """The parameters of one rank: name, shape, and the boxes in them."""

    def __init__(self, traits: ModelTraits, mesh: EngineMesh, rank: int) -> None:
        self._t, self._mesh = traits, mesh
        self._tp = rank % mesh.tp
        self._pp = rank // mesh.tp % mesh.pp
        self._dp = rank // (mesh.tp * mesh.pp)
        kind = NemotronHFamily if traits.layer_kinds else DeepseekV3Family if traits.latent else LlamaFamily
        self._family: ModelFamily = kind(traits)  # whose tables list the tensors of a layer

    def parameters(self) -> Iterator[_Parameter]:
        """All parameters, by the engine's names."""
        for name, shape, slots, kept in self._by_tensor():
            own = name.replace("backbone.", "model.").replace(".embeddings.", ".embed_tokens.")
            if own.endswith(".A_log"):
                own = own.removesuffix("_log")
                yield own, shape, slots, _minus_exp(own)
            else:
                yield own, shape, slots, kept

    def _by_tensor(self) -> Iterator[_Parameter]:
        """The parameters, with the checkpoint's prefixes."""
        t, family = self._t, self._family
        first, last = self._pp == 0, self._pp == self._mesh.pp - 1
        tied = t.tied_embeddings and not t.layer_kinds  # a hybrid never ties them
        if first or (last and tied):
            yield self._table(family.embedding)
        for layer in stage_layers(t.num_layers, self._mesh.pp, self._pp):
            prefix = family.prefix(layer)
            for weight in family.weights(layer, fused_norms=False):
                yield from self._of_weight(prefix, weight)
            if t.has_experts(layer):
                yield from self._routed(prefix + family.feed_forward)
        if last:
            yield self._whole(family.norm, (t.hidden_size,))
            if not tied:
                yield self._table("lm_head.weight")

    def _of_weight(self, prefix: str, weight: Weight) -> Iterator[_Parameter]:
        """What the engine makes of tensors that Megatron has in one parameter."""
        t, mesh = self._t, self._mesh
        tensors = {prefix + tensor: shape for tensor, shape in weight.tensors.items()}
        name, shape = next(iter(tensors.items()))
        whole = mesh.expert_parallel and mesh.tp > 1 and mesh.dp > 1 and ".shared_experts." in name
        parts, part = (1, 0) if whole else (mesh.tp, self._tp)
        if name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")):
            yield from self._latent_down(name, shape)
        elif weight.dim is None:
            yield *self._whole(name, shape)[:3], weight.dtype
        elif weight.dim == 1:
            columns = shape[1] // parts
            yield name, (shape[0], columns), [_Slot(0, _column_box(name, shape[0], columns, part))], None
        else:
            slots, row = [], 0
            for tensor, (rows, *_) in tensors.items():
                # Heads of keys and values are repeated if there are more ranks.
                times = max(1, parts // t.num_kv_heads) if re.search(r"\.[kv]_proj\.", tensor) else 1
                start = 0
                for size in self._blocks_of(tensor, rows):
                    share = size * times // parts
                    slots.append(_Slot(row, _rows(tensor, start + part // times * share, share, shape[1:])))
                    row, start = row + share, start + size
            if len(tensors) > 1:
                name = name.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
            yield name, (row, *shape[1:]), slots, None

    def _blocks_of(self, tensor: str, rows: int) -> tuple[int, ...]:
        """Rows of the consecutive blocks of a tensor of ``rows`` rows, of each of which a rank has its part."""
        mamba = self._t.mamba
        if mamba is None or ".mixer." not in tensor or not re.search(r"\.(in_proj|conv1d)\.", tensor):
            return (rows,)
        convolved = (mamba.inner, mamba.grouped, mamba.grouped)
        return (mamba.inner, *convolved, mamba.heads) if ".in_proj." in tensor else convolved

    def _latent_down(self, name: str, shape: tuple[int, ...]) -> Iterator[_Parameter]:
        """The down projections of multi-latent attention, in one parameter, if the query has one, and whole."""
        latent = self._t.latent
        if latent is None or not latent.q_rank:
            yield self._whole(name, shape)
        elif name.endswith("q_a_proj.weight"):
            key_value, rows = name.replace("q_a_proj", "kv_a_proj_with_mqa"), latent.kv_rank + latent.rope_dim
            slots = [
                _Slot(0, _rows(name, 0, shape[0], shape[1:])),
                _Slot(shape[0], _rows(key_value, 0, rows, shape[1:])),
            ]
            yield name.replace("q_a_proj", "fused_qkv_a_proj"), (shape[0] + rows, *shape[1:]), slots, None

    def _routed(self, prefix: str) -> Iterator[_Parameter]:
        """Routed experts, which divide the tensor- and data-parallel ranks of a stage as one group."""
        t, hidden = self._t, self._t.expert_hidden_size
        group, place = self._mesh.tp * self._mesh.dp, self._dp * self._mesh.tp + self._tp
        if self._mesh.expert_parallel:
            experts, parts, part = rank_experts(t.num_experts, group, place), 1, 0
        else:
            experts, parts, part = range(t.num_experts), group, place
        first = ("gate_proj", "up_proj") if self._family.gated else ("up_proj",)
        width = t.moe_ffn_hidden_size // parts
        rows = len(first) * width
        w13, w2 = [], []
        for local, expert in enumerate(experts):
            name = f"{prefix}experts.{expert}."
            for index, projection in enumerate(first):
                box = _rows(f"{name}{projection}.weight", part * width, width, (hidden,))
                w13.append(_Slot(local * rows + index * width, box))
            w2.append(_Slot(local * hidden, _column_box(name + "down_proj.weight", hidden, width, part)))
        yield prefix + "experts.routed_experts.w13_weight", (len(experts), rows, hidden), w13, None
        yield prefix + "experts.routed_experts.w2_weight", (len(experts), hidden, width), w2, None

    def _table(self, name: str) -> _Parameter:
        """A vocabulary table. Its padding is at the end of the last ranks' parts."""
        t = self._t
        rows = -(-t.vocab_size // VOCAB_PADDING) * VOCAB_PADDING // self._mesh.tp
        start = self._tp * rows
        held = min(rows, t.vocab_size - start)
        slots = [_Slot(0, _rows(name, start, held, (t.hidden_size,)))] if held > 0 else []
        return name, (rows, t.hidden_size), slots, None

    def _whole(self, name: str, shape: tuple[int, ...]) -> _Parameter:
        return name, shape, [_Slot(0, Box(name, (0,) * len(shape), shape))], None


def _rows(name: str, start: int, rows: int, tail: tuple[int, ...]) -> Box:
    return Box(name, (start, *(0,) * len(tail)), (start + rows, *tail))


def _column_box(name: str, rows: int, columns: int, part: int) -> Box:
    return Box(name, (0, part * columns), (rows, (part + 1) * columns))


def _check_divides(traits: ModelTraits, mesh: EngineMesh) -> None:
    """Checks that axes divide what they cut, as the engine does when it builds the model."""
    group = mesh.tp * mesh.dp
    padded = -(-traits.vocab_size // VOCAB_PADDING) * VOCAB_PADDING
    cuts = [("attention heads", traits.num_heads, mesh.tp), ("rows of the padded vocabulary", padded, mesh.tp)]
    if mesh.tp > traits.num_kv_heads:
        if mesh.tp % traits.num_kv_heads:
            raise UnsupportedModelError(f"{traits.num_kv_heads} KV heads cannot be repeated over tp of {mesh.tp}")
    else:
        cuts.append(("KV heads", traits.num_kv_heads, mesh.tp))
    if traits.mamba is not None:
        cuts.append(("heads of a Mamba mixer", traits.mamba.heads, mesh.tp))
        cuts.append(("groups of a Mamba mixer", traits.mamba.groups, mesh.tp))
    if not traits.num_experts or traits.first_dense_layers or "mlp" in traits.layer_kinds:
        cuts.append(("width of the feed-forward", traits.ffn_hidden_size, mesh.tp))
    cuts.append(("width of shared experts", traits.shared_ffn_hidden_size, mesh.tp))
    if not mesh.expert_parallel:
        cuts.append(("width of an expert, without expert parallelism,", traits.moe_ffn_hidden_size, group))
    elif 0 < traits.num_experts < group:
        raise UnsupportedModelError(f"{traits.num_experts} experts cannot be spread over {group} ranks (tp x dp)")
    if traits.num_layers < mesh.pp:
        raise UnsupportedModelError(f"{traits.num_layers} layers cannot be spread over {mesh.pp} pipeline stages")
    for what, size, parts in cuts:
        if size % parts:
            raise UnsupportedModelError(f"{what} ({size}) cannot be cut into {parts} parts")
