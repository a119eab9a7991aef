"""Which project module may import which, read from the sources without running them.

The rules are those of docs/structure.md. Imports inside functions count as well, because they are dependencies too. So
do imports under ``TYPE_CHECKING``, except that within ``etp`` they may name types of higher layers.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"etp": ROOT / "etp", "megatron_patches": ROOT / "megatron_patches"}

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors"}),
    frozenset({"layout", "config", "stack"}),
    frozenset(
        {
            "collectives",
            "cache",
            "streams",
            "digest",
            "te",
            "refusals",
            "allowed",
            "shard_copy",
            "differentiate",
            "formats",
            "optimizer_steps",
        }
    ),
    frozenset(
        {
            "group",
            "shard",
            "grads",
            "mode",
            "passes",
            "versions",
            "traffic",
            "routes",
            "matrices",
            "shard_grad",
            "functional",
            "derived",
            "terms",
            "stacked",
        }
    ),
    frozenset({"param", "replicated", "reductions", "grad_hooks"}),
    frozenset({"gathers", "membership", "shard_states", "optimizers"}),
    frozenset({"runtime"}),
    frozenset({"modules", "sites", "wrap"}),
    frozenset({"state", "checkpoint", "clip", "muon"}),
)
"""The engine's modules, lowest layer first. A module imports from its own layer and from lower ones.

Annotations may name types of any layer: such an import is for the type checker only.
"""

REFIT = "megatron_patches.refit"
REFIT_LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "progress", "size_text", "command"}),
    frozenset({"layout"}),
    frozenset({"planning", "models"}),
    frozenset({"control", "memory"}),
    frozenset({"transports"}),
    frozenset({"parties", "source", "target"}),
    frozenset({"checkpoints", "trainer", "vllm"}),
    frozenset({"simulation", "ray_engine", "framework", "trl", "verl", "nemo_rl", "vllm_trainer"}),
    frozenset({"tools"}),
    frozenset({"__main__"}),
)
"""As :data:`LAYERS`, the folders and modules of refit."""

REFIT_GLUE = tuple(
    f"{REFIT}.{part}"
    for part in (
        "source",
        "checkpoints.checkpoint_model",
        "checkpoints.checkpoint_build",
        "checkpoints.megatron_checkpoint",
    )
)
"""The parts of refit that know the trainer; the others see shard layouts and integers only."""

REFIT_VLLM = f"{REFIT}.vllm"
"""What runs inside the inference engine's process."""


@dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        target: the imported module.
        line: where, in the importing file.
        deferred: True inside a function, or for type checking only: it does not run when the module is imported.
        typing: for type checking only: it never runs.
    """

    target: str
    line: int
    deferred: bool
    typing: bool


def product_sources() -> dict[str, str]:
    """Text of every module of the two packages, by import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted(folder.rglob("*.py")):
            parts = (package, *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.read_text(encoding="utf-8")
    return found


def imports_of(text: str, modules: Mapping[str, str]) -> Iterator[Import]:
    """The imports in a module's text. ``from package import name`` is an import of the submodule if there is one."""

    def walk(node: ast.AST, deferred: bool, typing: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            never = typing or (isinstance(child, ast.If) and _is_for_typing(child.test))
            later = deferred or never or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, deferred, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom) and child.module is not None:
                for alias in child.names:
                    submodule = f"{child.module}.{alias.name}"
                    target = submodule if submodule in modules else child.module
                    yield Import(target, child.lineno, deferred, typing)
            yield from walk(child, later, never)

    yield from walk(ast.parse(text), False, False)


def _is_for_typing(test: ast.expr) -> bool:
    """Whether this is the condition ``TYPE_CHECKING``, not its opposite."""
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def direction_violations(modules: Mapping[str, str]) -> list[str]:
    """Every import that goes the wrong way, as ``module:line: what is wrong``."""
    found = []
    for name, text in modules.items():
        for imported in imports_of(text, modules):
            reason = _forbidden(name, imported.target, typing=imported.typing)
            if reason is not None:
                found.append(f"{name}:{imported.line}: imports {imported.target}; {reason}")
    return found


def _within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def _layer(name: str) -> int | None:
    """Index of an engine module's layer; None for the package itself and for modules not listed."""
    part = name.split(".")[1] if "." in name else ""
    return next((index for index, layer in enumerate(LAYERS) if part in layer), None)


def _forbidden(name: str, target: str, *, typing: bool) -> str | None:
    """Why module ``name`` may not import ``target``; None if it may."""
    if _within(name, "etp"):
        return _forbidden_in_engine(name, target, typing=typing)
    if _within(name, REFIT):
        return (_forbidden_within_refit if _within(target, REFIT) else _forbidden_around_refit)(name, target)
    return None


def _forbidden_around_refit(name: str, target: str) -> str | None:
    if _within(name, REFIT_VLLM):
        if _within(target, "megatron", "transformer_engine"):
            return "what runs inside vLLM imports neither Megatron nor Transformer Engine"
        if _within(target, "etp.param", "etp.runtime"):
            return "what runs inside vLLM knows nothing of the engine's run time"
    if not _within(name, *REFIT_GLUE):
        if _within(target, "etp") and not _within(target, "etp.layout"):
            return "refit takes from etp only its layout"
        if _within(target, "megatron_patches"):
            return "refit stands alone; only its source and REFIT_GLUE's modules of checkpoints know the rest"
    return None


def _forbidden_in_engine(name: str, target: str, *, typing: bool) -> str | None:
    if _within(target, "megatron_patches", "megatron", "vllm"):
        return "the engine knows neither Megatron nor the patches nor vLLM"
    if name == "etp" or not _within(target, "etp"):
        return None
    if target == "etp":
        return "a module of the engine imports the module it needs, not the package that collects them"
    own, other = _layer(name), _layer(target)
    if own is None or other is None:
        return f"{name if own is None else target} belongs to no layer; give it one in tests/support/imports.py"
    return f"layer {other} is above its own, {own}" if other > own and not typing else None


def _forbidden_within_refit(name: str, target: str) -> str | None:
    if REFIT in {name, target}:
        return None if name == REFIT else "a module of refit imports the module it needs, not the package"
    parts = [module.removeprefix(f"{REFIT}.").split(".")[0] for module in (name, target)]
    own, other = (next((i for i, layer in enumerate(REFIT_LAYERS) if part in layer), None) for part in parts)
    if own is None or other is None:
        return f"{name if own is None else target} belongs to no layer; give it one in tests/support/imports.py"
    if set(parts) == {"trainer", "vllm"}:
        return "the trainer and the inference engine know each other by messages only"
    return f"layer {other} is above its own, {own}" if other > own else None


def cycles(modules: Mapping[str, str]) -> list[str]:
    """Import cycles between modules, each as ``a -> b -> a``. A package's own ``__init__`` counts as a module.

    Imports for annotations only never run, so they close no cycle.
    """
    graph = {
        name: sorted({i.target for i in imports_of(text, modules) if not i.typing} & modules.keys() - {name})
        for name, text in modules.items()
    }
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            found.append(" -> ".join((*trail[trail.index(name) :], name)))
        elif name not in done:
            for target in graph[name]:
                visit(target, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    return found


def imported_at_once(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module imports when it is imported itself, not in a function of it."""
    return {name: {i.target for i in imports_of(text, modules) if not i.deferred} for name, text in modules.items()}


def loaded_with(name: str, imported: Mapping[str, set[str]]) -> set[str]:
    """Every module, foreign ones included, that importing ``name`` loads at once: parents' ``__init__`` too.

    Args:
        name: of a module.
        imported: by :func:`imported_at_once`.
    """
    loaded: set[str] = set()
    pending = [name]
    while pending:
        current = pending.pop()
        if current in loaded:
            continue
        loaded.add(current)
        pending += [current.rsplit(".", depth)[0] for depth in range(1, current.count(".") + 1)]
        pending += imported.get(current, ())
    return loaded


def statement_violations(modules: Mapping[str, str]) -> list[str]:
    """Statements that product code does without, as ``module:line: which``."""
    found = []
    for name, text in modules.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Global):
                found.append(f"{name}:{node.lineno}: a global statement; give the state an owner")
            elif isinstance(node, ast.Assert):
                found.append(f"{name}:{node.lineno}: an assert; raise an exception")
    return found
