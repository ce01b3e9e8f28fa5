"""`UpdateReport`: for people, for machines, for trace viewers."""

from __future__ import annotations

import json
import pickle
from types import MappingProxyType

from async_wsync.report import BucketTiming, PhaseSpan, UpdateReport, format_bytes, format_seconds
from async_wsync.types import EngineOutcome, EngineState


def make_report() -> UpdateReport:
    return UpdateReport(
        version=7,
        nbytes=256_000_000,
        num_tensors=200,
        num_buckets=2,
        seconds=0.75,
        phases={"resume": 0.001, "lock": 0.004, "pause": 0.2, "receive": 0.4, "settle": 0.1},
        engines={
            "rollout-0": EngineOutcome(engine="rollout-0", state=EngineState.CURRENT, version=7, last_bucket=1),
            "rollout-1": EngineOutcome(
                engine="rollout-1",
                state=EngineState.LOST,
                version=6,
                last_bucket=0,
                error="EngineDied: killed",
                phase="receive",
                notes=("restarts: 1",),
            ),
        },
        spans=(
            PhaseSpan("lock", 100.0, 0.004),
            PhaseSpan("pause", 100.01, 0.2),
            PhaseSpan("receive", 100.25, 0.3),
            PhaseSpan("settle", 100.55, 0.1),
            PhaseSpan("receive", 100.651, 0.1),
            PhaseSpan("resume", 100.752, 0.001),
        ),
        checksum="abc123",
        notes=("dtype of lm_head could not be checked",),
        rebuilds=1,
        dropped=("rollout-1",),
        buckets=(
            BucketTiming(index=0, nbytes=128_000_000, staged_at=100.1, submitted_at=100.2, done_at=100.4),
            BucketTiming(index=1, nbytes=128_000_000, staged_at=100.3, submitted_at=100.4, done_at=100.7),
        ),
        started_at=100.0,
    )


def test_the_summary_says_what_was_sent_how_fast_and_how_each_engine_ended() -> None:
    lines = make_report().summary().splitlines()
    assert lines[0] == "version 7: 256.0 MB in 200 tensors, 2 buckets, 750 ms, 0.51 GB/s"
    assert lines[1] == "  lock 4.0 ms, pause 200 ms, receive 400 ms, resume 1.0 ms, settle 100 ms"
    assert lines[2] == "  rollout-0: current, version 7"
    assert lines[3] == "  rollout-1: lost, version 6; EngineDied: killed in receive; restarts: 1"
    assert lines[4] == "  group rebuilt 1 x, left behind: rollout-1"
    assert lines[5] == "  checksum abc123, equal on every engine"
    assert lines[6] == "  note: dtype of lm_head could not be checked"


def test_speed_counts_from_the_first_bucket_to_the_last_acknowledgement() -> None:
    assert make_report().gbps == 256e6 / 0.5 / 1e9


def test_an_empty_update_has_a_speed_of_zero_and_still_a_summary() -> None:
    report = UpdateReport(version=1, nbytes=0, num_tensors=0, num_buckets=0, seconds=0.0)
    assert report.gbps == 0.0
    assert report.summary() == "version 1: 0 B in 0 tensors, 0 buckets, 0.0 ms, 0.00 GB/s"


def test_the_dict_is_plain_json() -> None:
    data = json.loads(json.dumps(make_report().to_dict()))
    assert data["version"] == 7
    assert data["engines"]["rollout-1"]["state"] == "lost"
    assert data["engines"]["rollout-1"]["notes"] == ["restarts: 1"]
    assert data["buckets"][1]["done_at"] == 100.7
    assert data["dropped"] == ["rollout-1"]
    assert data["gbps"] > 0


def test_any_mapping_will_do() -> None:
    report = UpdateReport(
        version=1,
        nbytes=1,
        num_tensors=1,
        num_buckets=1,
        seconds=1.0,
        phases=MappingProxyType({"lock": 0.5}),
        engines=MappingProxyType({}),
    )
    assert json.loads(json.dumps(report.to_dict()))["phases"] == {"lock": 0.5}


def test_the_trace_has_every_phase_and_bucket_when_it_was() -> None:
    trace = json.loads(json.dumps(make_report().to_trace()))
    phases = [event for event in trace["traceEvents"] if event["tid"] == "phases"]
    buckets = [event for event in trace["traceEvents"] if event["tid"] == "buckets"]
    assert [event["name"] for event in phases] == ["lock", "pause", "receive", "settle", "receive", "resume"]
    assert [event["ts"] for event in phases] == [0.0, 10_000.0, 250_000.0, 550_000.0, 651_000.0, 752_000.0]
    assert [event["dur"] for event in phases] == [4_000.0, 200_000.0, 300_000.0, 100_000.0, 100_000.0, 1_000.0]
    assert [(event["ts"], event["dur"]) for event in buckets] == [(200_000.0, 200_000.0), (400_000.0, 300_000.0)]


def test_a_report_crosses_process_borders() -> None:
    report = make_report()
    assert pickle.loads(pickle.dumps(report)) == report


def test_sizes_and_times_read_well() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 5_100_000, 2.5e9, 3e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "5.1 MB",
        "2.5 GB",
        "3.0 TB",
    ]
    assert [format_seconds(s) for s in (0.0004, 0.024, 1.5, 90)] == ["0.4 ms", "24 ms", "1.50 s", "1.5 min"]
