"""The Ray actor of an `UpdateRound`."""

from __future__ import annotations

import time
import uuid
from typing import Any

from async_wsync.rounds.state import Phase, RoundState, View
from async_wsync.runtime.liveness import ClientIdentity, LivenessWatch

__all__ = ["RoundServer"]


class RoundServer:
    """The Ray actor of an `UpdateRound`: `rounds.state` with a clock and liveness. Its methods never wait."""

    def __init__(self, *, num_sources: int, silence: float) -> None:
        prefix = f"round-{uuid.uuid4().hex[:8]}"
        self._state = RoundState(num_sources=num_sources, silence=silence, prefix=prefix)
        self._liveness = LivenessWatch()
        self._manifests: dict[str, dict[str, bytes]] = {}

    def watch(self, identity: ClientIdentity, refs: list[Any], liveness_actor: Any = None) -> None:
        self._liveness.watch(identity, refs[0] if refs else None, liveness_actor)

    def join(
        self,
        source: str,
        member: str,
        client: str,
        version: int,
        engines: tuple[str, ...],
        num_sources: int | None,
        manifest: bytes,
    ) -> View:
        view = self._state.join(
            source,
            client,
            member=member,
            version=version,
            engines=engines,
            num_sources=num_sources,
            now=self._now(),
        )
        self._liveness.heard(client)
        if view.phase is not Phase.FAILED:
            self._manifests.setdefault(view.round_id, {})[source] = manifest
        while len(self._manifests) > 2:
            del self._manifests[next(iter(self._manifests))]
        return view

    def manifests(self, round_id: str) -> dict[str, bytes]:
        """Source to its packed part."""
        return self._manifests.get(round_id, {})

    def leave(self, source: str, member: str, version: int, why: str) -> View | None:
        """For a member that has not joined, or does not know whether it has: None if it has not, and now will not."""
        self._now()
        view = self._state.leave(source, member, why)
        if view is None:
            self._state.absent(source, version=version, why=why)
        return view

    def tell(self, verb: str, round_id: str, source: str, member: str, client: str, *args: str) -> View:
        """``verb``: view, opened, sent, closed or fail."""
        self._liveness.heard(client)
        self._state.spoke(round_id, source, member)
        step = {
            "view": self._state.view,
            "opened": self._state.opened,
            "sent": self._state.sent,
            "closed": self._state.closed,
            "fail": self._state.fail,
        }[verb]
        view: View = step(round_id, source, *args, now=self._now())  # type: ignore[operator]
        return view

    def status(self) -> dict[str, object]:
        return self._state.status(now=self._now())

    def _now(self) -> float:
        for client, why in self._liveness.drain():
            self._state.died(client, why, now=time.monotonic())
        return time.monotonic()
