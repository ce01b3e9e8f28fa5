"""The code in the README and in the docs runs as it stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import ray
import torch

from async_wsync import BroadcastLock, TorchEngine, WeightReceiver
from tests.support.cluster import ROOT, RayCluster
from tests.support.scripts import FENCED, Scripts

GUARANTEES = (ROOT / "docs" / "guarantees.md").read_text()
LINK = re.compile(r"\]\(([^)#]+?)\)")


def test_the_readmes_example_runs_as_it_stands(scripts: Scripts) -> None:
    shown = scripts.result("README")
    assert re.search(r"version 3: 16\.8 MB in 2 tensors", shown), shown
    assert shown.count("current, version 3") == 2


@ray.remote(num_cpus=0)
class Engine(WeightReceiver):
    def __init__(self) -> None:
        self.model = torch.nn.Linear(8, 8)
        self.init_weight_receiver(self.model)

    def held(self) -> tuple[int | None, torch.Tensor]:
        return self.weight_version, self.model.weight.detach()


def test_a_blocking_trainer_runs_as_the_docs_show(ray_cluster: RayCluster) -> None:
    (code,) = FENCED.findall((ROOT / "docs" / "index.md").read_text())
    namespace: dict[str, object] = {}
    exec(code, namespace)
    engine, model = Engine.remote(), torch.nn.Linear(8, 8)

    @torch.no_grad()
    def train_step(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            parameter.add_(1.0)

    train = namespace["train"]
    assert callable(train)
    train(model, [TorchEngine(engine)], BroadcastLock.create(name="docs"), train_step)
    version, weight = ray.get(engine.held.remote(), timeout=30)
    assert version == 3
    assert torch.equal(weight, model.weight)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
)
def test_links_between_pages_lead_somewhere(page: Path | str) -> None:
    path = ROOT / page
    broken = [
        link
        for link in LINK.findall(path.read_text())
        if not link.startswith("http") and not (path.parent / link).exists()
    ]
    assert not broken


def test_ci_runs_the_readmes_test_command() -> None:
    done = subprocess.run(
        ["bash", "-n", str(ROOT / ".ci" / "run")], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    commands = re.findall(r"^python3 .*nox -s tests$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(commands) == 1, "`.ci/run` takes this line from the README"


def test_every_promise_names_tests_that_exist() -> None:
    named = cited()
    assert sorted(named) == list(range(1, 13))
    for number, places in named.items():
        assert places, number
        for place in places:
            file, _, test = place.partition("::")
            assert (ROOT / file).exists(), place
            assert not test or f"def {test}(" in (ROOT / file).read_text(), place


def test_promises_in_seconds_name_tests_of_the_gate_and_a_change_must_pass_it() -> None:
    named = cited()
    for number in (4, 7, 9):
        assert any(in_the_gate(place) for place in named[number]), number
    assert re.search(r"^\S*nox -s gate$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def cited() -> dict[int, list[str]]:
    sections = re.split(r"^\*\*G(?=\d+ )", GUARANTEES.split("## Not promised")[0], flags=re.MULTILINE)[1:]
    return {int(s.split()[0]): re.findall(r"^- `(tests/[^`]+)`$", s, re.MULTILINE) for s in sections}


def in_the_gate(place: str) -> bool:
    file, _, test = place.partition("::")
    text = (ROOT / file).read_text()
    return "pytestmark = pytest.mark.gate" in text or f"@pytest.mark.gate\nasync def {test}(" in text
