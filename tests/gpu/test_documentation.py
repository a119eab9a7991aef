"""Code of the documentation that needs GPUs runs as it stands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.gpu.devices import needs_gpus

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cuda_graphs.md"


@needs_gpus(2, shared=False)
def test_the_graphed_step_of_the_documentation_learns(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "graphed.py").write_text(example)
    # A file for each rank: what two of them write to one pipe runs together.
    where = ["--standalone", "--nproc-per-node", "2", "--log-dir", "logs", "--redirects", "1"]
    command = [sys.executable, "-m", "torch.distributed.run", *where, "graphed.py"]
    done = subprocess.run(
        command, check=False, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    outputs = list(tmp_path.glob("logs/*/attempt_0/*/stdout.log"))
    assert sorted(output.parent.name for output in outputs) == ["0", "1"]
    losses = [float(output.read_text()) for output in outputs]
    # Outputs begin near zero, so the first loss is that of the targets' own size, about one.
    assert all(0.0 < loss < 1.2 for loss in losses)
