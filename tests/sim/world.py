"""A small world for the lock: processes, a bad network, a server that dies, and a clock that only this file turns.

It drives the real `lock.state` and the real client rules of `lock.claim`. Everything random comes from one
seed. What can go wrong: messages lost, doubled, late and out of order; clients paused, killed, cut off, cancelled;
the server paused, killed, restarted, its wall clock set back; clocks that run 4 % fast or slow.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from async_wsync.lock.claim import Again, ClaimView, Held
from async_wsync.lock.state import Granted, LockState
from async_wsync.types import Requester
from tests.sim.checks import Checks

TTL = 1.0
SILENCE = 0.6
POLL_TIMEOUT = 0.45
RELEASE_TIMEOUT = 1.0
LATEST_FAULT = 4.0
HORIZON = 30.0


@dataclass(frozen=True)
class Rules:
    """What a variant may replace."""

    state: type[LockState] = LockState
    view: type[ClaimView] = ClaimView
    quarantine: bool = True
    withdraw: bool = True
    engine_checks_fence: bool = True


class World:
    """One seed's run. `run` returns the checks, with every violation found."""

    def __init__(self, seed: int, rules: Rules | None = None, *, trace: bool = False) -> None:
        self.seed = seed
        self.rules = rules or Rules()
        self.rng = random.Random(seed)
        self.now = 0.0
        self.trace_on = trace
        self.checks = Checks(self)
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.roughness = self.rng.choice((0.0, 0.02, 0.1))
        self.server = Server(self)
        self.engine = Engine(self)
        self.clients = [Client(self, n) for n in range(self.rng.randint(2, 4))]
        self._plan_faults()

    def at(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, fn, args))

    def log(self, text: str) -> None:
        if self.trace_on:
            print(f"{self.now:9.4f}  {text}")

    def run(self) -> Checks:
        for client in self.clients:
            self.at(self.rng.uniform(0, 0.02), client.begin)
        self.at(0.25, self._sample)
        while self._heap and self.now < HORIZON:
            self.now, _, fn, args = heapq.heappop(self._heap)
            fn(*args)
            if self.checks.violations:
                break
        self.checks.at_end()
        return self.checks

    def deliver(self, fn: Callable[..., None], *args: Any) -> float:
        """Send a message: lost, doubled, late or in a millisecond. Returns when its last copy arrives."""
        rng, rough = self.rng, self.roughness
        if not rough:
            delay = rng.uniform(0.0005, 0.003)
            self.at(delay, fn, *args)
            return self.now + delay
        last = self.now
        dice = rng.random()
        if dice < rough / 3:
            return last  # lost
        for _ in range(2 if dice < rough * 2 / 3 else 1):
            late = rng.random() < rough / 2
            delay = rng.uniform(0.02, 1.5) if late else rng.uniform(0.0005, 0.003)
            self.at(delay, fn, *args)
            last = max(last, self.now + delay)
        return last

    def _sample(self) -> None:
        self.checks.sample()
        if self.now < HORIZON and not all(c.finished for c in self.clients):
            self.at(0.25, self._sample)

    def _plan_faults(self) -> None:
        rng = self.rng
        kinds: tuple[Callable[[], None], ...] = (
            lambda: rng.choice(self.clients).pause(rng.uniform(0.1, 2.5 * TTL)),
            lambda: rng.choice(self.clients).kill(),
            lambda: rng.choice(self.clients).cut(rng.uniform(0.1, 2.5 * TTL)),
            lambda: rng.choice(self.clients).cancel(),
            lambda: rng.choice(self.clients).cancel(),
            self.server.kill,
            self.server.make_next_grant_late,
            lambda: self.server.pause(rng.uniform(0.1, 1.5 * TTL)),
        )
        for _ in range(rng.randint(0, 4)):
            self.at(rng.uniform(0.0, LATEST_FAULT), rng.choice(kinds))


