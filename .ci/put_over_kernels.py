"""Makes vLLM for CPUs of a release that has no build for them: its own Python files, with an older build's kernels.

usage: PYTHON .ci/put_over_kernels.py WHEEL KERNELS

It unpacks WHEEL, a build of vLLM for GPUs, into the environment of PYTHON without what is compiled, and links what is
compiled from KERNELS, the folder ``vllm`` of a build for CPUs. The version gets the ending ``+cpu``, by which vLLM
chooses its platform.
"""

from __future__ import annotations

import sys
import sysconfig
import zipfile
from pathlib import Path


def put_over_kernels(wheel: Path, kernels: Path, site: Path) -> None:
    """Unpacks a wheel over kernels into a folder of packages, which has no vLLM."""
    version = wheel.name.split("-")[1]
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.endswith((".so", "/RECORD")):
                continue
            content = files.read(name)
            if name.endswith(".dist-info/METADATA"):
                content = content.replace(f"\nVersion: {version}\n".encode(), f"\nVersion: {version}+cpu\n".encode())
            target = site / name.replace(f"vllm-{version}.dist-info/", f"vllm-{version}+cpu.dist-info/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    for kernel in kernels.rglob("*.so"):
        link = site / "vllm" / kernel.relative_to(kernels)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(kernel.resolve())


if __name__ == "__main__":
    put_over_kernels(Path(sys.argv[1]), Path(sys.argv[2]), Path(sysconfig.get_path("purelib")))
