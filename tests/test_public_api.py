"""The names that users import, and what importing them costs."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys

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
    assert inspect.isclass(value)
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
    error = getattr(errors, name)("what happened", engine="rollout-1", bucket=3)
    error.add_note("beside it")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), copy.engine, copy.bucket) == ("what happened", "rollout-1", 3)
    assert copy.__notes__ == ["beside it"]
    assert isinstance(copy, errors.WeightSyncError)


@pytest.mark.parametrize("name", ["AcquireTimeout", "PhaseTimeout", "EngineTimeout"])
def test_errors_about_time_are_timeouts_to_everyone(name: str) -> None:
    assert issubclass(getattr(errors, name), TimeoutError)


def test_the_package_is_typed_for_its_users() -> None:
    from importlib.resources import files

    assert files("async_wsync").joinpath("py.typed").is_file()
