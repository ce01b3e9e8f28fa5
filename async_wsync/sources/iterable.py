"""A source over any iterable of named tensors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any, TypeAlias

import torch

from async_wsync import arguments
from async_wsync.errors import SourceError
from async_wsync.sources.tensors import check_tensor, describe, gathered, let_go
from async_wsync.types import Manifest

__all__ = ["IterableSource"]

Named = tuple[str, torch.Tensor]
Items: TypeAlias = Iterable[Named] | AsyncIterable[Named]

_END: Any = object()
_STANDING: tuple[type, ...] = (list, tuple, type({}.items()))  # tensors that all exist already


class IterableSource:
    """Named tensors from ``items``: a sync or async iterable of ``(name, tensor)``, or a callable that returns one.

    It is walked in one dedicated thread, an async one on a private event loop there, so it must not wait for
    things of another loop. Each update takes one walk over the tensors, and a retried one takes another.

    Without ``manifest`` there must be a walk before it, to learn names, types and shapes: a callable, or an
    iterable that can be walked again, is walked twice; of a one-shot iterator (a generator, say) all tensors are
    copied and kept. With ``manifest`` a one-shot iterator is streamed, and good for one walk.

    ``stable_tensors``: the memory of a tensor does not change before the update is over, so that none need be copied.
    Taken for granted in a list, a tuple and the items of a dict. Any other iterable may yield one tensor after another
    in the same memory. ``collective``: making the tensors takes other ranks, so a walk is walked to its end also when
    its update fails. ``device``: where the tensors are; without it the first tensor tells (see `find_device`).
    """

    casts = False

    def __init__(
        self,
        items: Items | Callable[[], Items],
        *,
        manifest: Manifest | None = None,
        collective: bool = False,
        stable_tensors: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if not (isinstance(items, Iterable | AsyncIterable) or callable(items)):
            raise ValueError(f"items must be an iterable or a callable that returns one, got {type(items).__name__}")
        arguments.kind("manifest", manifest, Manifest, none=True)
        arguments.flag("collective", collective)
        arguments.flag("stable_tensors", stable_tensors)
        self._items: Items | Callable[[], Items] = items
        self._manifest = manifest
        self._used = False
        self._begun: Iterator[Named] | None = None
        self.collective = collective
        self.stable_tensors = stable_tensors or type(items) in _STANDING
        self.device = None if device is None else _device(device)

    def __repr__(self) -> str:
        return f"<IterableSource over a {type(self._items).__name__}>"

    def manifest(self) -> Manifest:
        if self._manifest is not None:
            return self._manifest
        if self._is_one_shot():
            self._collect()
        return describe(self._walk(), dtype=None, tied_once=False)

    def _collect(self) -> None:
        kept: list[Named] = []
        for name, tensor in self._walk():
            check_tensor(name, tensor)
            kept.append((name, tensor if self.stable_tensors else tensor.detach().clone()))
            del tensor  # or it would stay alive while the next one is made
        self._items = kept
        self.stable_tensors = True

    def tensors(self) -> Iterator[Named]:
        begun, self._begun = self._begun, None
        return self._gathered() if begun is None else begun

    def _gathered(self) -> Iterator[Named]:
        for name, tensor in self._walk():
            check_tensor(name, tensor)
            yield name, gathered(tensor)
            del tensor  # or it would stay alive while the next one is made

    def find_device(self) -> torch.device | None:
        """Where the tensors are. If no walk has told yet, a walk is begun to look at the first tensor.

        What can't be walked again (a one-shot iterator), or only with other ranks (``collective``), is not broken off:
        the next `tensors` goes on with that walk, first tensor included. None if there is no tensor.
        """
        if self.device is None:
            walk = self.tensors()
            first = next(walk, None)
            if self.collective or self._is_one_shot():
                self._begun = iter(()) if first is None else _resumed(first, walk)
            else:
                let_go(walk)
        return self.device

    def _is_one_shot(self) -> bool:
        items = self._items
        if isinstance(items, AsyncIterable):
            return isinstance(items, AsyncIterator)
        return isinstance(items, Iterator)

    def _walk(self) -> Iterator[Named]:
        if self._is_one_shot():
            if self._used:
                raise SourceError("a one-shot iterator cannot be walked again: pass a callable that makes a new one")
            self._used = True
        items: Any = self._items
        if not isinstance(items, Iterable | AsyncIterable):
            items = items()
            if not isinstance(items, Iterable | AsyncIterable):
                raise ValueError(f"the callable returned a {type(items).__name__}, which is not iterable")
        walk = _walk_async(items) if isinstance(items, AsyncIterable) else _walk_sync(items)
        try:
            for item in walk:
                name, tensor = _pair(item)
                if self.device is None and isinstance(tensor, torch.Tensor):
                    self.device = tensor.device
                yield name, tensor
                del item, tensor
        finally:
            walk.close()


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be a torch.device or its name, got {device!r}") from error


def _resumed(first: Named, rest: Iterator[Named]) -> Iterator[Named]:
    """A walk of which the first item is in hand already."""
    try:
        yield first
        del first  # or it would stay alive while the next one is made
        yield from rest
    finally:
        let_go(rest)


def _pair(item: Any) -> Named:
    if not (isinstance(item, tuple | list) and len(item) == 2):
        raise ValueError(f"items must be (name, tensor) pairs, got a {type(item).__name__}")
    return item[0], item[1]


def _walk_sync(items: Iterable[Any]) -> Generator[Any, None, None]:
    iterator = iter(items)
    try:
        yield from iterator
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


def _walk_async(items: AsyncIterable[Any]) -> Generator[Any, None, None]:
    loop = asyncio.new_event_loop()
    iterator = aiter(items)
    try:
        while (item := loop.run_until_complete(_next(iterator))) is not _END:
            yield item
            del item
    finally:
        try:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                loop.run_until_complete(close())
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            loop.close()


async def _next(iterator: AsyncIterator[Any]) -> Any:
    return await anext(iterator, _END)
