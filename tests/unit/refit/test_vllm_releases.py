"""Which releases of vLLM are known, and what becomes of servers of another one."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any, cast

import pytest

from megatron_patches.refit.errors import UnsupportedEngineError
from megatron_patches.refit.vllm import plugin
from megatron_patches.refit.vllm.releases import ADAPTERS, check_known, installed_release

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")


@pytest.mark.parametrize(
    ("version", "module"), [("0.26.0", "v0_26"), ("0.32.0", "v0_32"), ("0.32.0+cpu", "v0_32"), ("0.33.0", "v0_33")]
)
def test_a_known_release_has_an_adapter(version: str, module: str) -> None:
    assert check_known(version) == module
    assert importlib.util.find_spec(f"megatron_patches.refit.vllm.releases.{module}") is not None


@pytest.mark.parametrize("version", ["0.25.1", "0.26.1", "0.31.0", "0.32.0rc1", "0.33.1", "0.34.0", "1.0.0", "dev", ""])
def test_another_release_is_refused_by_name(version: str) -> None:
    with pytest.raises(UnsupportedEngineError) as raised:
        check_known(version)
    message = str(raised.value)
    assert message.startswith(f"weights cannot be pushed into vLLM {version}")
    assert message.endswith("; this package was tested with 0.26.0, 0.32.0, 0.33.0: pip install vllm==0.33.0")


@needs_vllm
def test_the_installed_release_has_every_name_that_is_used() -> None:
    import vllm

    assert installed_release().missing_names() == []
    assert type(installed_release()).__module__.endswith(ADAPTERS[vllm.__version__.partition("+")[0]])


@needs_vllm
def test_a_release_that_lacks_a_name_is_refused_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    release = type(installed_release())
    monkeypatch.setattr(release, "names", (*release.names, "vllm.config:CacheConfig.colour", "vllm.config:Nothing"))
    monkeypatch.delattr(_CPUSHMDistributed, "_init_cpu_shm")
    installed_release.cache_clear()
    with pytest.raises(UnsupportedEngineError, match=r"not as it was released: it has no .*_init_cpu_shm, ") as raised:
        installed_release()
    assert "vllm.config:CacheConfig.colour, vllm.config:Nothing; install it unmodified" in str(raised.value)


@needs_vllm
def test_a_server_of_an_unknown_release_starts_unchanged_unless_it_asks_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm
    from vllm import _custom_ops
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory as Factory

    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(Factory, "_registry", {})
    monkeypatch.setattr(_custom_ops, "_supports_onednn", True)
    plugin.register()
    plugin.register()
    assert _custom_ops._supports_onednn is True
    anything = cast(Any, SimpleNamespace())
    with pytest.raises(UnsupportedEngineError, match=r"^weights cannot be pushed into vLLM 0\.34\.0"):
        Factory.create_engine(WeightTransferConfig(backend="etp"), anything, anything, anything)


@needs_vllm
def test_the_contract_of_trainers_is_that_of_newer_releases() -> None:
    import vllm

    if not vllm.__version__.startswith("0.26."):
        pytest.skip("tests/integration/test_live_contract.py tries it")
    message = r"with vLLM 0\.32\.0 and 0\.33\.0, and this is 0\.26\.0.* use WeightPublisher"
    with pytest.raises(UnsupportedEngineError, match=message):
        importlib.import_module("megatron_patches.refit.vllm_trainer")
