"""An engine answers a request that it has seen before with what became of that one: no two may share an id."""

from __future__ import annotations

import multiprocessing

from async_wsync.engines.request_ids import new_request_id


def test_no_two_requests_share_an_id() -> None:
    assert len({new_request_id() for _ in range(1000)}) == 1000


def test_a_forked_process_makes_ids_of_its_own() -> None:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        theirs = pool.starmap(new_request_id, [()] * 100)
    ours = [new_request_id() for _ in range(100)]
    assert len({*theirs, *ours}) == 200
