"""The list of patches: it refuses what it does not know, and names each target once."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import megatron_patches
from megatron_patches import MegatronEtpConfig, contract, cpu, registry
from megatron_patches.registry import IncompatibleMegatronError, PatchRecord, SourceRecord
from megatron_patches.weight_shard_api import WeightShardApi


def all_records() -> tuple[PatchRecord | SourceRecord, ...]:
    relied_upon, patches = megatron_patches.records(WeightShardApi(MegatronEtpConfig()))
    return (*relied_upon, *patches, *(() if cpu.needed() else cpu.records()))


def test_the_installed_megatron_is_the_expected_one() -> None:
    registry.check_versions()
    registry.verify(all_records())
    assert registry.megatron_core_version() == "0.19.2"


def test_every_change_to_megatron_has_a_hash_and_a_reason() -> None:
    for record in all_records():
        assert record.reason
        if record.module.startswith("megatron"):
            assert record.sha256 is not None, record.target


def test_every_target_is_named_once() -> None:
    targets = [record.target for record in all_records()]
    assert len(targets) == len(set(targets))


def test_digest_ignores_comments_and_blank_lines_only() -> None:
    source = "def f(a):\n    # why\n\n    return a + 1   \n"
    assert registry.source_digest(source) == registry.source_digest("def f(a):\n    return a + 1\n")
    assert registry.source_digest(source) != registry.source_digest("def f(a):\n    return a + 2\n")
    assert registry.source_digest(source) != registry.source_digest("def f(a):\n        return a + 1\n")


@pytest.fixture
def copied_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of two files of megatron-core that :class:`InstalledPackage` finds in the place of the installed one."""
    installed = registry.InstalledPackage("megatron.core").root
    for name in ("package_info.py", "tensor_parallel/gtp_api.py", "model_parallel_config.py"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(installed / name, target)

    class Found:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: Found())
    return tmp_path


RESOLVE = next(
    record for record in contract.records() if record.target.endswith(":resolve_tensor_parallel_weight_shards")
)


def test_a_changed_source_is_refused(copied_megatron: Path) -> None:
    path = copied_megatron / "model_parallel_config.py"
    registry.verify([RESOLVE])
    path.write_text(path.read_text().replace("tensor_parallel_num_weight_shards = tp *", "x = tp *"))
    with pytest.raises(IncompatibleMegatronError) as error:
        registry.verify([RESOLVE])
    message = str(error.value)
    assert message.startswith(f"{RESOLVE.target} in {copied_megatron} has source hash ")
    assert "reinstall megatron-core==0.19.2 unmodified" in message
    assert "\n" not in message


def test_a_changed_signature_is_refused(copied_megatron: Path) -> None:
    record = SourceRecord(
        target="megatron.core.model_parallel_config:resolve_tensor_parallel_weight_shards",
        signature="tensor_parallel_size",
        sha256=RESOLVE.sha256,
        reason="a test",
    )
    with pytest.raises(IncompatibleMegatronError, match=r"takes \(.+\), not \(tensor_parallel_size\)"):
        registry.verify([record])


def test_a_missing_definition_is_refused(copied_megatron: Path) -> None:
    path = copied_megatron / "model_parallel_config.py"
    path.write_text(path.read_text().replace("def resolve_tensor_parallel_weight_shards", "def renamed"))
    with pytest.raises(IncompatibleMegatronError, match="is missing"):
        registry.verify([RESOLVE])


def test_another_version_is_refused(copied_megatron: Path) -> None:
    path = copied_megatron / "package_info.py"
    path.write_text(path.read_text().replace("MINOR = 19", "MINOR = 20"))
    with pytest.raises(IncompatibleMegatronError) as error:
        registry.check_versions()
    assert str(error.value).startswith(f"megatron-core 0.20.2 at {copied_megatron} is not supported")
    assert "pip install megatron-core==0.19.2" in str(error.value)


@pytest.mark.parametrize(
    ("version", "accepted"), [("2.18.0", False), ("2.19.0", True), ("2.20.2+abc", True), ("2.21.0", False)]
)
def test_transformer_engine_versions(monkeypatch: pytest.MonkeyPatch, version: str, accepted: bool) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    if accepted:
        registry.check_versions()
        return
    with pytest.raises(IncompatibleMegatronError, match=r"transformer-engine .* install one >=2\.19,<2\.21, or none"):
        registry.check_versions()


@pytest.fixture
def modules() -> Iterator[tuple[types.ModuleType, types.ModuleType]]:
    """A module with a function and a class, and one of Megatron's that has imported the function by name."""
    owner, user = types.ModuleType("patched_owner"), types.ModuleType("megatron.patched_user")

    class Thing:
        def size(self) -> int:
            return 2

        @staticmethod
        def make() -> int:
            return 3

    def double(value: int) -> int:
        return 2 * value

    owner.double, owner.Thing, user.imported = double, Thing, double  # type: ignore[attr-defined]
    sys.modules[owner.__name__], sys.modules[user.__name__] = owner, user
    yield owner, user
    del sys.modules[owner.__name__], sys.modules[user.__name__]


def plus_one(original: Callable[..., int]) -> Callable[..., int]:
    return lambda *args: original(*args) + 1


def test_installation_reaches_functions_methods_and_copies_of_the_name(
    modules: tuple[types.ModuleType, types.ModuleType],
) -> None:
    owner, user = modules
    records = [
        PatchRecord(target="patched_owner:double", replace=plus_one, reason="a test"),
        PatchRecord(target="patched_owner:Thing.size", replace=plus_one, reason="a test"),
    ]
    registry.install_records(records)
    assert (owner.double(4), user.imported(4), owner.Thing().size()) == (9, 9, 3)


def test_it_is_too_late_once_process_groups_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, state.__name__, state)
    with pytest.raises(IncompatibleMegatronError, match=r"call megatron_patches\.apply\(\) before"):
        registry.check_not_initialized()
