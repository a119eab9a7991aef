"""Checkpoints of tiny models of every family, as a training saves them, for the commands that begin with one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from megatron_patches.refit.__main__ import main
from megatron_patches.refit.checkpoints.export import export_checkpoint
from megatron_patches.refit.models.mesh import TrainerMesh
from megatron_patches.refit.tools import push_command
from tests.integration.live_refit import fill, start
from tests.integration.tiny_models import DEEPSEEK_V3_ODD, LLAMA, NEMOTRON_H_ODD, QWEN2, QWEN3, QWEN3_MOE
from tests.support.live_models import Case
from tests.support.vllm_host import VllmConnection

ITERATION = 7
CONFIGS: dict[str, dict[str, object]] = {
    "llama": LLAMA,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3_ODD,
    "nemotron_h": NEMOTRON_H_ODD,
}

_COMMON = (
    "--hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 32 --seq-length 64 "
    "--max-position-embeddings 64 --normalization RMSNorm --disable-bias-linear --vocab-size 37 "
    "--make-vocab-size-divisible-by 8 --tokenizer-type NullTokenizer --bf16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 1 --ckpt-format torch_dist --attention-dropout 0 --hidden-dropout 0 "
)
_GPT = _COMMON + "--num-layers 4 --position-embedding-type rope --swiglu "
_UNTIED = "--untie-embeddings-and-output-weights "
_GROUPED = "--group-query-attention --num-query-groups 2 "
_ROUTED = "--num-experts 4 --moe-ffn-hidden-size 64 --moe-router-topk 2 "
_SIGMOID = (
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 2 "
    "--moe-router-group-topk 1 --moe-router-topk-scaling-factor 2.5 --moe-router-dtype fp32 "
)
_LATENT = (
    "--multi-latent-attention --rope-type rope --qk-layernorm --kv-lora-rank 20 --qk-head-dim 10 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 6 --moe-layer-freq [0]+[1]*3 "
)
FLAGS: Mapping[str, str] = {
    "llama": _GPT + _GROUPED,
    "qwen2": _GPT + _GROUPED + _UNTIED + "--add-qkv-bias",
    "qwen3": _GPT + _GROUPED + _UNTIED + "--qk-layernorm",
    "qwen3_moe": _GPT + _GROUPED + _UNTIED + _ROUTED + "--qk-layernorm",
    "deepseek_v3": _GPT
    + _UNTIED
    + _ROUTED
    + _SIGMOID
    + _LATENT
    + "--q-lora-rank 24 --moe-shared-expert-intermediate-size 64 --mtp-num-layers 1",
    "nemotron_h": _COMMON
    + _GROUPED
    + _UNTIED
    + _ROUTED
    + _SIGMOID
    + "--hybrid-layer-pattern ME*M-EMM/*E --position-embedding-type none --squared-relu --mamba-num-heads 4 "
    "--mamba-head-dim 6 --mamba-num-groups 2 --mamba-state-dim 5 --moe-shared-expert-intermediate-size 20 "
    "--moe-latent-size 24 --spec tests.support.hybrid_on_cpu STACK",
}
"""Megatron's flags for a training of the model of :data:`CONFIGS` with the same name."""


def parallel_flags(mesh: TrainerMesh) -> list[str]:
    """The flags of a mesh, for a training and for the commands."""
    sizes = {
        "--tensor-model-parallel-size": mesh.tp,
        "--pipeline-model-parallel-size": mesh.pp,
        "--num-virtual-stages-per-pipeline-rank": mesh.vpp,
        "--etp-size": mesh.etp,
        "--expert-model-parallel-size": mesh.ep,
        "--expert-tensor-parallel-size": 0 if mesh.expert_tp == mesh.tp else mesh.expert_tp,
        "--expert-etp-size": mesh.expert_etp,
        "--decoder-first-pipeline-num-layers": mesh.first,
        "--decoder-last-pipeline-num-layers": mesh.last,
    }
    plain = 1 if mesh.tp == 1 else 0
    return [
        word
        for flag, size in sizes.items()
        if size > ("expert-tensor" not in flag or plain)
        for word in (flag, str(size))
    ]


def trained_arguments(flags: Sequence[str], rank: int, world_size: int) -> Any:
    """What Megatron makes of a training's flags; it is what it saves."""
    from megatron.training.arguments import parse_args, validate_args

    with (
        mock.patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}),
        mock.patch.object(sys, "argv", ["train", *flags]),
        redirect_stdout(StringIO()),
    ):
        args = parse_args()
        validate_args(args)
    return args


