"""Training settings with which a checkpoint's model cannot be rebuilt: flag, value and remedy."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator, Sequence

from megatron_patches.refit.errors import UnsupportedModelError

_NO_FORM = "train without it: no Hugging Face architecture that is written here has it"
# Megatron's arguments: name, flag, remedy. A model that can be built has none of them set.
_SETTINGS: Sequence[tuple[str, str, str]] = (
    ("yaml_cfg", "--yaml-cfg", "train with flags: the file replaces the arguments that the model is built from"),
    ("heterogeneous_layers_config_path", "--heterogeneous-layers-config-path", _NO_FORM),
    ("experimental_attention_variant", "--experimental-attention-variant", _NO_FORM),
    ("mla_down_proj_fusion", "--mla-down-proj-fusion", "train without it: the fused projection has no mapping"),
    ("moe_single_grouped_weight", "--moe-single-grouped-weight", "train without it: experts are mapped one by one"),
    (
        "moe_expert_rank_capacity_factor",
        "--moe-expert-rank-capacity-factor",
        "train without it: no Hugging Face architecture drops tokens",
    ),
)


def refuse_unbuildable(args: argparse.Namespace) -> None:
    """Raises if the model of these arguments cannot be built, before any of it is built.

    Args:
        args: arguments saved in the checkpoint.

    Raises:
        UnsupportedModelError: with each setting, its value and the remedy.
    """
    found = [*_set_clauses(args), *_spec_clauses(args), *_latent_clauses(args), *_hybrid_clauses(args)]
    if found:
        raise UnsupportedModelError("cannot build this model: " + "; ".join(found))


def _set_clauses(args: argparse.Namespace) -> Iterator[str]:
    for name, flag, way_out in _SETTINGS:
        value = getattr(args, name, None)
        if value:
            yield f"{flag} {value}: {way_out}"


def _spec_clauses(args: argparse.Namespace) -> Iterator[str]:
    """Megatron silently builds another model if it cannot import the layers of --spec, so this checks the import."""
    spec = getattr(args, "spec", None)
    if not spec:
        return
    shown = " ".join(spec)
    if len(spec) != 2:
        yield f"--spec {shown}: train with a module and a name in it"
        return
    module, name = spec
    try:
        if not hasattr(importlib.import_module(module), name):
            yield f"--spec {shown}: {module} has no {name}; install the version that the run was trained with"
    except ImportError as error:
        yield f"--spec {shown}: {error}; make it importable, for example through PYTHONPATH"


def _latent_clauses(args: argparse.Namespace) -> Iterator[str]:
    whole_query = getattr(args, "multi_latent_attention", False) and getattr(args, "q_lora_rank", None) is None
    if whole_query and getattr(args, "qk_layernorm", False) and not _importable("transformer_engine"):
        yield (
            "--q-lora-rank None: Megatron builds multi-latent attention without a compressed query with "
            "transformer_engine only, and it cannot be imported; install it, or run this where it is"
        )


def _hybrid_clauses(args: argparse.Namespace) -> Iterator[str]:
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern is None:
        return
    spec = getattr(args, "spec", None)
    if spec and not spec[0].startswith("megatron."):
        return  # the user's own layers
    needed = ["transformer_engine", *(["mamba_ssm"] if "M" in pattern else [])]
    missing = [name for name in needed if not _importable(name)]
    if missing:
        yield (
            f"--hybrid-layer-pattern {pattern}: Megatron builds such layers with {' and '.join(needed)} only, and "
            f"{' and '.join(missing)} cannot be imported; install it, or run this where it is"
        )


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
