"""Refuses an engine whose model differs from the trainer's even though its weights have the same shapes.

Another rotary base or another epsilon changes no tensor's shape, but every answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron_patches.refit.errors import ModelMismatchError

# Settings that may differ: lengths of texts, what the trainer or the engine does not know, and how weights are stored.
_MAY_DIFFER = frozenset(
    {
        "_name_or_path",
        "architectures",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "initializer_range",
        "max_position_embeddings",
        "model_max_length",
        "mtp_hybrid_override_pattern",
        "num_nextn_predict_layers",
        "pad_token_id",
        "pretraining_tp",
        "quantization_config",
        "time_step_min",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Settings that vLLM's models read even if the trainer does not know them. The trainer's model has these values.
_UNLESS_GIVEN: Mapping[str, object] = MappingProxyType(
    {
        "dual_chunk_attention_config": None,
        "is_causal": True,
        "layer_types": "full_attention",
        "llama_4_scaling": None,
        "logit_scale": 1.0,
        "rswa_window": None,
        # vLLM sets it for all layers unless layer_types has several kinds, even if no layer uses a sliding window.
        "sliding_window": None,
    }
)
# Defaults of vLLM's models if a transformers configuration has no such entry.
_UNLESS_SAID: Mapping[str, object] = MappingProxyType({"scoring_func": "softmax"})
# Defaults of transformers and vLLM, which a trainer writes out and published configurations leave out.
_YARN: Mapping[str, object] = MappingProxyType({"beta_fast": 32.0, "beta_slow": 1.0})
# transformers uses different names for these, depending on its version.
_ROTARY = ("rope_parameters", "rope_scaling", "rope_theta")


def check_same_model(trainer: Mapping[str, Any], engine: Any, model: str = "") -> None:
    """Compares the ``config.json`` that the trainer would write with the configuration that the engine runs.

    Of a model of texts and images, only the part for texts is compared.

    Args:
        trainer: content of ``config.json``.
        engine: the engine's configuration for texts, an object of transformers.
        model: class name of the engine's model: one class may serve several architectures.

    Raises:
        ModelMismatchError: with every setting that differs and both values.
    """
    architectures = trainer.get("architectures")
    trainer = trainer.get("text_config", trainer)
    meant = _with_plain_names(type(engine).from_dict(dict(trainer)).to_dict())
    running = _with_plain_names(engine.to_dict())
    names = [name for name in (*trainer, *_ROTARY) if name in meant and name in running and name not in _MAY_DIFFER]
    differing = list(_architectures(architectures, running, model))
    differing += [
        f"{name} is {meant[name]!r} in the trainer and {running[name]!r} in the engine"
        for name in dict.fromkeys(names)
        if _plain(meant[name]) != _plain(running[name])
    ]
    differing += [
        f"{name} is {meant[name]!r} in the trainer and {taken!r} in the engine, whose configuration does not name it"
        for name, taken in _UNLESS_SAID.items()
        if name in meant and name not in running and meant[name] != taken
    ]
    differing += [
        f"{name} is {running[name]!r} in the engine, which the trainer's model does not have"
        for name, usual in _UNLESS_GIVEN.items()
        if running.get(name) is not None
        and meant.get(name) != running[name]
        and any(value != usual for value in _each(running[name]))
    ]
    if differing:
        raise ModelMismatchError(
            f"{'; '.join(differing)}; start the engine with the configuration that `refit export` writes"
        )


def _architectures(meant: Sequence[str] | None, running: Mapping[str, Any], model: str) -> Iterator[str]:
    """A clause if the engine runs another architecture. Many have Llama's tensors but compute other answers."""
    found = running.get("architectures")
    if meant and found and model not in meant and not set(meant) & set(found):
        yield f"architectures is {list(meant)!r} in the trainer and {list(found)!r} in the engine"


def _with_plain_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration without old fields. YaRN has one name, though vLLM renames DeepSeek's, and its defaults."""
    found = dict(config)
    for name in _ROTARY:
        if isinstance(entry := config.get(name), Mapping):
            found[name] = {key: value for key, value in entry.items() if key != "type"}
            if entry.get("rope_type") == "deepseek_yarn":
                found[name]["rope_type"] = "yarn"
            if found[name].get("rope_type") == "yarn":
                found[name] = {**_YARN, **found[name]}
    return found


def _each(value: Any) -> Sequence[Any]:
    """One value per layer, or a single value for all layers."""
    return value if isinstance(value, list | tuple) else (value,)


def _plain(value: Any) -> Any:
    """Normalizes a value for comparison: JSON and Python spell some values differently; None means absent."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value
