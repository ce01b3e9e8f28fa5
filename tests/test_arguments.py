"""Every public argument is checked where it enters, and every `Timeouts` field that is named exists."""

from __future__ import annotations

import ast
import asyncio
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from async_wsync import (
    BroadcastLock,
    IterableSource,
    MasterWeightSource,
    ModuleSource,
    PolledLock,
    SafetensorsSource,
    StateDictSource,
    Timeouts,
    TorchEngine,
    UpdateRound,
    WeightBroadcaster,
    WeightReceiver,
)
from async_wsync.engines.sglang.actor import SGLangActor
from async_wsync.engines.sglang.server import SGLangServer
from async_wsync.engines.vllm.engine import VLLMActor, VLLMServer
from async_wsync.integrations.miles import update_bucket
from async_wsync.lock import adopt
from async_wsync.phases import PHASES, field_of, not_within
from async_wsync.progress import CallableProgress, RayTqdmProgress, TqdmProgress
from tests.support.cluster import ROOT

NAN, INF = math.nan, math.inf
NOT_SECONDS: tuple[Any, ...] = (NAN, INF, -INF, -1, -0.001, True, "1", None, 1e300, 10**400, [1])
FIELD_NAMES = [f.name for f in fields(Timeouts)]


class Actor:
    """As much of a handle as a constructor looks at."""

    class Method:
        def remote(self, *args: Any) -> Any:
            raise AssertionError("nobody is called")

    weight_sync = acquire = release = update_weights_from_distributed = Method()


class Text(str):
    """A string in every respect."""


def engine() -> TorchEngine:
    return TorchEngine(Actor(), name="e0")


def broadcaster(**options: Any) -> WeightBroadcaster:
    return WeightBroadcaster(options.pop("engines", [engine()]), **{"lock": None, "progress": False, **options})


def polled(**options: Any) -> PolledLock:
    return PolledLock(options.pop("handle", Actor()), **options)


def refuses(name: str, call: Callable[..., Any], values: tuple[Any, ...], says: str | None = None) -> list[Any]:
    """For each value a case: ``call(name=value)`` raises ValueError, and says what is wrong with which argument."""
    return [pytest.param(name, call, value, says or name, id=f"{name}={value!r:.20}") for value in values]


WORDS = ("sources", True, 1, None, ["engine"], "")
COUNTS = (0, -1, 1.5, True, "2", None, NAN)


