"""An implementation of sharded weights takes the place of Megatron's module."""

from __future__ import annotations

import sys
import types

import pytest

from megatron_patches import seam
from megatron_patches.arguments import MegatronEtpConfig
from megatron_patches.weight_shard_api import WeightShardApi


class Api:
    """An implementation whose names are all distinct objects."""

    def __init__(self, *missing: str) -> None:
        self.module = types.ModuleType(seam.SEAM)
        for name in set(seam.SEAM_NAMES) - set(missing):
            setattr(self.module, name, object())

    def as_module(self) -> types.ModuleType:
        return self.module

    def configure(self, config: MegatronEtpConfig) -> None:
        """Not called here."""


@pytest.fixture(autouse=True)
def _no_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Megatron if another test has imported it."""
    for name in [name for name in sys.modules if name == "megatron" or name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, seam.SEAM, types.ModuleType(seam.SEAM))


def test_megatrons_own_module_is_not_an_implementation() -> None:
    assert seam.installed_api() is None


def test_an_import_after_installation_finds_it() -> None:
    api = Api()
    seam.install_api(api)
    assert seam.installed_api() is api
    assert sys.modules[seam.SEAM] is api.module


def test_modules_that_imported_its_names_before_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    package, user = types.ModuleType("package"), types.ModuleType("user")
    package.gtp_api = user.HAVE_GTP = user.is_gtp_param = user.unrelated = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.tensor_parallel", package)
    monkeypatch.setitem(sys.modules, "megatron.core.ssm.mamba_mixer", user)
    api = Api()
    seam.install_api(api)
    assert package.gtp_api is api.module
    assert user.HAVE_GTP is api.module.HAVE_GTP
    assert user.is_gtp_param is api.module.is_gtp_param
    assert user.unrelated is None


def test_a_name_that_is_missing_is_an_error() -> None:
    with pytest.raises(AttributeError, match="lacks is_gtp_param, wait_async_comms"):
        seam.install_api(Api("wait_async_comms", "is_gtp_param"))


@pytest.mark.filterwarnings("ignore")  # Megatron warns, on import, of what is not installed
def test_our_implementation_has_every_name() -> None:
    module = WeightShardApi(MegatronEtpConfig()).as_module()
    assert [name for name in seam.SEAM_NAMES if not hasattr(module, name)] == []
    assert module.HAVE_GTP is True
