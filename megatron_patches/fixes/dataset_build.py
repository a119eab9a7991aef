"""``pretrain()`` compiles its data-set helpers with a Makefile that the wheel does not have.

``initialize_megatron`` calls ``_compile_dependencies``, which runs ``make`` in ``megatron/core/datasets`` and exits the
process if that fails. The wheel ships the compiled helpers but not the Makefile, so every ``pretrain()`` from PyPI
fails there, also on GPUs. If the compiled helpers can be imported, there is nothing to compile.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from megatron_patches.registry import PatchRecord

_HELPERS = "megatron.core.datasets.helpers_cpp"


def _replace(compile_dependencies: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(compile_dependencies)
    def replacement() -> None:
        if importlib.util.find_spec(_HELPERS) is None:
            compile_dependencies()

    return replacement


RECORD = PatchRecord(
    target="megatron.training.initialize:_compile_dependencies",
    replace=_replace,
    reason="it runs a Makefile that the wheel lacks, although the wheel ships the compiled helpers",
    sha256="79d648743197444e",
)
