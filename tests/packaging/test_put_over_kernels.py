"""The environment of a vLLM that has no build for CPUs: its Python files, and an older build's kernels."""

from __future__ import annotations

import runpy
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

SCRIPT = Path(__file__).resolve().parents[2] / ".ci" / "put_over_kernels.py"


def test_python_files_are_of_the_wheel_and_kernels_of_the_build(tmp_path: Path) -> None:
    wheel, kernels, site = tmp_path / "vllm-7.1.0-cp38-abi3-any.whl", tmp_path / "older" / "vllm", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("vllm/__init__.py", "new")
        files.writestr("vllm/_C.abi3.so", "for GPUs")
        files.writestr("vllm-7.1.0.dist-info/METADATA", "Name: vllm\nVersion: 7.1.0\nSummary: Version: 7.1.0\n")
        files.writestr("vllm-7.1.0.dist-info/RECORD", "vllm/_C.abi3.so,,\n")
        files.writestr("vllm-7.1.0.dist-info/entry_points.txt", "[some]\n")
    (kernels / "inner").mkdir(parents=True)
    (kernels / "__init__.py").write_text("old")
    (kernels / "_C.abi3.so").write_text("for CPUs")
    (kernels / "inner" / "more.so").write_text("more")
    runpy.run_path(str(SCRIPT))["put_over_kernels"](wheel, kernels, site)
    found = {str(file.relative_to(site)): file.read_text() for file in site.rglob("*") if file.is_file()}
    assert found == {
        "vllm/__init__.py": "new",
        "vllm/_C.abi3.so": "for CPUs",
        "vllm/inner/more.so": "more",
        "vllm-7.1.0+cpu.dist-info/METADATA": "Name: vllm\nVersion: 7.1.0+cpu\nSummary: Version: 7.1.0\n",
        "vllm-7.1.0+cpu.dist-info/entry_points.txt": "[some]\n",
    }
