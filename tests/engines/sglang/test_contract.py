"""Every payload that we send, held against SGLang's own request classes: a renamed field fails here."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
import torch

from async_wsync.engines.sglang import messages as wire
from async_wsync.transfer.tensors import param_meta
from async_wsync.types import BucketSpec, GroupSpec, WireFormat
from tests.engines.sglang.server import HERE, PYTHON, environment

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(200)]

GROUP = GroupSpec(
    name="g",
    backend="gloo",
    master_address="127.0.0.1",
    master_port=1234,
    world_size=2,
    epoch=1,
    timeout=1.0,
    connect_timeout=1.0,
)
BUCKET = BucketSpec(
    index=0, params=(param_meta("a", torch.zeros(2, 3)), param_meta("b", torch.zeros(4).bfloat16())), nbytes=32
)


def payloads() -> list[tuple[str, dict[str, Any]]]:
    return [
        ("InitWeightsUpdateGroupReqInput", wire.init_group(GROUP, 1)),
        ("DestroyWeightsUpdateGroupReqInput", wire.destroy_group("g")),
        *(("PauseGenerationReqInput", wire.pause(mode)) for mode in wire.PAUSE_WORDS),
        ("ContinueGenerationReqInput", {}),
        *(("BeginWeightUpdateReqInput", wire.begin(selector)) for selector in ("all", "target", "draft")),
        ("EndWeightUpdateReqInput", {}),
        *(
            ("UpdateWeightsFromDistributedReqInput", wire.announce(BUCKET, "g", wire=form, selector="all"))
            for form in (WireFormat.FLATTENED, WireFormat.PER_TENSOR)
        ),
        ("UpdateWeightVersionReqInput", wire.set_version(7)),
        ("GetWeightsByNameReqInput", wire.sample("a", 1)),
        ("CheckWeightsReqInput", wire.checksum()),
        ("LoadLoRAAdapterFromTensorsReqInput", wire.load_lora("tuned", "AAAA", {"r": 4}, num_ranks=2, pinned=False)),
        ("UnloadLoRAAdapterReqInput", wire.unload_lora("tuned")),
    ]


def ask(pairs: list[tuple[str, dict[str, Any]]]) -> list[str | None]:
    done = subprocess.run(
        [PYTHON, str(HERE / "contract.py")],
        input=json.dumps(pairs),
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    complaints: list[str | None] = json.loads(done.stdout.strip().splitlines()[-1])
    return complaints


def test_every_payload_fits_its_request_class() -> None:
    assert ask(payloads()) == [None] * len(payloads())


def test_a_renamed_field_or_another_type_would_be_seen() -> None:
    wrong = [
        ("UpdateWeightVersionReqInput", {"newest_version": "7"}),
        ("UpdateWeightVersionReqInput", {"new_version": 7}),
        ("PauseGenerationReqInput", {"mode": "drain"}),
    ]
    assert all(ask(wrong))
