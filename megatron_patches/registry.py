"""Records every patch to other packages, and checks that the installed sources are those it was written for.

A :class:`PatchRecord` says which function is replaced, why, and what its source looked like when the replacement was
written. :func:`verify` reads the installed sources as text, before anything is imported, and raises if the version, a
signature or a source differs, because a patch on changed code fails far from its cause.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MEGATRON_CORE_VERSION = "0.19.2"
TRANSFORMER_ENGINE_MINIMUM = (2, 19)
TRANSFORMER_ENGINE_BELOW = (2, 21)


class IncompatibleMegatronError(RuntimeError):
    """The installed Megatron or Transformer Engine is not one that this package supports."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A place in the sources of another package.

    Attributes:
        target: ``"package.module"`` for a file, ``"package.module:qualified.name"`` for a definition in it.
    """

    target: str

    @property
    def module(self) -> str:
        """The module that defines the target."""
        return self.target.partition(":")[0]

    @property
    def qualified_name(self) -> str:
        """The target's name in its module; "" for the module itself."""
        return self.target.partition(":")[2]


@dataclass(frozen=True, kw_only=True)
class PatchRecord(Target):
    """One replacement of one function, method or class attribute.

    Attributes:
        target: what is replaced, as ``"package.module:qualified.name"``.
        replace: called with the original; returns the replacement.
        reason: what goes wrong without it.
        upstream: the pull request or issue of the original project, or "" where there is none.
        sha256: hash of the original's source, see :func:`source_digest`; None for packages other than Megatron.
    """

    replace: Callable[[Any], Any]
    reason: str
    upstream: str = ""
    sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class SourceRecord(Target):
    """A file, or one definition in it, that is used without being replaced and must not change unnoticed.

    Attributes:
        target: ``"package.module"`` for a file, ``"package.module:name"`` for a definition.
        sha256: hash of the source, see :func:`source_digest`.
        signature: parameters of the definition as :func:`ast.unparse` prints them; None to compare the hash only.
        reason: what this package relies on.
    """

    sha256: str
    reason: str
    signature: str | None = None


Table = Mapping[str, Mapping[str, tuple[str, str]]]
"""For each module, and each definition in it ("" for the whole file), the hash of its source and what is relied on."""


def relied_upon(table: Table) -> tuple[SourceRecord, ...]:
    """Source records without a signature."""
    return tuple(
        SourceRecord(target=f"{module}:{name}" if name else module, sha256=sha256, reason=reason)
        for module, definitions in table.items()
        for name, (sha256, reason) in definitions.items()
    )


def source_digest(source: str) -> str:
    """Hash of Python source that ignores blank lines, whole-line comments and trailing whitespace.

    Returns:
        The first 16 hexadecimal digits of the SHA-256 of what remains.
    """
    lines = (line.rstrip() for line in source.splitlines())
    kept = [line for line in lines if line and not line.lstrip().startswith("#")]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Definition:
    """Source text and parameters of a file (no parameters) or of a definition in it."""

    source: str
    signature: str | None

    @property
    def sha256(self) -> str:
        """See :func:`source_digest`."""
        return source_digest(self.source)


class InstalledPackage:
    """The sources of an installed package, read as text: only its parent namespace is imported.

    Args:
        name: import name, such as ``"megatron.core"``.

    Raises:
        IncompatibleMegatronError: if it is not installed.
    """

    def __init__(self, name: str) -> None:
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # not even its namespace is installed
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise IncompatibleMegatronError(
                f"{name.replace('.', '-')} is not installed; install this package with its extra 'megatron': "
                "pip install '.[megatron]' where its sources are"
            )
        self.name = name
        self.root = Path(next(iter(spec.submodule_search_locations)))
        self._modules: dict[str, tuple[str, ast.Module]] = {}

    def definition(self, module: str, qualified_name: str = "") -> Definition | None:
        """The source of ``module``, or of one definition in it; None if it does not exist."""
        if module not in self._modules:
            relative = module.removeprefix(self.name).strip(".").replace(".", "/")
            candidates = [self.root / f"{relative}.py", self.root / relative / "__init__.py"]
            found = next((path for path in candidates if path.is_file()), None)
            if found is None:
                return None
            text = found.read_text(encoding="utf-8")
            self._modules[module] = (text, ast.parse(text))
        text, tree = self._modules[module]
        if not qualified_name:
            return Definition(text, None)
        return _find_definition(text, tree, qualified_name)


