"""An implementation of sharded weights takes the place of Megatron's module."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_patches import contract, seam
from megatron_patches.arguments import MegatronEtpConfig
from megatron_patches.weight_shard_api import WeightShardApi


@pytest.fixture(autouse=True)
def _no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Megatron if another test has imported it."""
    for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, seam.SEAM, types.ModuleType(seam.SEAM))


def test_megatrons_own_module_is_not_an_implementation() -> None:
    assert seam.installed_api() is None


def test_an_import_after_installation_finds_it() -> None:
    api = WeightShardApi(MegatronEtpConfig())
    seam.install_api(api)
    assert seam.installed_api() is api
    assert sys.modules[seam.SEAM].wait_async_comms == api.wait_async_comms


def test_modules_that_imported_its_names_before_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    package, user = types.ModuleType("package"), types.ModuleType("user")
    package.gtp_api = user.HAVE_GTP = user.is_gtp_param = user.unrelated = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", package)
    monkeypatch.setitem(sys.modules, "megatron.core.ssm.mamba_mixer", user)
    seam.install_api(WeightShardApi(MegatronEtpConfig()))
    module = sys.modules[seam.SEAM]
    assert package.gtp_api is module
    assert user.HAVE_GTP is True
    assert user.is_gtp_param is module.is_gtp_param
    assert user.unrelated is None
    assert not hasattr(user, "wait_async_comms")


def test_it_has_every_name_that_megatron_imports() -> None:
    engine = "megatron.core.tensor_parallel.generalized_tensor_parallelism"
    names = {record.qualified_name for record in contract.records() if record.module == engine}
    module = WeightShardApi(MegatronEtpConfig()).as_module()
    assert set(module.__all__) == {"HAVE_GTP", *names}
    assert len(names) == 16
