"""The names that users import, and what importing them costs."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import async_wsync
from async_wsync import errors


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


def test_importing_the_package_imports_neither_torch_nor_ray_and_starts_nothing() -> None:
    code = (
        "import sys, threading, async_wsync\n"
        "heavy = {'torch', 'ray', 'anyio', 'tqdm', 'asyncio'} & sys.modules.keys()\n"
        "print(sorted(heavy), threading.active_count())"
    )
    assert run_python(code) == "[] 1"


@pytest.mark.parametrize("name", [name for name in async_wsync.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(async_wsync, name)
    assert inspect.isclass(value) or inspect.isfunction(value)
    assert value.__name__ == name
    assert (value.__doc__ or "").strip(), f"{name} has no docstring"


def test_the_homes_and_the_public_names_agree() -> None:
    assert sorted([*async_wsync._HOME_OF, "__version__"]) == async_wsync.__all__
    assert dir(async_wsync) == async_wsync.__all__


def test_every_error_is_public() -> None:
    public = {name for name in errors.__all__ if inspect.isclass(getattr(errors, name))}
    assert public <= set(async_wsync.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="WeightBroadcastr"):
        _ = async_wsync.WeightBroadcastr


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_survives_pickling_with_its_facts(name: str) -> None:
    kind = getattr(errors, name)
    facts = {fact: f"some {fact}" for fact in errors.declared_facts(kind)}
    error = kind("what happened", **facts)
    error.add_note("beside it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == "what happened"
    assert {fact: getattr(copy, fact) for fact in facts} == facts
    assert copy.__notes__ == ["beside it"]
    assert isinstance(copy, errors.WeightSyncError)


def test_an_error_takes_no_fact_that_its_kind_does_not_declare() -> None:
    with pytest.raises(TypeError, match="EngineDied has no fact enigne"):
        errors.EngineDied("gone", enigne="e0")
    with pytest.raises(TypeError, match="SelfDeadlock has no fact errno"):  # one of OSError's, as TimeoutError is
        errors.SelfDeadlock("twice", errno=3)
    timeout = errors.EngineTimeout("late", engine="e0", field="bucket", seconds=3.0)
    assert timeout.facts_for(errors.EngineFailed) == {"engine": "e0"}


def test_every_fact_that_the_package_gives_an_error_is_declared() -> None:
    calls = wrong = 0
    for path in Path(async_wsync.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in errors.__all__:
                facts = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
                calls += 1
                wrong += bool(facts - errors.declared_facts(getattr(errors, node.func.id)))
    assert calls > 50
    assert wrong == 0


@pytest.mark.parametrize("name", ["AcquireTimeout", "PhaseTimeout", "EngineTimeout"])
def test_errors_about_time_are_timeouts_to_everyone(name: str) -> None:
    assert issubclass(getattr(errors, name), TimeoutError)


def test_the_package_is_typed_for_its_users() -> None:
    from importlib.resources import files

    assert files("async_wsync").joinpath("py.typed").is_file()


def test_examples_and_docs_import_public_names_only() -> None:
    root = Path(async_wsync.__file__).parent.parent
    pages = [*sorted((root / "examples").glob("*.py")), *sorted((root / "docs").glob("*.md")), root / "README.md"]
    lines = [(page.name, line.strip()) for page in pages for line in page.read_text().splitlines()]
    imports = [(page, line) for page, line in lines if line.startswith(("from async_wsync", "import async_wsync"))]
    assert len(imports) > 8
    allowed = ("from async_wsync import", "from async_wsync.testing import", "from async_wsync.integrations.")
    assert not [(page, line) for page, line in imports if not line.startswith(allowed)]
