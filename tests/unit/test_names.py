"""A public name of a module means one thing in its package."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

import pytest

from tests.support.imports import PACKAGES

CONVENTIONS: Mapping[str, str] = {
    "ADAPTER": "what is known of one release of vLLM",
    "BLOCK": "length of a block of one format",
    "FAMILY": "the table of one model family",
    "RECORD": "the patch of one module",
    "RECORDS": "the patches of one module",
    "TILE": "side of a tile of one file's kernels",
    "add_arguments": "adds one module's flags to Megatron's parser",
    "add_command": "adds one command to the parser",
    "check": "checks the flags that one module adds",
    "logger": "the module's logger",
    "main": "the module as a command",
    "records": "the patches of one module, made when asked for",
    "run": "what one command does",
}
"""Names that several modules define because each has its own of the same kind."""


def defined(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Public names that the statements of a module define; what they import is another module's."""
    for statement in body:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.TypeAlias(name=ast.Name(id=name)):
                names = [name]
            case ast.If() | ast.Try():
                names = [*defined(statement.body), *defined(statement.orelse)]
            case _:
                names = []
        yield from (name for name in names if not name.startswith("_"))


def modules_of_names(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules that define each public name."""
    modules: dict[str, list[str]] = {}
    for module, text in sorted(sources.items()):
        for name in set(defined(ast.parse(text).body)):
            modules.setdefault(name, []).append(module)
    return modules


def ambiguous(modules: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The names that several modules define, except conventions.

    A function in a file of kernels (with ``kernels`` in its name) may have the name of what it does elsewhere: it is
    the same operation on a GPU.
    """
    return {
        name: where
        for name, where in modules.items()
        if name not in CONVENTIONS and len([module for module in where if "kernels" not in module]) > 1
    }


@pytest.fixture(scope="module")
def packages() -> dict[str, dict[str, list[str]]]:
    """The modules of each name, by package."""
    return {
        package: modules_of_names(
            {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
        )
        for package, folder in PACKAGES.items()
    }


def test_one_name_means_one_thing(packages: Mapping[str, Mapping[str, list[str]]]) -> None:
    found = {package: ambiguous(modules) for package, modules in packages.items()}
    assert found == {package: {} for package in PACKAGES}, (
        "these names are defined in several modules: start one that a single module uses with an underscore, give one "
        "that is shared a name that says more, or import it where it means the same"
    )


def test_conventions_are_in_use(packages: Mapping[str, Mapping[str, list[str]]]) -> None:
    for name in CONVENTIONS:
        assert any(len(modules.get(name, ())) > 1 for modules in packages.values()), name


def test_a_second_definition_is_found_wherever_it_is() -> None:
    sources = {
        "a": "class Link: ...\ndef encode(): ...\nSIZE, _OWN = 1, 2\nmain = 3",
        "b": "type Link = int\n_OWN = 1\ndef main(): ...\nx.COUNT = [SIZE for SIZE in 'ab']",
        "c": "from a import Link\nif Link:\n    encode = Link\nelse:\n    SIZE: int = 3",
        "kernels": "def decode(): ...",
        "d": "def decode(): ...\nCOUNT = 2",
    }
    assert ambiguous(modules_of_names(sources)) == {"Link": ["a", "b"], "encode": ["a", "c"], "SIZE": ["a", "c"]}
