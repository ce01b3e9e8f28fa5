"""`UpdateRound`: several sources, one update.

Pipeline stages each own a part of the model. In a round their updates become one: the engines are paused once, every
source sends its part under the lock, and the version is published only if all parts arrived. If one source fails or
dies, all learn it, the engines stay torn and paused, and the next round heals them.

    round_ = UpdateRound.create(name="pp", num_sources=2)                       # in the driver
    await broadcaster.update_weights(source, version=7, round=round_)           # in each source
"""

from __future__ import annotations

from typing import Any

from async_wsync import arguments
from async_wsync.rounds.member import ANSWER_LIMIT, RoundMember
from async_wsync.rounds.server import RoundServer
from async_wsync.runtime.actor_client import ActorClient

__all__ = ["UpdateRound"]


class UpdateRound:
    """A handle on a named round of ``num_sources`` sources, used for one update after another. Picklable.

    ``silence``: seconds without a word from a source after which the round fails for all; a source whose process
    ends is noticed within 2 s whatever this says.
    """

    def __init__(
        self, *, name: str, namespace: str | None = None, handle: Any = None, num_sources: int | None = None
    ) -> None:
        arguments.text("the name of a round", name)
        arguments.text("namespace", namespace, none=True)
        if num_sources is not None:
            arguments.at_least("num_sources", num_sources, 1)
        self.name = name
        self.namespace = namespace
        self._num_sources = num_sources
        self._link = ActorClient(name=name, namespace=namespace, handle=handle, liveness_actor=False, what="round")

    @classmethod
    def create(
        cls,
        *,
        name: str,
        num_sources: int,
        namespace: str | None = None,
        silence: float = 30.0,
        lifetime: str | None = None,
    ) -> UpdateRound:
        """The round called ``name``, made now if there is none. It lives as long as the process that made it, or,
        with ``lifetime="detached"``, until it is killed."""
        arguments.text("the name of a round", name)
        arguments.at_least("num_sources", num_sources, 1)
        arguments.seconds("silence", silence)
        arguments.lifetime(lifetime)
        import ray

        namespace = namespace or ray.get_runtime_context().namespace
        actor = ray.remote(RoundServer).options(
            name=name,
            namespace=namespace,
            get_if_exists=True,
            lifetime=lifetime,
            num_cpus=0,
            max_concurrency=1,
            enable_task_events=False,
        )
        round_ = cls(name=name, namespace=namespace, num_sources=num_sources)
        round_._link.get_or_make(lambda: actor.remote(num_sources=num_sources, silence=silence))
        return round_

    @classmethod
    def connect(cls, *, name: str, namespace: str | None = None) -> UpdateRound:
        """The round called ``name``, which must exist by the time of its first use."""
        import ray

        return cls(name=name, namespace=namespace or ray.get_runtime_context().namespace)

    def __repr__(self) -> str:
        return f"<UpdateRound {self.name!r} in {self.namespace!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.name, self.namespace, self._link.handle, self._num_sources)

    async def status(self) -> dict[str, Any]:
        """Plain data: ``round``, ``version``, ``phase``, ``leader``, ``sources`` (seconds since heard), ``failure``."""
        await self._link.ready(ANSWER_LIMIT)
        answer: dict[str, Any] = await self._link.ask("status", timeout=ANSWER_LIMIT)
        return answer

    def member(self, source: str, *, version: int) -> RoundMember:
        return RoundMember(self.name, self._link, source, version=version, num_sources=self._num_sources)


def _rebuild(name: str, namespace: str | None, handle: Any, num_sources: int | None) -> UpdateRound:
    return UpdateRound(name=name, namespace=namespace, handle=handle, num_sources=num_sources)