class Server:
    """The lock actor. Down, it loses what is sent to it; paused, it gets everything afterwards."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.paused_until = 0.0
        self.wall_skew = 0.0
        self.next_grant_is_late = False
        self._boot(restarted=False)

    def _boot(self, *, restarted: bool) -> None:
        rng = self.world.rng
        self.booted = self.world.now
        self.rate = rng.uniform(0.96, 1.04)
        self.up = True
        quarantine = TTL if restarted and self.world.rules.quarantine else 0.0
        self.state = self.world.rules.state(ttl=TTL, quarantine_until=quarantine, waiter_silence=SILENCE)

    def clock(self) -> float:
        return (self.world.now - self.booted) * self.rate

    def handle(self, verb: str, client: Client, cut: bool, args: dict[str, Any], answer: Callable[..., None]) -> None:
        world = self.world
        if world.now < self.paused_until:
            world.at(self.paused_until - world.now, self.handle, verb, client, cut, args, answer)
            return
        if not self.up or cut or client.is_cut:
            return
        now = self.clock()
        if verb == "acquire":
            wall = int((1e6 + world.now + self.wall_skew) * 1000)
            reply: Any = self.state.acquire(now=now, wall_ms=wall, **args)
            world.checks.polled(args["claim"], reply, client)
            if isinstance(reply, Granted):
                world.log(f"server: {args['claim']} holds, fence {reply.fence}")
                if self.next_grant_is_late:
                    self._grant_late_and_cut(client, answer, reply)
                    return
        elif verb == "heartbeat":
            reply = self.state.heartbeat(now=now, **args)
        else:
            reply = self.state.release(now=now, **args)
            world.checks.released(args["claim"])
            world.log(f"server: release of {args['claim']}: {reply}")
        arrives = world.deliver(client.receive, answer, reply)
        client.in_flight(args["claim"], arrives)

    def _grant_late_and_cut(self, client: Client, answer: Callable[..., None], reply: Granted) -> None:
        """The grant is slow to arrive, and nothing gets through after it: the lease runs out unseen."""
        self.next_grant_is_late = False
        self.world.checks.faults_seen.add("late grant")
        delay = self.world.rng.uniform(0.2, 0.44)
        self.world.at(delay, client.receive, answer, reply)
        self.world.at(delay, client.cut, self.world.rng.uniform(TTL, 2 * TTL))

    def make_next_grant_late(self) -> None:
        self.next_grant_is_late = True

    def obituary(self, name: str) -> None:
        if self.up and self.world.now >= self.paused_until:
            self.world.log(f"server: {name} died")
            self.state.died(name, now=self.clock())
            self.world.checks.client_died(name)

    def kill(self) -> None:
        if not self.up:
            return
        self.world.log("server: killed")
        self.world.checks.faults_seen.add("server kill")
        self.up = False
        self.world.checks.server_died()
        self.world.at(self.world.rng.uniform(0.1, 1.0), self._restart)

    def _restart(self) -> None:
        self.paused_until = 0.0
        # Another node's clock: behind by less than the quarantine.
        self.wall_skew -= self.world.rng.choice((0.0, 0.0, 0.05 * TTL))
        self._boot(restarted=True)
        self.world.log("server: back")

    def pause(self, seconds: float) -> None:
        self.world.log(f"server: paused for {seconds:.2f}")
        self.world.checks.faults_seen.add("server pause")
        self.paused_until = self.world.now + seconds


class Engine:
    """Applies buckets that carry a fence no lower than any it has seen."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.seen = 0

    def bucket(self, fence: int, claim: str) -> None:
        if fence < self.seen and self.world.rules.engine_checks_fence:
            self.world.checks.num_refused += 1
            return
        self.seen = max(self.seen, fence)
        self.world.checks.applied(fence, claim)


@dataclass
class Attempt:
    """One claim and everything its client knows of it."""

    view: ClaimView
    phase: str = "waiting"  # waiting, held, over
    sent: int = 0  # polls sent: an answer to an older one is ignored, as its awaiter has gone
    buckets_left: int = 0
    release_by: float = 0.0
    released: bool = False
    given_up_at: float | None = None
    left_to_lease: bool = False
    last_arrival: float = 0.0


