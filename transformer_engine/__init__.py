"""Steps aside for the real Transformer Engine. This file is not installed.

The folder holds the source of the package ``etp``; it is no package ``transformer_engine``. But where the repository's
root is on ``sys.path``, as it is for every script that is started there, Python finds this folder under that name.
Without this file it would become a namespace package, and whoever looks for Transformer Engine, as megatron-core does,
would find an empty one in its place. So an import that arrives here is handed on to the real package if there is one
further along the path, and fails as it would anywhere else if there is none.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def _find_real() -> ModuleSpec | None:
    """Where the import system would find the package if no source tree of this project were on the path."""
    path = [entry for entry in sys.path if not (Path(entry) / "transformer_engine" / "etp").is_dir()]
    for finder in sys.meta_path:
        # Only PathFinder goes through sys.path; others, such as those of editable installs, have their own map.
        spec = finder.find_spec(__name__, path if finder is PathFinder else None)
        if spec is not None and spec.origin is not None:  # a namespace package has no origin
            return spec
    return None


def _hand_on() -> None:
    """Load the real package and put it in this module's place, which ``import`` then returns."""
    spec = _find_real()
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    module = importlib.util.module_from_spec(spec)
    sys.modules[__name__] = module
    spec.loader.exec_module(module)


_hand_on()