# Norms whose names in a checkpoint are others where Transformer Engine's layers were trained.
_OTHER_NAMES = {
    "qwen3_moe": {".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight"},
    "deepseek_v3": {
        "layers.0.pre_mlp_layernorm.weight": "layers.0.mlp.linear_fc1.layer_norm_weight",
        ".self_attention.q_layernorm.weight": ".self_attention.linear_q_up_proj.layer_norm_weight",
        ".self_attention.kv_layernorm.weight": ".self_attention.linear_kv_up_proj.layer_norm_weight",
    },
}


def rename(name: str, state: Any) -> None:
    """Changes the names in a state dict to those of Transformer Engine's layers; fails if there is none of them."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    for mine, theirs in _OTHER_NAMES[name].items():
        found = [entry for entry in nested_values(state) if str(getattr(entry, "key", "")).endswith(mine)]
        assert found, mine
        for entry in found:
            entry.key = entry.key.removesuffix(mine) + theirs


def save(case: Case, name: str, chunks: list[Any], rank: int, world_size: int, folder: Path, *, other: bool) -> None:
    """Writes what ``megatron.training`` writes, without the optimizer; with the other names if told so."""
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    args = trained_arguments([*FLAGS[name].split(), *parallel_flags(case.mesh)], rank, world_size)
    args.no_save_optim = True
    args.padded_vocab_size = 40  # of the live model; a training finds it when it opens its tokenizer
    args.iteration = ITERATION
    args.moe_grouped_gemm = other  # which Megatron takes on GPUs alone
    metadata = checkpointing._build_sharded_state_dict_metadata(args)
    state = checkpointing.generate_state_dict(
        args, chunks, None, None, None, iteration=ITERATION, model_sd_kwargs={"metadata": metadata}
    )
    if other:
        rename(name, state["model"])
    directory = folder / f"iter_{ITERATION:07d}"
    directory.mkdir(parents=True, exist_ok=True)
    saved = checkpointing._clean_metadata_for_serialization(metadata)
    dist_checkpointing.save(state, str(directory), content_metadata=saved)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def end_writer() -> None:
    """Ends the process that Megatron keeps where a checkpoint was saved: a killed worker would leave it behind."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    queue, filesystem_async._results_queue = filesystem_async._results_queue, None
    if queue is not None:
        queue._manager.shutdown()


def save_body(rank: int, world_size: int, models: Sequence[tuple[str, TrainerMesh, int]], root: str) -> None:
    """Saves models, each under its mesh and with the values of its seed, and exports them straight from memory.

    Those of seed 3 get the names of Transformer Engine's layers.
    """
    from megatron.core import parallel_state

    for name, mesh, seed in models:
        case = Case(mesh, (), CONFIGS[name])
        chunks = start(case)
        fill(case, chunks, seed, padding=0.0)
        folder = Path(root) / f"{name}-{seed}"
        save(case, name, chunks, rank, world_size, folder / "saved", other=seed == 3)
        export_checkpoint(chunks, folder / "live", vocab_size=37)
    parallel_state.destroy_model_parallel()
    end_writer()


@contextmanager
def _without_choice_of_attention() -> Iterator[None]:
    """What Megatron has chosen for a model stays in the environment, and stops it from choosing for the next."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]
    yield


def _engines(address: str, urls: Sequence[str], *_: object) -> list[VllmConnection]:
    return [VllmConnection(address) for _ in urls]


def command_body(
    rank: int, world_size: int, commands: Sequence[tuple[int, Sequence[str]]], address: str
) -> list[tuple[int, str]]:
    """Runs commands as torchrun starts them: of each, its status and what it printed.

    Args:
        rank: of this process.
        world_size: number of processes.
        commands: each a free port to meet at, and the words after ``python -m megatron_patches.refit``.
        address: of the engine under test, which stands behind every URL; none if empty.
    """
    found = []
    for port, words in commands:
        variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        printed = StringIO()
        with (
            mock.patch.dict(os.environ, variables),
            _without_choice_of_attention(),
            mock.patch.object(push_command, "http_engines", partial(_engines, address)),
            redirect_stdout(printed),
            redirect_stderr(printed),
        ):
            found.append((main(words), printed.getvalue()))
    return found
