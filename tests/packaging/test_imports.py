"""What `import` finds: wheel and editable, with and without Transformer Engine, from the root and from elsewhere."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

import pytest

from tests.packaging.conftest import Environment

WHERE_THINGS_ARE = """
    from importlib.util import find_spec
    result = {name: find_spec(name).origin for name in ("etp", "megatron_patches")}
"""

WHAT_TE_IS = """
    try:
        import transformer_engine
        import transformer_engine.pytorch as te
    except ModuleNotFoundError as error:
        result = {"missing": error.name, "message": str(error)}
    else:
        import pickle, sys
        recipe = pickle.loads(pickle.dumps(te.Recipe(3)))
        result = {
            "version": transformer_engine.__version__,
            "file": transformer_engine.__file__,
            "path": list(transformer_engine.__path__),
            "same": transformer_engine.same and sys.modules["transformer_engine"] is transformer_engine,
            "name": te.NAME,
            "margin": recipe.margin,
            "kind": type(recipe) is te.Recipe,
        }
"""


# As PEFT and Accelerate ask whether Transformer Engine is there, before and behind an attempt to import it.
PROBES = """
    from importlib import metadata, util
    def probe():
        if util.find_spec("transformer_engine") is None:
            try:
                return [False, util.find_spec("transformer_engine.pytorch")]
            except ModuleNotFoundError as error:
                return [False, error.name]
        try:
            metadata.version("transformer_engine")
        except metadata.PackageNotFoundError:
            pass
        import transformer_engine
        return [True, util.find_spec("transformer_engine.pytorch") is not None]
    result = [probe()]
    try:
        import transformer_engine
    except ModuleNotFoundError as error:
        result.append(error.name)
    else:
        result.append(transformer_engine.__version__)
    result.append(probe())
"""


@pytest.fixture(params=["root", "elsewhere"])
def cwd(request: pytest.FixtureRequest, environment: Environment, tmp_path: Path) -> Path:
    """The folder that Python is started in."""
    return environment.sources if request.param == "root" else tmp_path


def test_import_names_lead_to_the_installed_files(environment: Environment, cwd: Path) -> None:
    found = environment.evaluate(WHERE_THINGS_ARE, cwd=cwd)
    at_root = cwd == environment.sources
    site = environment.python.parent.parent
    root = environment.sources if environment.kind == "editable" or at_root else site
    for name, origin in found.items():
        assert Path(origin).is_relative_to(root)
        assert Path(origin).parts[-2:] == (name, "__init__.py")


def test_transformer_engine_is_the_real_one(environment: Environment, cwd: Path, real_te: Path) -> None:
    package = real_te / "transformer_engine"
    assert environment.evaluate(WHAT_TE_IS, cwd=cwd, path=(real_te,)) == {
        "version": "2.20.2",
        "file": str(package / "__init__.py"),
        "path": [str(package)],
        "same": True,
        "name": "transformer_engine.common",
        "margin": 3,
        "kind": True,
    }


def test_transformer_engine_is_missing_where_there_is_none(environment: Environment, cwd: Path) -> None:
    assert environment.evaluate(WHAT_TE_IS, cwd=cwd) == {
        "missing": "transformer_engine",
        "message": "No module named 'transformer_engine'",
    }


@pytest.mark.parametrize("present", [False, True])
def test_libraries_that_look_for_transformer_engine_find_what_is_there(
    environment: Environment, cwd: Path, real_te: Path, present: bool
) -> None:
    found = environment.evaluate(PROBES, cwd=cwd, path=(real_te,) if present else ())
    missing = [False, "transformer_engine"]
    assert found == ([[True, True], "2.20.2", [True, True]] if present else [missing, "transformer_engine", missing])


def test_packages_and_subpackages_import(environment: Environment, tmp_path: Path) -> None:
    code = """
    import etp.collectives, megatron_patches.refit
    result = [etp.Linear.__module__, etp.collectives.__name__, megatron_patches.refit.__name__]
    """
    expected = ["etp.modules", "etp.collectives", "megatron_patches.refit"]
    assert environment.evaluate(code, cwd=tmp_path) == expected


def test_what_runs_inside_vllm_needs_no_megatron(engine_environment: Environment, tmp_path: Path) -> None:
    """Every module of it, with all that it imports in turn."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    code = """
    import importlib, pkgutil, sys
    from megatron_patches.refit import vllm
    names = [found.name for found in pkgutil.iter_modules(vllm.__path__, f"{vllm.__name__}.")]
    for name in names:
        importlib.import_module(name)
    result = [len(names) > 15, [name for name in sys.modules if name.split(".")[0] == "megatron"]]
    """
    assert engine_environment.evaluate(code, cwd=tmp_path) == [True, []]


@pytest.mark.parametrize(
    "command",
    [
        ("megatron_patches", "script.py"),
        ("megatron_patches.refit", "export", "--load", "saved", "--output", "out"),
        ("megatron_patches.refit", "push", "--load", "saved", "--engines", "http://127.0.0.1:9"),
    ],
    ids=["train", "export", "push"],
)
def test_a_trainer_without_megatron_says_in_a_line_how_to_get_it(
    engine_environment: Environment, command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "script.py").touch()
    (tmp_path / "saved").mkdir()
    for name in ("metadata.json", ".metadata"):  # a checkpoint, as far as one looks before Megatron reads it
        (tmp_path / "saved" / name).touch()
    done = subprocess.run(
        [engine_environment.python, "-m", *command],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "error: megatron-core is not installed; install this package with its extra 'megatron': "
        "pip install '.[megatron]' where its sources are"
    )


def test_what_needs_no_megatron_runs_without(engine_environment: Environment, tmp_path: Path) -> None:
    code = """
    import etp, torch
    from megatron_patches.refit.tools import plan_command
    from megatron_patches.refit.trainer import session
    result = [etp.Linear.__module__, session.RefitSession.__name__]
    """
    assert engine_environment.evaluate(code, cwd=tmp_path) == ["etp.modules", "RefitSession"]
