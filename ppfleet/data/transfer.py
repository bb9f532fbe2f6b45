"""Batches on the device. An accelerator gets each one while it still computes the step before."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Callable, NamedTuple, TypeVar

import numpy as np
import paddle

from ppfleet.distributed import devices

T = TypeVar("T")
Array = np.ndarray[Any, Any]
_POLL = 0.0002  # seconds


def on_device(batches: Iterable[tuple[Any, T]]) -> Iterator[tuple[Any, T]]:
    """The batches, whose tensors are in the host's memory, on Paddle's current device; each with its companion."""
    device = devices.current()
    return _Copies(device).run(batches) if device.is_accelerator else iter(batches)


class _Coming(NamedTuple):
    """A batch on its way."""

    data: Any  # on the device
    companion: Any
    event: Any  # … from then on; None: already


class _Copies:
    """Copies one batch ahead, in a stream of its own.

    Each copy waits for all work that was enqueued before: Paddle may have given it memory that this work still uses.
    The step that begins then is not waited for, and computes meanwhile.
    """

    def __init__(self, device: devices.Device) -> None:
        self._pins = device.pins_memory
        self._stream = _stream(paddle.get_device()) if device.has_streams else None
        self._place = paddle.framework._current_expected_place()

    def run(self, batches: Iterable[tuple[Any, T]]) -> Iterator[tuple[Any, T]]:
        coming: _Coming | None = None
        failure: Exception | None = None
        batches = iter(batches)
        while failure is None:
            following = None
            try:
                following = self._begin(*next(batches))
            except StopIteration:
                break
            except Exception as raised:  # noqa: BLE001 - of the next batch: the loop still gets this one
                failure = raised
            if coming is not None:
                yield self._arrived(coming)
            coming = following
        if failure is not None:
            raise failure
        if coming is not None:
            yield self._arrived(coming)

    def _begin(self, batch: Any, companion: Any) -> _Coming:
        kept: list[Any] = []

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, paddle.Tensor) or not leaf.place.is_cpu_place():
                return leaf
            kept.append(leaf.pin_memory() if self._pins else leaf)
            return kept[-1]._copy_to(self._place, self._stream is None)

        if self._stream is None:
            return _Coming(map_leaves(copied, batch), companion, None)
        self._stream.await_computation()
        with paddle.device.stream_guard(self._stream.stream):
            moved = map_leaves(copied, batch)
        return _Coming(moved, companion, self._stream.arrival(kept))

    def _arrived(self, coming: _Coming) -> tuple[Any, Any]:
        if coming.event is not None:
            paddle.device.current_stream().wait_event(coming.event)
        return coming.data, coming.companion


class _Stream:
    """A stream for copies, and the events that order it and the stream of the computation."""

    def __init__(self, device: str) -> None:
        self.stream = devices.kept(paddle.device.Stream(device))
        # On Paddle's current device, which is this one: 3.3 fails if a plugin's is named.
        self._enqueued = devices.kept(paddle.device.Event())
        self._sources: deque[tuple[Any, list[Any]]] = deque()  # an event, and what must stay in memory until then

    def await_computation(self) -> None:
        """What is copied from now on waits for the work that was enqueued before."""
        self._enqueued.record(paddle.device.current_stream())
        self.stream.wait_event(self._enqueued)

    def arrival(self, sources: list[Any]) -> Any:
        """An event that comes when the copies that were enqueued here are done; their `sources` are kept until then."""
        if len(self._sources) < 3:  # the batch of the loop, the next, and one that has long been copied
            event = devices.kept(paddle.device.Event())
        else:
            event, _ = self._sources[0]
            while not event.query():  # only where Python is far ahead of the device
                time.sleep(_POLL)
            self._sources.popleft()
        event.record(self.stream)
        self._sources.append((event, sources))
        return event


_stream = functools.lru_cache(None)(_Stream)  # one for a device


def map_leaves(change: Callable[[Any], Any], data: Any) -> Any:
    """`data` with every array, tensor and other leaf changed; lists of strings are leaves."""
    if isinstance(data, dict):
        return {name: map_leaves(change, value) for name, value in data.items()}
    if isinstance(data, (list, tuple)) and not all(isinstance(item, (str, bytes)) for item in data):
        return [map_leaves(change, item) for item in data]
    return change(data)


def over(array: Array) -> Any:
    """A tensor on the host over this memory, which it keeps alive."""
    # What paddle.to_tensor calls, but with zero_copy. DLPack does the same on Paddle 3, and copies on 2.6.
    tensor = paddle.base.core.eager.Tensor
    return tensor(value=array, place=paddle.CPUPlace(), persistable=False, zero_copy=True, stop_gradient=True)


def copy_of(array: Array) -> Any:
    """A tensor on the host with memory of its own."""
    return paddle.to_tensor(array, place=paddle.CPUPlace())
