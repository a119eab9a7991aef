"""Lets Megatron train over gloo on a machine without CUDA. With CUDA, nothing here is used.

Megatron-core calls ``torch.cuda`` unconditionally: for the current device, for streams and events, for random state.
The records below define those calls for a CPU, where every operation has finished when it returns: streams do nothing,
events are always complete, "the current device" is the CPU, and its random state is that of the CPU generator.
``torch.cuda.is_available()`` stays False.

:func:`records` lists every replacement with its reason. :func:`required_arguments` lists Megatron settings that only
make sense with CUDA, with the values that a CPU run needs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import logging
import os
import queue
import re
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, Self

import torch

from etp.config import TransportName
from megatron_patches import gloo_threads, latent_projections, uneven_gathers
from megatron_patches.arguments import UnsupportedConfigurationError
from megatron_patches.registry import PatchRecord

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = (
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "ones_like",
    "empty_like",
)


def needed() -> bool:
    """Whether this machine lacks CUDA, so that :func:`records` apply."""
    return not torch.cuda.is_available()


def prepare_environment() -> None:
    """Set environment variables that Megatron or torch read at import time. Values set by the user are kept."""
    # Megatron's fused element-wise functions use torch.compile, which costs seconds in a small CPU run.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Megatron's validation requires it with tensor parallelism; it has no effect without CUDA.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


# Warnings about what only GPUs can use, and about a kind of model that Megatron imports in every run.
_INAPPLICABLE = (
    "Apex is not installed.",
    "Transformer Engine and Apex are not installed.",
    "Only transformer-engine>=1.7.0 supports MoE experts, but your version is 0.0.0.",
    "'pin_memory' argument is set as true but no accelerator is found",
    "MimoModelConfig is experimental and still under active development.",
)


def silence_inapplicable_warnings() -> None:
    """Suppress warnings about what a CPU run does not use; those of ``warnings`` also in processes that it spawns."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # "No CUDA runtime is found"
    # Here the random-state tracker forks the CPU's generator.
    tracker = logging.getLogger("megatron.core.tensor_parallel.random")
    tracker.addFilter(lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage())
    for beginning in _INAPPLICABLE:
        warnings.filterwarnings("ignore", re.escape(beginning))
        option = f"ignore:{beginning}"
        if option not in sys.warnoptions:  # passed on by multiprocessing
            sys.warnoptions.append(option)


class CpuStream:
    """A stream whose work is always finished; also its own context manager."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        self.device = _CPU

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        return None

    def query(self) -> bool:
        """Whether all work is done: always."""
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        """Return ``event``, or a new one; it is already complete."""
        return event if event is not None else CpuEvent()

    def synchronize(self, _other: object = None) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = synchronize


class CpuEvent:
    """An event that is always complete. Times are not measured: elapsed time is 0."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        return None

    def query(self) -> bool:
        """Whether the event is complete: always."""
        return True

    def elapsed_time(self, _end: CpuEvent) -> float:
        """Milliseconds between two events: not measured on a CPU."""
        return 0.0

    def synchronize(self, _stream: object = None) -> None:
        """Nothing to record or to wait for."""

    record = wait = synchronize


def records() -> tuple[PatchRecord, ...]:
    """Every replacement that a CPU run needs, torch's first, so that they are in place when Megatron is imported."""
    return (
        gloo_threads.RECORD,
        PatchRecord(
            target="torch:compile",
            replace=_unless_disabled,
            reason="Megatron calls it on import, and with TORCH_COMPILE_DISABLE=1, too, it imports the compiler: 3 s",
        ),
        *_device_records(),
        *_random_state_records(),
        *_tensor_records(),
        *_megatron_records(),
        latent_projections.RECORD,
        uneven_gathers.RECORD,
    )


def _constant(value: object) -> Callable[[Any], Callable[..., Any]]:
    """A replacement that returns ``value`` for any arguments."""

    def replace(original: Callable[..., Any]) -> Callable[..., Any]:
        def replacement(*_args: object, **_kwargs: object) -> object:
            return value

        return functools.wraps(original)(replacement)

    return replace


def _unless_disabled(compile_function: Callable[..., Any]) -> Callable[..., Any]:
    """With ``TORCH_COMPILE_DISABLE=1``, return what is to be compiled as it is, which torch does after an import."""

    @functools.wraps(compile_function)
    def replacement(model: Any = None, **options: Any) -> Any:
        if os.environ.get("TORCH_COMPILE_DISABLE") != "1":
            return compile_function(model, **options)
        return model if model is not None else lambda decorated: decorated

    return replacement