@pytest.mark.parametrize(
    ("name", "call", "value", "says"),
    [
        case
        for cases in (
            *(refuses(field, Timeouts, NOT_SECONDS, rf"Timeouts\.{field}") for field in FIELD_NAMES),
            refuses("factor", Timeouts().scaled, (NAN, INF, 0, -1, True, "2", None)),
            refuses("factor", Timeouts().scaled, (1e6, 1e300), r"Timeouts\.\w+ must be"),
            *(
                refuses(word, broadcaster, WORDS)
                for word in ("backend", "pause_mode", "resume_policy", "on_engine_failure", "on_cancel", "lock_scope")
            ),
            refuses("topology", broadcaster, WORDS),
            *(refuses(count, broadcaster, COUNTS) for count in ("bucket_bytes", "num_buffers", "min_engines")),
            refuses("max_rebuilds", broadcaster, (-1, 1.5, True, None)),
            refuses("timeouts", broadcaster, (None, 3.0, {"bucket": 3})),
            refuses("lock", broadcaster, ("weights", 1, object())),
            refuses("progress", broadcaster, (None, 1, "bar")),
            refuses("name", broadcaster, ("", 1)),
            refuses("master_address", broadcaster, ("", 1, ["10.0.0.1"])),
            refuses("on_event", broadcaster, (1, "print")),
            refuses("engines", broadcaster, ("e0", None, 3)),
            refuses("engines", broadcaster, ([],), "no engines"),
            refuses("engines", broadcaster, (["e0"], [None]), "is not a rollout engine"),
            *(
                refuses(limit, lambda **o: BroadcastLock(name="l", **o), NOT_SECONDS)
                for limit in ("acquire_timeout", "warn_interval", "release_timeout")
            ),
            refuses("ttl", lambda **o: BroadcastLock(name="l", **o), tuple(v for v in NOT_SECONDS if v is not None)),
            refuses("ttl", lambda **o: BroadcastLock.create(name="l", **o), NOT_SECONDS),
            refuses("liveness_actor", lambda **o: BroadcastLock(name="l", **o), (1, "yes", None)),
            refuses("name", BroadcastLock, ("", 1, None, b"l"), "name of a lock"),
            refuses("namespace", lambda **o: BroadcastLock(name="l", **o), ("", 1)),
            *(
                refuses(
                    limit, lambda **o: BroadcastLock(name="l").hold(**{"label": "t", **o}), (NAN, INF, -1, True, "1")
                )
                for limit in ("timeout", "ttl")
            ),
            refuses("label", BroadcastLock(name="l").hold, (1, None)),
            *(
                refuses(limit, polled, NOT_SECONDS)
                for limit in ("interval", "max_interval", "acquire_timeout", "warn_interval", "release_timeout")
            ),
            refuses("interval", polled, (10.0,), "interval <= max_interval"),
            refuses("handle", polled, (None, "lock"), "no lock actor"),
            refuses("timeout", lambda **o: polled().hold(label="t", **o), (NAN, INF, -1, True, "1")),
            refuses("ttl", lambda **o: adopt(name="l", **o), NOT_SECONDS),
            refuses("anonymous_ttl", lambda **o: adopt(name="l", **o), (NAN, INF, 0, True)),
            refuses("num_sources", lambda **o: UpdateRound.create(name="r", **o), COUNTS),
            refuses("silence", lambda **o: UpdateRound.create(name="r", num_sources=1, **o), NOT_SECONDS),
            refuses("name", lambda **o: UpdateRound.create(num_sources=1, **o), ("", None, 1), "name of a round"),
            refuses("lifetime", lambda **o: UpdateRound.create(name="r", num_sources=1, **o), ("forever", 1)),
            refuses("num_sources", lambda **o: UpdateRound(name="r", **o), tuple(v for v in COUNTS if v is not None)),
            refuses("lifetime", lambda **o: BroadcastLock.create(name="l", **o), ("forever", 1)),
            refuses("lifetime", lambda **o: adopt(name="l", **o), ("forever", 1)),
            *(
                refuses(option, lambda **o: BroadcastLock.create(name="l", **o), values)
                for option, values in (
                    (
                        "server_options",
                        ("pidfds", 1, {"ttl": 3.0}, {"pidfd": True}, {"pidfds": 1}, {"waiter_silence": NAN}, {1: 2}),
                    ),
                    ("actor_options", ("num_cpus", [("num_cpus", 1)], {"name": "x"}, {"lifetime": "detached"})),
                )
            ),
            refuses("actor_options", lambda **o: adopt(name="l", **o), ("num_cpus", 1, {"namespace": "x"})),
            refuses("file", TqdmProgress, ("bar.log", 1, object())),
            refuses("label", TqdmProgress, ("", 1, None)),
            refuses("leave", TqdmProgress, (None, 1, "yes")),
            refuses("label", RayTqdmProgress, ("", 1, None)),
            refuses("fn", CallableProgress, (None, 1, "print")),
            refuses("handle", TorchEngine, (None, "e0", 3), "has no method"),
            refuses("name", lambda **o: TorchEngine(Actor(), **o), ("", 1)),
            refuses("method", lambda **o: TorchEngine(Actor(), **o), ("", 1)),
            refuses("method", lambda **o: TorchEngine(Actor(), **o), ("sync",), "has no method 'sync'"),
            *(
                refuses("num_ranks", call, COUNTS)
                for call in (
                    lambda **o: SGLangServer("http://s", **o),
                    lambda **o: SGLangActor(Actor(), **o),
                    lambda **o: VLLMServer("http://v", **o),
                    lambda **o: VLLMActor(Actor(), **o),
                )
            ),
            *(
                refuses("url", call, (None, 1, "s:30000", "ftp://s", b"http://s"), "http://")
                for call in (SGLangServer, VLLMServer)
            ),
            *(
                refuses(option, lambda **o: SGLangServer("http://s", **o), values)
                for option, values in (
                    ("wire_format", ("per_tensor", None)),
                    ("selector", ("draught", True, None)),
                    ("check_names", (None, "no")),
                    ("api_key", (1, "")),
                )
            ),
            refuses("dtype", lambda **o: StateDictSource({}, **o), ("bfloat16", torch.int8, 16)),
            refuses("dtype", lambda **o: MasterWeightSource({}, **o), ("bfloat16", torch.int8, None)),
            refuses("dtype", lambda **o: SafetensorsSource("/nowhere", **o), ("bfloat16", torch.int8, 16)),
            refuses("mapping", StateDictSource, ([], None, "model.pt")),
            refuses("tied", lambda **o: StateDictSource({}, **o), ("twice", True, None)),
            refuses("rename", lambda **o: StateDictSource({}, **o), ("model.", 1)),
            refuses("include", lambda **o: StateDictSource({}, **o), ("model.*", 1)),
            refuses("model", ModuleSource, (None, {})),
            refuses("items", IterableSource, (None, 1)),
            refuses("manifest", lambda **o: IterableSource([], **o), ([], "m")),
            refuses("collective", lambda **o: IterableSource([], **o), (None, "yes")),
            refuses("stable_tensors", lambda **o: IterableSource([], **o), (None, 1)),
            refuses("on_pause", lambda **o: WeightReceiver({}, **o), (1, "stop")),
        )
        for case in cases
    ],
)
def test_a_wrong_argument_is_refused_where_it_enters(
    name: str, call: Callable[..., Any], value: Any, says: str
) -> None:
    positional = name in ("fn", "factor", "handle", "url", "mapping", "model", "items") and call is not polled
    with pytest.raises(ValueError, match=says):
        call(value) if positional else call(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verify", "sources"),
        ("verify", True),
        ("verify", ""),
        ("verify", ["engines"]),
        ("pause_mode", "gently"),
        ("pause_mode", True),
        ("strict", None),
        ("strict", "no"),
        ("allow_empty", 1),
        ("atomic_groups", "layers"),
        ("atomic_groups", None),
        ("atomic_groups", [1]),
        ("atomic_groups", ["("]),
        ("round", "pp"),
        ("version", True),
        ("version", 1.0),
        ("version", "1"),
        ("version", None),
        ("source", None),
        ("source", {}),
        ("source", torch.nn.Linear(2, 2)),
    ],
)
async def test_a_wrong_argument_of_an_update_is_refused_before_anything_is_asked(name: str, value: Any) -> None:
    options: dict[str, Any] = {"source": ModuleSource(torch.nn.Linear(2, 2)), "version": 1, name: value}
    casting = broadcaster()
    async with asyncio.timeout(2):
        with pytest.raises(ValueError, match=name):
            await casting.update_weights(options.pop("source"), **options)
        if name in ("verify", "source"):
            with pytest.raises(ValueError, match=name):
                await casting.catch_up(**{"source": ModuleSource(torch.nn.Linear(2, 2)), name: value})
        await casting.aclose()
    assert casting.version is None


