"""Which requests an engine remembers."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

from async_wsync.engines.receiving.request_log import Outcome, RequestLog
from async_wsync.errors import EngineBusy


def test_pending_requests_are_kept_and_old_outcomes_forgotten() -> None:
    requests = RequestLog(threading.Condition())
    requests.open("pending")
    for i in range(1000):
        assert requests.open(str(i))
        requests.settle(str(i), Outcome(value=i))
    assert requests.outcome("pending") is None
    forgotten, last = requests.outcome("0"), requests.outcome("999")
    assert forgotten is not None
    assert forgotten.failure is not None
    assert "not known" in forgotten.failure.text
    assert last == Outcome(value=999)


def test_a_request_is_settled_as_its_future_is() -> None:
    requests = RequestLog(threading.Condition())
    future: Future[int] = Future()
    assert requests.run("one", lambda: future) is future
    assert requests.run("one", lambda: pytest.fail("it came twice")) is None
    assert requests.outcome("one") is None
    future.set_exception(EngineBusy("not now"))
    outcome = requests.outcome("one")
    assert outcome is not None
    assert outcome.failure is not None
    assert isinstance(outcome.failure.rebuild(engine="e0", phase="flush"), EngineBusy)
    assert requests.run("one", lambda: pytest.fail("it came twice")) is None
