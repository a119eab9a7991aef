"""A platform of verl for tests: a CPU that verl treats as an NVIDIA GPU when it chooses its engines.

Named in ``VERL_USE_EXTERNAL_MODULES``, with ``VERL_PLATFORM=cpu``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What verl asks of a device. Ray is told of as many GPUs as the tests want processes."""

    device_name = "cpu"
    vendor_name = "none"
    device_module = types.SimpleNamespace(
        is_available=lambda: True,
        empty_cache=lambda: None,
        synchronize=lambda *_: None,
        set_device=lambda *_: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (1 << 30, 1 << 30),
        manual_seed=torch.manual_seed,
        get_device_properties=lambda *_: types.SimpleNamespace(total_memory=1 << 30),
    )

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:  # noqa: ARG002
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:  # noqa: ARG002
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return True

    def cudart(self) -> Any:
        return None