@pytest.mark.parametrize(
    "wrong", [{"timeouts": 3.0}, {"weight_version": True}, {"weight_version": None}, {"group_name": 1}]
)
async def test_a_wrong_argument_of_the_drop_in_is_refused(wrong: dict[str, Any]) -> None:
    right: dict[str, Any] = {
        "group_name": "g",
        "group": None,
        "weight_version": 1,
        "rollout_engines": [Actor()],
        "converted_named_tensors": [("w", torch.zeros(2))],
        "lock": None,
    }
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        await update_bucket(**{**right, **wrong})


def test_what_is_right_at_the_edge_is_taken() -> None:
    assert Timeouts(total=366 * 24 * 3600).scaled(0.5).total == 183 * 24 * 3600
    BroadcastLock(name=Text("l")).hold(label="", timeout=0)
    broadcaster(pause_mode="keep", max_rebuilds=0, master_address=None, name=None, on_event=print)


# ------------------------------------------------------------------ the fields that are named

SOURCES = sorted((ROOT / "async_wsync").rglob("*.py"))
TEXTS = [
    *SOURCES,
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "README.md",
    *sorted((ROOT / "examples").rglob("*.py")),
]


def literals(path: Path, keyword: str) -> list[tuple[int, str]]:
    """Line and value of each string given as ``keyword``, in a call or as a default."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        pairs: list[tuple[str | None, Any]] = []
        if isinstance(node, ast.Call):
            pairs = [(k.arg, k.value) for k in node.keywords]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pairs = [(a.arg, d) for a, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d]
        found += [
            (value.lineno, value.value)
            for name, value in pairs
            if name == keyword and isinstance(value, ast.Constant) and isinstance(value.value, str)
        ]
    return found


def test_every_timeouts_field_that_a_text_names_exists() -> None:
    known = {*FIELD_NAMES, "scaled"}
    wrong = []
    for path in TEXTS:
        text = path.read_text()
        wrong += [f"{path.name}: {m.group(0)}" for m in re.finditer(r"Timeouts\.([a-z_]+)", text) if m[1] not in known]
        for call in re.finditer(r"Timeouts\(([^()]*)\)", text):
            wrong += [f"{path.name}: {k}" for k in re.findall(r"(\w+)=", call[1]) if k not in known]
    assert not wrong


def test_every_field_that_an_error_is_given_exists() -> None:
    named = [(path.name, line, value) for path in SOURCES for line, value in literals(path, "field")]
    assert {"connect", "begin", "bucket", "end", "total", "idle"} <= {value for _, _, value in named}
    assert not [one for one in named if one[2] not in FIELD_NAMES]
    assert {phase.timeouts_field for phase in PHASES.values()} <= {*FIELD_NAMES, ""}


def test_every_phase_is_in_the_table_and_has_one_name_whatever_the_engine() -> None:
    verbs = {"_named"}
    phases = {value for path in (ROOT / "async_wsync").rglob("*.py") for _, value in literals(path, "phase")}
    for path in (ROOT / "async_wsync/engines").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in verbs:
                strings = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                phases |= {s for s in strings if not s.startswith("/") and s.isidentifier() and len(s) < 10}
    assert {"hello", "check", "receive", "leave", "verify", "reset", "lora", "status", "connect"} <= phases
    assert not phases & {"bucket", "broadcast", "join", "checksums"}
    assert not phases - PHASES.keys()
    from async_wsync.engines.torch import messages as p
    from async_wsync.engines.torch.engine import phase_of

    assert {phase_of(verb) for verb in p.Verb.__subclasses__()} - {"poll"} <= PHASES.keys()
    assert (phase_of(p.Join), phase_of(p.Receive), phase_of(p.Checksums)) == ("connect", "receive", "verify")


def test_the_table_of_phases_in_the_docs_is_the_one_in_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`|its caller) \|", (ROOT / "docs/failure-modes.md").read_text(), re.M)
    assert rows == [(phase.name, phase.timeouts_field) for phase in PHASES.values()]


def test_an_error_of_an_adapters_own_call_names_no_field() -> None:
    assert not_within(30, "verify") == "within 30 s (Timeouts.end)"
    assert not_within(5, "lora") == "within 5 s"
    assert field_of("status") == ""
