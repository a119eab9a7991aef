"""A program of a test that calls Ray actors with engines, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.prepared import variables_of, vllm_on_cpu

ROOT = Path(__file__).resolve().parents[2]


def found_by(module: str, folder: Path, *args: str, python: str = sys.executable, timeout_s: float = 500.0) -> Any:
    """What a program writes to ``found.json`` in its folder; fails with its output if it does.

    Args:
        module: which to run.
        folder: its first argument.
        args: those after it.
        python: the interpreter.
        timeout_s: seconds that it may take.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [python, "-W", "ignore", "-m", module, str(folder), *args],
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def start_ray(cpus: int) -> None:
    """Starts Ray for actors with engines. In the program."""
    import ray

    ray.init(num_cpus=cpus, include_dashboard=False, runtime_env={"env_vars": variables_of(vllm_on_cpu)})
