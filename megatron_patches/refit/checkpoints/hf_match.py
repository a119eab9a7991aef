"""Compares a Hugging Face checkpoint with the Megatron model that is to be loaded from it, before a weight is read.

Both sides are compared as the ``config.json`` that the family writes: what the checkpoint's file leaves out has the
family's default, and a setting of any family is compared without being listed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from megatron_patches.refit.checkpoints.hf_blocks import check_blocks
from megatron_patches.refit.checkpoints.hf_files import HuggingFaceFiles
from megatron_patches.refit.errors import LoadError, first_of
from megatron_patches.refit.layout.weight_format import is_block_fp8
from megatron_patches.refit.models.config_traits import family_from_config
from megatron_patches.refit.models.family import ModelFamily

# Fields that mean nothing for loaded weights, and fields that are compared separately.
_NOT_COMPARED = frozenset(
    {
        "architectures",
        "initializer_range",
        "max_position_embeddings",
        "model_type",
        "pretraining_tp",
        "rope_scaling",
        "use_cache",
        "vocab_size",
    }
)
# Fields that are not in the traits, because each family has one value for them.
_OUTSIDE_TRAITS = ("hidden_act", "mlp_hidden_act", "scoring_func", "use_sliding_window")


def check_vocabulary(config: Mapping[str, object], tokens: int, rows: int) -> int:
    """Number of rows of the checkpoint's embedding, which becomes the model's.

    Published models often have a few more rows than their tokenizer has tokens.

    Args:
        config: content of the checkpoint's ``config.json``.
        tokens: tokens of the run's tokenizer.
        rows: rows of the model's embedding, with Megatron's padding.

    Raises:
        LoadError: if there are fewer rows than tokens, or more than the model has.
        UnsupportedModelError: if the configuration is not one of a known family.
    """
    given = family_from_config(config).traits.vocab_size
    if given < tokens:
        raise LoadError(
            f"vocab_size is {given} in config.json, and the run's tokenizer has {tokens} tokens (--tokenizer-type, "
            "--tokenizer-model, --vocab-size); use the checkpoint's tokenizer"
        )
    if given > rows:
        raise LoadError(
            f"vocab_size is {given} in config.json, and the model's embedding has {rows} rows; pass "
            f"--padded-vocab-size with at least {given}, a multiple of the tensor-parallel size, or a larger "
            "--make-vocab-size-divisible-by"
        )
    return given


def check_config(config: Mapping[str, object], family: ModelFamily) -> None:
    """Compares the checkpoint's configuration with the model's.

    Args:
        config: content of the checkpoint's ``config.json``.
        family: the run's model.

    Raises:
        LoadError: with every field that differs, and both values.
        UnsupportedModelError: if the configuration is not one of a known family.
    """
    theirs = family_from_config(config)
    given, mine = {**theirs.config(), **plainly_given(config)}, family.config()
    differing = list(unsupported(config))
    if theirs.architecture != family.architecture:
        differing.append(f"it is a {theirs.architecture}, and the flags of this run make a {family.architecture}")
    unused = _NOT_COMPARED if family.traits.has_dense_feed_forward() else _NOT_COMPARED | {"intermediate_size"}
    differing += [
        _difference(name, given[name], mine[name])
        for name in mine
        if name in given and name not in unused and given[name] != mine[name]
    ]
    scaling = rope_scaling(config) if theirs.traits.yarn is None else theirs.config()["rope_scaling"]
    if "rope_scaling" in mine and scaling != mine["rope_scaling"]:
        differing.append(_difference("rope_scaling", scaling, mine["rope_scaling"]))
    if differing:
        raise LoadError(
            f"the checkpoint holds another model than this run's: {'; '.join(differing)}; the command `refit flags` "
            "prints the flags of the checkpoint's model"
        )


def check_tensors(files: HuggingFaceFiles, family: ModelFamily) -> Mapping[str, str]:
    """Compares names and shapes of the checkpoint's tensors with those that the model needs.

    Returns:
        For each tensor that only repeats another one, the other one: a checkpoint may hold the output layer of a model
        whose embedding is its output layer.

    Raises:
        LoadError: with the tensors that are missing, unexpected or of another shape, or in FP8 without its scales.
    """
    needed = family.shapes()
    missing = [name for name in needed if name not in files.tensors]
    if missing:
        hint = ""
        if all(name.startswith(family.mtp_prefixes) for name in missing):
            hint = "; transformers saves no MTP layers: set num_nextn_predict_layers to 0 in config.json"
        raise LoadError(f"{_listed(missing)} missing in {files.directory}{hint}")
    for name, shape in needed.items():
        stored = files.tensors[name]
        if stored.spec.shape != tuple(shape):
            raise LoadError(
                f"{name} in {files.directory / stored.file} has shape {stored.spec.shape}; the model of this run needs "
                f"{tuple(shape)}"
            )
    repeated = _repeated(files, family)
    known = {*needed, *repeated, *check_blocks(files, [*needed, *repeated])}
    unexpected = [name for name in files.tensors if name not in known and not name.endswith(".rotary_emb.inv_freq")]
    if unexpected:
        raise LoadError(
            f"{_listed(sorted(unexpected))} unexpected in {files.directory}: the model of this run has no such tensor"
        )
    return repeated


def _repeated(files: HuggingFaceFiles, family: ModelFamily) -> Mapping[str, str]:
    """The output layer of a model whose embedding is its output layer, if the checkpoint has it nevertheless."""
    head, table = "lm_head.weight", next(iter(family.shapes()))
    if not family.traits.tied_embeddings or head in family.shapes() or head not in files.tensors:
        return {}
    same = files.tensors[head].spec.shape == files.tensors[table].spec.shape
    return {head: table} if same else {}


def plainly_given(config: Mapping[str, object]) -> Mapping[str, object]:
    """Fields of ``config.json`` for which a family has one value, if they are there."""
    return {name: config[name] for name in _OUTSIDE_TRAITS if config.get(name) is not None}


def rope_scaling(config: Mapping[str, object]) -> Mapping[str, object] | None:
    """Scaling of rotary positions; None for plain ones. transformers 5 keeps it in ``rope_parameters``."""
    for name in ("rope_scaling", "rope_parameters"):
        entry = config.get(name)
        if isinstance(entry, Mapping):
            kind = entry.get("rope_type", entry.get("type"))
            if kind != "default" and (kind is not None or "factor" in entry):
                rest = {key: value for key, value in entry.items() if key not in ("type", "rope_type", "rope_theta")}
                return {"rope_type": kind, **rest}
    return None


def unsupported(config: Mapping[str, object]) -> Iterator[str]:
    """One clause per setting that no Megatron model here has, and that changes answers without changing a shape."""
    if (method := config.get("quantization_config")) and not is_block_fp8(method):
        yield (
            f"its weights are quantized (quantization_config {method}), and not in block FP8 of 128 x 128; load a copy "
            "in bfloat16"
        )
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        yield f"its attention has a window (sliding_window {config['sliding_window']})"
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(name), Mapping | None):
            yield f"its {name} is {config[name]!r}, and no table of settings"
    places = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    parts = [
        place["partial_rotary_factor"]
        for place in places
        if isinstance(place, Mapping) and "partial_rotary_factor" in place
    ]
    if partial := [part for part in parts if part not in (None, 1)]:
        yield f"it rotates a part of each head (partial_rotary_factor {partial[0]})"
    if config.get("mamba_hidden_act") not in (None, "silu", "swish"):
        yield f"its Mamba mixers have another activation than SiLU (mamba_hidden_act {config['mamba_hidden_act']!r})"
    if config.get("time_step_limit") is not None and not _is_unlimited(config["time_step_limit"]):
        yield f"its Mamba mixers clamp the time step (time_step_limit {config['time_step_limit']})"
    if config.get("rope_interleave", True) is False:
        yield "it rotates halves of a head against each other (rope_interleave False)"


def _is_unlimited(limit: object) -> bool:
    """Whether limits of the time step are 0 and infinity, which transformers writes in either of two ways."""
    return limit in ([0, math.inf], [0, {"__float__": "Infinity"}])


def _difference(name: str, given: object, mine: object) -> str:
    return f"{name} is {given!r} in config.json and {mine!r} in this run"


def _listed(names: list[str]) -> str:
    return f"{first_of(names)} {'is' if len(names) == 1 else 'are'}"