def _device_records() -> tuple[PatchRecord, ...]:
    stream = CpuStream()
    properties = types.SimpleNamespace(
        name="cpu", major=0, minor=0, total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )

    def stream_context(_original: object) -> Callable[..., contextlib.AbstractContextManager[None]]:
        return lambda _stream: contextlib.nullcontext()

    constants: tuple[tuple[str, object, str], ...] = (
        ("current_device", _CPU, "Megatron allocates on torch.cuda.current_device()"),
        ("device_count", 1, "Megatron sets up its process groups only where the count is above 0"),
        # With PYTORCH_NVML_BASED_CUDA_CHECK=1, which vLLM sets, torch derives the answer from the count above.
        ("is_available", False, "there is no CUDA, whatever the count of devices"),
        ("set_device", None, "Megatron selects the local rank's device"),
        ("get_device_capability", (0, 0), "Megatron asks for the architecture when it validates arguments"),
        ("get_device_properties", properties, "Megatron asks for the architecture when it validates arguments"),
        ("current_stream", stream, "communication is ordered on streams"),
        ("default_stream", stream, "communication is ordered on streams"),
        ("synchronize", None, "timers wait for the device"),
        ("empty_cache", None, "there is no caching allocator"),
    )
    return (
        *(
            PatchRecord(target=f"torch.cuda:{name}", replace=_constant(value), reason=reason)
            for name, value, reason in constants
        ),
        PatchRecord(
            target="torch.cuda:stream", replace=stream_context, reason="communication is issued on side streams"
        ),
        PatchRecord(target="torch.cuda:Stream", replace=lambda _original: CpuStream, reason="side streams are created"),
        PatchRecord(target="torch.cuda:Event", replace=lambda _original: CpuEvent, reason="events are created"),
    )


def _random_state_records() -> tuple[PatchRecord, ...]:
    # Not torch.manual_seed, which seeds torch.cuda in turn and would recurse.
    def manual_seed(_original: object) -> Callable[[int], None]:
        def seed_cpu(seed: int) -> None:
            torch.default_generator.manual_seed(int(seed))

        return seed_cpu

    def get_state(_original: object) -> Callable[..., torch.Tensor]:
        return lambda *_args, **_kwargs: torch.get_rng_state()

    def set_state(_original: object) -> Callable[..., None]:
        return lambda state, *_args, **_kwargs: torch.set_rng_state(state)

    reason = "Megatron's random-state tracker forks the CUDA generator"
    random_module = "megatron.core.tensor_parallel.random"
    return (
        PatchRecord(target="torch.cuda:manual_seed", replace=manual_seed, reason=reason),
        PatchRecord(target="torch.cuda:get_rng_state", replace=get_state, reason=reason),
        PatchRecord(target="torch.cuda:set_rng_state", replace=set_state, reason=reason),
        PatchRecord(target="torch.cuda.random:get_rng_state", replace=get_state, reason=reason),
        PatchRecord(
            target=f"{random_module}:_get_cuda_rng_state", replace=get_state, reason=reason, sha256="62ad88d51012a9c6"
        ),
        PatchRecord(
            target=f"{random_module}:_set_cuda_rng_state", replace=set_state, reason=reason, sha256="0c8a56235a84d719"
        ),
    )


