"""Builds the distribution ``megatron-etp``.

Two packages are installed: ``etp`` and ``megatron_patches``.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

setup(
    name="megatron-etp",
    version="0.1.0",
    description="Extended Tensor Parallelism: linear weights sharded over one more group of ranks, for Megatron",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["etp", "etp.*", "megatron_patches", "megatron_patches.*"]),
    package_data={"etp": ["py.typed"], "megatron_patches": ["py.typed"]},
    # What plain PyTorch and inference engines need. No upper bound on torch: each release of vLLM wants one release of
    # torch exactly, and CI trains on the newest that megatron-core runs on.
    install_requires=[
        "torch>=2.11",
        "msgspec",
        "numpy",
        "pyzmq",
        "rich",
        "safetensors",
    ],
    extras_require={
        "megatron": [
            "megatron-core==0.19.2",  # patched by name and by source hash, so exactly this one
            "psutil",  # its checkpoint writer fails without it
        ],
        "te": ["transformer-engine[core_cu13,pytorch]>=2.19,<2.21"],
        "nixl": ["nixl>=1.5,<2"],
        "metrics": ["prometheus_client>=0.20"],  # serves a push's telemetry to Prometheus
        "dev": [
            "emerging-optimizers>=0.3,<0.4",  # Megatron's Muon and Lion
            "hypothesis",
            "matplotlib",  # draws what benchmarks/train_step.py measured
            "mypy",
            "prometheus_client",
            "peft",  # trains the adapters that are published, and writes those that they are compared with
            "onnxscript",  # Transformer Engine's Python layer, which some tests unpack, imports it
            "pytest<9.2",  # with 9.2 pytest-xdist 3.8 forgets which tests belong together
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=77,<82",  # builds the package without build isolation
            "transformers",  # loads what is exported, and compares
        ],
    },
    entry_points={"vllm.general_plugins": ["etp = megatron_patches.refit.vllm.plugin:register"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
