"""Defines what Megatron calls in ``torch.cuda``, for a CPU.

Megatron-core calls it unconditionally: for the current device, for streams and events, for random state. On a CPU,
every operation has finished when it returns: streams do nothing, events are always complete, "the current device" is
the CPU, and its random state is that of the CPU generator. ``torch.cuda.is_available()`` stays False.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable
from typing import Any, Self

import torch

from megatron_patches.registry import PatchRecord

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
    """Replacements of functions of torch, and of Megatron's functions for the state of its random numbers."""
    return (
        PatchRecord(
            target="torch:compile",
            replace=_unless_disabled,
            reason="Megatron calls it on import, and with TORCH_COMPILE_DISABLE=1, too, it imports the compiler: 3 s",
        ),
        *_device_records(),
        *_random_state_records(),
        *_tensor_records(),
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