def _tensor_records() -> tuple[PatchRecord, ...]:
    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(factory)
        def replacement(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "cuda" in str(kwargs.get("device", "")):
                kwargs["device"] = _CPU
            return factory(*args, **kwargs)

        return replacement

    # At its first use, ``with torch.device(...)`` records once which functions create tensors. If it recorded the
    # replacements, it would not intercept the originals that they call, and a model built on "meta" would not be on
    # "meta".
    with torch.device("meta"):
        torch.empty(0)

    # A separate function for each: torch.compile refuses two torch functions that are the same object.
    def keep(_original: object) -> Callable[..., Any]:
        return lambda tensor_or_module, *_args, **_kwargs: tensor_or_module

    def no_stream(_original: object) -> Callable[..., None]:
        return lambda _tensor, _stream: None

    def type_name(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            # A tensor subclass gets here twice, the second time through torch's dispatch of its methods.
            if isinstance(result, str) and not result.startswith("torch.cuda."):
                return result.replace("torch.", "torch.cuda.", 1)
            return result

        return replacement

    return (
        *(
            PatchRecord(target=f"torch:{name}", replace=on_cpu, reason='Megatron creates tensors with device="cuda"')
            for name in _FACTORIES
        ),
        PatchRecord(target="torch:Tensor.cuda", replace=keep, reason="batches and parameters are moved to the device"),
        PatchRecord(target="torch.nn:Module.cuda", replace=keep, reason="models are moved to the device"),
        PatchRecord(target="torch:Tensor.record_stream", replace=no_stream, reason="there is no caching allocator"),
        PatchRecord(
            target="torch:Tensor.type",
            replace=type_name,
            reason="Megatron's optimizers know their parameters by the name torch.cuda.FloatTensor",
        ),
    )


def _start_adam(distributed_optimizer: Any) -> None:
    """Make Adam allocate its state, with the values that it has before the first step.

    Megatron's own helper takes a step with zero gradients, in which weight decay would shrink the weights.
    """
    adam = distributed_optimizer.optimizer
    rates = [group["lr"] for group in adam.param_groups]
    try:
        for group in adam.param_groups:
            group["lr"] = 0.0
        distributed_optimizer._init_optimizer_states_with_dummy_values()
    finally:
        for group, rate in zip(adam.param_groups, rates, strict=True):
            group["lr"] = rate
    for state in adam.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()


def _without_parameters(distributed_optimizer: Any) -> dict[str, Any]:
    """The state of an optimizer that has nothing to step on this rank: settings of groups, whose step is None.

    A load fills in the step of the others (:mod:`megatron_patches.checkpoint.optimizer_groups`).
    """
    groups = distributed_optimizer.optimizer.state_dict()["param_groups"]
    settings = [{name: value for name, value in group.items() if name != "params"} | {"step": None} for group in groups]
    scaler = distributed_optimizer.grad_scaler
    return {"optimizer": {"param_groups": settings}, **({"grad_scaler": scaler.state_dict()} if scaler else {})}


def _megatron_records() -> tuple[PatchRecord, ...]:
    def as_numpy_on_cpu(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: ARG001
            return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

        return replacement

    def with_random_state(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            with torch.random.fork_rng(devices=()):
                return original(*args, **kwargs)

        return replacement

    def with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replacement(self: Any) -> Any:
            if not any(group["params"] for group in self.optimizer.param_groups):
                return _without_parameters(self)
            if not self.optimizer.state:
                _start_adam(self)
            return original(self)

        return replacement

    return (
        PatchRecord(
            target="megatron.training.initialize:initialize_megatron",
            replace=lambda original: functools.partial(original, allow_no_cuda=True),
            reason="pretrain() does not pass its allow_no_cuda on",
            sha256="c813ba71782bfc73",
        ),
        PatchRecord(
            target="megatron.training.training:build_train_valid_test_data_iterators",
            replace=with_random_state,
            reason="data loaders draw seeds from the CPU's random state, which a resumed run has just loaded",
            sha256="8cdf53b117538b27",
        ),
        PatchRecord(
            target="megatron.core.transformer.moe.moe_utils:maybe_move_tensor_to_cpu",
            replace=as_numpy_on_cpu,
            reason="it converts to numpy only what it has moved from a GPU",
            sha256="c2e4d07c3813ade9",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.mapping:ShardedTensor.init_data",
            replace=_empty_on_cpu,
            reason="its default is torch.empty as it was on import, which creates tensors on a GPU",
            sha256="8a9af5c2888a9947",
        ),
        PatchRecord(
            target="megatron.core.dist_checkpointing.strategies.filesystem_async:get_write_results_queue",
            replace=lambda _original: lambda *_args, **_kwargs: queue.Queue(),
            reason="it spawns a process that imports the script and Megatron anew; without --async-save, threads write",
            sha256="fe7322bffa193a02",
        ),
        PatchRecord(
            target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
            replace=with_adam_state,
            reason="without TE and apex it reads the step from Adam's state, which is empty before the first step, and "
            "always if this rank has none of the parameters, such as experts on other pipeline stages",
            sha256="0f707320dc52f77a",
        ),
        PatchRecord(
            target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
            replace=_norm_for_sequence_parallelism,
            reason="it refuses sequence parallelism, though its parameters need only be marked for it",
            sha256="7a86dd6ea62cfd68",
        ),
        PatchRecord(
            target="megatron.core.transformer.dot_product_attention:DotProductAttention.__init__",
            replace=_attention_with_widths,
            reason="it computes heads whose values are narrower than their keys, but does not take the widths",
            sha256="a03e05a45275648c",
        ),
        *(
            PatchRecord(
                target=f"megatron.core.tensor_parallel.mappings:{name}",
                replace=_reduce_over_several,
                reason="of one rank it returns a view, to which experts that are not cut cannot add a bias in place",
                sha256=sha256,
            )
            for name, sha256 in (
                ("reduce_from_tensor_model_parallel_region", "7be87b901bc3a4ff"),
                ("reduce_scatter_to_sequence_parallel_region", "d02d50d7fdbf2882"),
            )
        ),
    )


def _reduce_over_several(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(original)
    def replacement(input_: torch.Tensor, group: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input_ if group is not None and group.size() == 1 else original(input_, group, *args, **kwargs)

    return replacement


def _attention_with_widths(original: Callable[..., None]) -> Callable[..., None]:
    """Accept the widths of a head's key and value, which multi-latent attention passes as to Transformer Engine."""

    @functools.wraps(original)
    def replacement(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        del k_channels  # read off the keys
        original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    return replacement


def _empty_on_cpu(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def replacement(self: Any, device: Any, init_fn: Callable[..., torch.Tensor] | None = None) -> None:
        original(self, device, torch.empty if init_fn is None else init_fn)

    return replacement


def _norm_for_sequence_parallelism(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    @functools.wraps(original)
    def replacement(cls: type, config: Any, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = original(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            # Megatron sums the gradients of these parameters over the tensor-parallel ranks.
            setattr(parameter, "sequence_parallel", True)  # noqa: B010  # not an attribute that torch declares
        return norm

    return replacement


def required_arguments() -> dict[str, object]:
    """Values that a CPU run needs for Megatron's parsed arguments; the defaults are for CUDA."""
    from megatron.core.transformer.enums import AttnBackend

    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        "attention_backend": AttnBackend.unfused,
        "no_persist_layer_norm": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "num_workers": 0,
    }


def check_layers(args: argparse.Namespace) -> None:
    """Refuse settings that need Transformer Engine's layers or kernels. Call before Megatron's own checks.

    Raises:
        UnsupportedConfigurationError: naming the flag.
    """
    if args.transformer_impl != "local":
        return
    megatrons = (args.spec or ["megatron."])[0].startswith("megatron.")
    megatrons_hybrid = args.hybrid_layer_pattern is not None and megatrons
    # Megatron frees the outputs of these, and asks Transformer Engine first whether FP8 is on.
    recomputed = sorted({"gdn_norm_out", "layernorm", "mla_up_proj", "moe_act"} & set(args.recompute_modules or ()))
    for wanted, flag, instead in (
        (args.context_parallel_size > 1, f"--context-parallel-size {args.context_parallel_size}", "use 1"),
        (args.moe_grouped_gemm, "--moe-grouped-gemm", "drop it, and each expert is a GEMM of its own"),
        (args.use_precision_aware_optimizer, "--use-precision-aware-optimizer", "drop it"),
        # Megatron's own norms are torch's: input and weight have one type, and the weight is not centred at zero.
        (args.fp32_residual_connection and megatrons, "--fp32-residual-connection", "drop it"),
        (args.layernorm_zero_centered_gamma and megatrons, "--apply-layernorm-1p", "drop it"),
        (bool(recomputed), f"--recompute-modules {' '.join(recomputed)}", "recompute others, such as mlp"),
        (megatrons_hybrid, "--hybrid-layer-pattern", "train a GPT model, or name layers of your own with --spec"),
    ):
        if wanted:
            raise UnsupportedConfigurationError(
                f"{flag} needs Transformer Engine's kernels, and with them CUDA, which this machine does not have; "
                f"{instead}"
            )


def check(args: argparse.Namespace) -> None:
    """Refuse settings that need CUDA and would fail, or hang, during training.

    Raises:
        UnsupportedConfigurationError: for CUDA graphs, and for checkpoints written by another process.
    """
    if args.cuda_graph_impl != "none":
        raise UnsupportedConfigurationError(
            f"--cuda-graph-impl {args.cuda_graph_impl} needs CUDA, which this machine does not have; use none"
        )
    if args.etp_transport == TransportName.COPY_ENGINE.value:
        raise UnsupportedConfigurationError(
            "--etp-transport copy_engine copies between GPUs, which this machine does not have; use c10d or auto"
        )
    if args.async_save:
        raise UnsupportedConfigurationError(
            "--async-save needs CUDA, which this machine does not have: the process that writes looks for its GPU, and "
            "the training waits for it; drop it"
        )


def set_required_arguments(args: argparse.Namespace) -> None:
    """Give ``args`` the values of :func:`required_arguments` and log, on rank 0, which of them changed."""
    changed = []
    for name, value in required_arguments().items():
        if getattr(args, name) != value:
            setattr(args, name, value)
            changed.append(f"{name}={getattr(value, 'name', value)}")
    if changed and getattr(args, "rank", 0) == 0:
        logger.warning("no CUDA device: running on CPU with %s", ", ".join(changed))