@dataclass
class Client:
    """A process that takes the lock a few times and sends buckets while it has it. Time is its own clock's."""

    world: World
    number: int
    rate: float = 1.0
    generation: int = 0
    alive: bool = True
    paused_until: float = 0.0
    cut_until: float = 0.0
    fence_seen: int = 0
    holds_left: int = 0
    attempt: Attempt | None = None
    attempts: dict[str, Attempt] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rate = self.world.rng.uniform(0.96, 1.04)
        self.holds_left = self.world.rng.randint(2, 4)

    @property
    def name(self) -> str:
        return f"c{self.number}.{self.generation}"

    @property
    def is_cut(self) -> bool:
        return self.world.now < self.cut_until

    @property
    def finished(self) -> bool:
        return self.holds_left <= 0 and self.attempt is None

    def clock(self) -> float:
        return self.world.now * self.rate

    def true_time(self, own: float) -> float:
        return own / self.rate

    def run(self, generation: int, fn: Callable[..., None], *args: Any) -> None:
        """Every step of the process comes through here: none while it is paused, none after its death."""
        if generation != self.generation or not self.alive:
            return
        if self.world.now < self.paused_until:
            self.world.at(self.paused_until - self.world.now, self.run, generation, fn, *args)
            return
        fn(*args)

    def later(self, delay: float, fn: Callable[..., None], *args: Any) -> None:
        self.world.at(delay / self.rate, self.run, self.generation, fn, *args)

    def ask(self, verb: str, answer: Callable[..., None], claim: str, **args: Any) -> None:
        generation = self.generation

        def back(reply: Any) -> None:
            self.run(generation, answer, reply)

        arrives = self.world.deliver(self.world.server.handle, verb, self, self.is_cut, {"claim": claim, **args}, back)
        self.in_flight(claim, arrives)

    def receive(self, answer: Callable[..., None], reply: Any) -> None:
        if not self.is_cut:
            answer(reply)

    def in_flight(self, claim: str, arrives: float) -> None:
        attempt = self.attempts.get(claim)
        if attempt is not None:
            attempt.last_arrival = max(attempt.last_arrival, arrives)

    # ---------------------------------------------------------------------------- the client's rules

    def begin(self) -> None:
        if self.holds_left <= 0:
            return
        self.world.checks.num_claims += 1
        claim = f"{self.name}#{self.world.checks.num_claims}"
        self.attempt = self.attempts[claim] = Attempt(self.world.rules.view(claim))
        self.poll(self.attempt)

    def poll(self, attempt: Attempt) -> None:
        if attempt.phase != "waiting":
            return
        attempt.sent += 1
        number, sent = attempt.sent, self.clock()
        self.ask(
            "acquire",
            lambda reply: self.on_poll(attempt, number, sent, reply),
            attempt.view.claim,
            who=Requester(client=self.name),
            fence_seen=self.fence_seen,
        )
        self.later(POLL_TIMEOUT, self.on_poll_timeout, attempt, number)

    def on_poll_timeout(self, attempt: Attempt, number: int) -> None:
        if attempt.phase == "waiting" and attempt.sent == number:
            attempt.sent += 1
            self.later(attempt.view.on_trouble(self.world.rng.random(), cap=0.2), self.poll, attempt)

    def on_poll(self, attempt: Attempt, number: int, sent: float, reply: Any) -> None:
        if attempt.phase != "waiting" or attempt.sent != number:
            return
        attempt.sent += 1
        step = attempt.view.on_poll(reply, sent=sent, now=self.clock(), draw=self.world.rng.random())
        if isinstance(step, Held):
            self.hold(attempt)
        elif isinstance(step, Again):
            attempt.phase = "over"
            self.begin()
        else:
            self.later(step.delay, self.poll, attempt)

    def hold(self, attempt: Attempt) -> None:
        attempt.phase = "held"
        self.fence_seen = max(self.fence_seen, attempt.view.fence)
        self.world.log(f"{self.name}: holds {attempt.view.claim}")
        self.believe(attempt)
        attempt.buckets_left = self.world.rng.choice((1, 2, 3, 4, 6, 15))
        self.later(attempt.view.beat_delay(self.clock()), self.beat, attempt)
        self.bucket(attempt)

    def believe(self, attempt: Attempt) -> None:
        self.world.checks.believes(attempt.view.claim, self.true_time(attempt.view.lease_end))

    def bucket(self, attempt: Attempt) -> None:
        if attempt.phase != "held":
            return
        # As a body that does not check its lease before it acts: the fence has to be enough.
        self.world.deliver(self.world.engine.bucket, attempt.view.fence, attempt.view.claim)
        attempt.buckets_left -= 1
        self.later(
            self.world.rng.uniform(0.005, 0.2), self.bucket if attempt.buckets_left > 0 else self.finish, attempt
        )

    def beat(self, attempt: Attempt) -> None:
        if attempt.phase != "held":
            return
        sent = self.clock()
        if attempt.view.lapsed(sent):
            self.finish(attempt)
            return
        attempt.sent += 1
        number = attempt.sent
        self.ask(
            "heartbeat",
            lambda reply: self.on_beat(attempt, number, sent, reply),
            attempt.view.claim,
            fence=attempt.view.fence,
        )
        self.later(min(TTL / 3, attempt.view.lease_end - sent), self.on_beat_timeout, attempt, number)

    def on_beat_timeout(self, attempt: Attempt, number: int) -> None:
        if attempt.phase == "held" and attempt.sent == number:
            attempt.sent += 1
            self.later(attempt.view.on_trouble(self.world.rng.random(), cap=TTL / 10), self.beat, attempt)

    def on_beat(self, attempt: Attempt, number: int, sent: float, reply: Any) -> None:
        if attempt.phase != "held" or attempt.sent != number:
            return
        attempt.sent += 1
        if attempt.view.on_beat(reply, sent=sent, now=self.clock()) is not None:
            self.world.checks.num_lost += 1
            self.finish(attempt)
            return
        self.believe(attempt)
        self.later(attempt.view.beat_delay(self.clock()), self.beat, attempt)

    def finish(self, attempt: Attempt) -> None:
        """The end of the body, or of a wait that was cancelled: give the claim back, and see that it arrives."""
        if attempt.phase == "over":
            return
        waiting = attempt.phase == "waiting"
        attempt.phase = "over"
        attempt.given_up_at = self.world.now
        attempt.release_by = self.clock() + RELEASE_TIMEOUT
        self.world.checks.stops_believing(attempt.view.claim)
        if waiting and not self.world.rules.withdraw:
            attempt.released = True
        else:
            self.release(attempt)
        if self.attempt is attempt:
            self.attempt = None
            self.holds_left -= 1
            self.later(self.world.rng.uniform(0.0, 0.05), self.begin)

    def release(self, attempt: Attempt) -> None:
        if attempt.released:
            return
        if self.clock() > attempt.release_by:
            attempt.left_to_lease = True
            return

        def confirmed(_: Any) -> None:
            attempt.released = True

        self.ask("release", confirmed, attempt.view.claim)
        self.later(0.1, self.release, attempt)

    # ---------------------------------------------------------------------------- faults

    def cancel(self) -> None:
        if self.alive and self.attempt is not None:
            self.world.checks.faults_seen.add(f"cancel while {self.attempt.phase}")
            self.world.log(f"{self.name}: cancelled while {self.attempt.phase}")
            self.run(self.generation, self.finish, self.attempt)

    def pause(self, seconds: float) -> None:
        self.world.log(f"{self.name}: paused for {seconds:.2f}")
        self.world.checks.faults_seen.add("client pause")
        self.paused_until = max(self.paused_until, self.world.now + seconds)

    def cut(self, seconds: float) -> None:
        self.world.log(f"{self.name}: cut off for {seconds:.2f}")
        self.world.checks.faults_seen.add("partition")
        self.cut_until = max(self.cut_until, self.world.now + seconds)

    def kill(self) -> None:
        if not self.alive:
            return
        self.world.log(f"{self.name}: killed")
        self.world.checks.faults_seen.add("client kill")
        if self.attempt is not None:
            self.world.checks.stops_believing(self.attempt.view.claim)
        self.world.at(self.world.rng.uniform(0.005, 2.0), self.world.server.obituary, self.name)
        self.alive = False
        self.attempt = None
        self.world.at(self.world.rng.uniform(0.05, 0.5), self._start_anew)

    def _start_anew(self) -> None:
        self.generation += 1
        self.alive = True
        self.paused_until = 0.0
        self.fence_seen = 0
        self.begin()
