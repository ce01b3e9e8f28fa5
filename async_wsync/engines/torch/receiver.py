"""`WeightReceiver`: what makes any Ray actor with a torch model take weight updates."""

from __future__ import annotations

from collections.abc import Callable

from async_wsync import arguments
from async_wsync.engines.receiving.serving_gate import Serving
from async_wsync.engines.torch.messages import Reply, Request
from async_wsync.engines.torch.request_handler import RequestHandler
from async_wsync.engines.torch.targets import Model
from async_wsync.types import EngineState, PauseMode

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """Receives weights into ``model`` while its owner goes on answering.

    Inherit from it, call `init_weight_receiver` in ``__init__``, and wrap what generates in `serving`::

        @ray.remote
        class Engine(WeightReceiver):
            def __init__(self):
                self.model = build()
                self.init_weight_receiver(self.model)

            def generate(self, prompt):
                with self.serving() as version:
                    return self.model(prompt), version

    or hold one and forward ``weight_sync(request)`` to it. The actor may be single-threaded, threaded or async, with
    any ``max_concurrency``: after a source's first hello its requests come over a connection of their own, beside Ray's
    queue of the actor's calls, and `weight_sync` answers them in threads of that connection. None of them blocks.

    ``model`` is a module, a mapping of tensors, or a function that returns one; its tensors are written in place, and
    only between `serving` blocks. Until its first update an engine serves the weights it was built with, and its
    version is None.

    This class has no coroutine methods on purpose: one would turn every actor that inherits it into an async actor.
    """

    _weight_request_handler: RequestHandler | None = None

    def __init__(
        self,
        model: Model,
        *,
        name: str = "",
        on_pause: Callable[[PauseMode], None] | None = None,
        on_resume: Callable[[], None] | None = None,
        on_flush: Callable[[], bool | None] | None = None,
        on_update_end: Callable[[], None] | None = None,
    ) -> None:
        given = {"on_pause": on_pause, "on_resume": on_resume, "on_flush": on_flush, "on_update_end": on_update_end}
        for hook, fn in given.items():
            arguments.function(hook, fn)
            if fn is not None:
                setattr(self, hook, fn)
        self.init_weight_receiver(model, name=name)

    def init_weight_receiver(self, model: Model, *, name: str = "") -> None:
        """Get ready; for classes that inherit. ``name`` is for messages only."""
        self._weight_request_handler = RequestHandler(
            model, self, name=name or type(self).__name__, entry=self.weight_sync
        )

    @property
    def _request_handler(self) -> RequestHandler:
        if self._weight_request_handler is None:
            raise RuntimeError("call init_weight_receiver(model) in __init__ before the first request")
        return self._weight_request_handler

    def weight_sync(self, request: Request) -> Reply:
        """The one entry point for a source's requests. Returns at once, from any thread."""
        return self._request_handler.handle(request)

    def serving(self, wait: float = 0.0) -> Serving:
        """A context manager for whatever reads the weights: ``with receiver.serving() as version:``.

        Put it around a whole generation, or, to be paused in the middle of one, around each forward pass.
        Raises `EngineNotServing` while the engine is paused, updating or torn, after waiting up to ``wait`` seconds.
        On an event loop use ``async with``. Not reentrant. Waiting holds up other requests, but no update, except in an
        actor that sources reach through Ray's queue only (see docs/engines.md).
        """
        arguments.seconds("wait", wait, zero=True)
        return Serving(self._request_handler.actions.gate, lambda: self.weight_version, wait)

    @property
    def abort_requested(self) -> bool:
        """Whether running generations are asked to end now, with what they have."""
        return self._request_handler.actions.gate.abort_requested

    @property
    def weight_version(self) -> int | None:
        """The version published last."""
        return self._request_handler.actions.weights.version

    @property
    def weight_state(self) -> EngineState:
        return self._request_handler.actions.weights.state

    # Hooks, run in a daemon thread; override them or pass functions. What they raise fails the source's call.

    def on_pause(self, mode: PauseMode) -> None:
        """The gate is shut to newcomers; those inside are waited for afterwards."""

    def on_resume(self) -> None:
        """The gate is about to open."""

    def on_flush(self) -> bool | None:
        """Drop caches computed from the old weights. Return False to refuse for now; it is asked again."""

    def on_update_end(self) -> None:
        """All tensors have arrived: rebuild what is derived from them (quantized copies, say)."""