def _find_definition(text: str, tree: ast.Module, qualified_name: str) -> Definition | None:
    scope: ast.Module | ast.ClassDef | ast.FunctionDef = tree
    for part in qualified_name.split("."):
        named = {node.name: node for node in scope.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if part not in named:
            return None
        scope = named[part]
    signature = ast.unparse(scope.args) if isinstance(scope, ast.FunctionDef) else None
    # Not ast.get_source_segment, which is slow on Megatron's longest files.
    first, last = getattr(scope, "lineno", 1), getattr(scope, "end_lineno", None)
    return Definition("\n".join(text.split("\n")[first - 1 : last]), signature)


def megatron_core_version() -> str:
    """Version of the ``megatron.core`` that an import would load, read from its sources.

    The distribution's metadata may belong to another copy: a script in a Megatron-LM clone imports the clone.

    Raises:
        IncompatibleMegatronError: if megatron.core is not installed or does not state its version.
    """
    package = InstalledPackage("megatron.core")
    info = package.definition("megatron.core.package_info")
    values: dict[str, object] = {}
    for statement in ast.parse(info.source).body if info else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            values.update({t.id: statement.value.value for t in statement.targets if isinstance(t, ast.Name)})
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        raise IncompatibleMegatronError(f"cannot read megatron-core's version from {package.root}/package_info.py")
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"


def check_versions() -> None:
    """Refuse versions of megatron-core and Transformer Engine that this package does not support.

    Raises:
        IncompatibleMegatronError: naming what is installed, what is needed and how to get it.
    """
    found = megatron_core_version()
    if found != MEGATRON_CORE_VERSION:
        where = InstalledPackage("megatron.core").root
        raise IncompatibleMegatronError(
            f"megatron-core {found} at {where} is not supported; this release works with {MEGATRON_CORE_VERSION} only: "
            f"pip install megatron-core=={MEGATRON_CORE_VERSION}, and run the script from outside of another clone"
        )
    engine = transformer_engine_version()
    if engine is None:
        return
    release = tuple(int(part) for part in engine.split("+")[0].split(".")[:2])
    if not TRANSFORMER_ENGINE_MINIMUM <= release < TRANSFORMER_ENGINE_BELOW:
        low, high = (".".join(map(str, v)) for v in (TRANSFORMER_ENGINE_MINIMUM, TRANSFORMER_ENGINE_BELOW))
        raise IncompatibleMegatronError(
            f"transformer-engine {engine} is not supported; install one >={low},<{high}, "
            "or none and run with --transformer-impl local"
        )


def check_not_initialized() -> None:
    """Refuse to patch Megatron after it has built its process groups, which is too late for what depends on them.

    Raises:
        IncompatibleMegatronError: if ``megatron.core`` is loaded and its process groups exist.
    """
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None and parallel_state.model_parallel_is_initialized():
        raise IncompatibleMegatronError(
            "Megatron is initialised already; call megatron_patches.apply() before, best as the script's first lines"
        )


def transformer_engine_version() -> str | None:
    """Version of the installed Transformer Engine, or None."""
    try:
        return importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return None


def verify(records: Iterable[PatchRecord | SourceRecord]) -> None:
    """Compare the installed sources with what ``records`` expect.

    Raises:
        IncompatibleMegatronError: naming the first definition that is missing or differs.
    """
    for record, root, difference in differences(records):
        raise IncompatibleMegatronError(
            f"{record.target} in {root} {difference}, although its version is {MEGATRON_CORE_VERSION}; "
            f"reinstall megatron-core=={MEGATRON_CORE_VERSION} unmodified (needed for: {record.reason})"
        )


def differences(
    records: Iterable[PatchRecord | SourceRecord],
) -> Iterator[tuple[PatchRecord | SourceRecord, Path, str]]:
    """The records whose definition is missing or differs, with the package's folder and how it differs."""
    packages: dict[str, InstalledPackage] = {}
    for record in records:
        if record.sha256 is None:
            continue
        name = ".".join(record.module.split(".")[:2])
        package = packages.setdefault(name, InstalledPackage(name))
        difference = _difference(record, package.definition(record.module, record.qualified_name))
        if difference:
            yield record, package.root, difference


def _difference(record: PatchRecord | SourceRecord, found: Definition | None) -> str:
    if found is None:
        return "is missing"
    signature = record.signature if isinstance(record, SourceRecord) else None
    if signature is not None and found.signature != signature:
        return f"takes ({found.signature}), not ({signature})"
    if found.sha256 != record.sha256:
        return f"has source hash {found.sha256}, not {record.sha256}"
    return ""


def install_records(records: Iterable[PatchRecord]) -> None:
    """Replace every record's target, also where a loaded module holds the original under its own name.

    Called once in a process. No two records have the same target.
    """
    replaced: dict[int, tuple[Any, Any]] = {}
    for record in records:
        owner, name = _owner(record)
        # The class's own entry, so that a staticmethod or classmethod keeps its wrapper.
        original = vars(owner)[name] if isinstance(owner, type) and name in vars(owner) else getattr(owner, name)
        replacement = record.replace(original)
        setattr(owner, name, replacement)
        replaced[id(original)] = (original, replacement)
    _rebind(replaced)


def _owner(record: PatchRecord) -> tuple[Any, str]:
    owner: Any = importlib.import_module(record.module)
    *path, name = record.qualified_name.split(".")
    for part in path:
        owner = getattr(owner, part)
    return owner, name


def _rebind(replaced: dict[int, tuple[Any, Any]]) -> None:
    """Point ``from module import name`` copies of the originals at their replacements."""
    for module_name, module in list(sys.modules.items()):
        if not (module_name.startswith("megatron.") or module_name == "__main__"):
            continue
        for name, value in list(vars(module).items()):
            original, replacement = replaced.get(id(value), (None, None))
            if value is original and original is not None:
                setattr(module, name, replacement)
