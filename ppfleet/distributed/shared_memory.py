"""Sums over the ranks of one host, through memory that all of them have mapped. Pure: NumPy, no Paddle.

    rank 0's area | rank 1's area | … | the sum

A rank fills its area and meets the others; each adds up a part of everybody's, always in the order of ranks; they meet
again, and the sum is there. So every rank reads the same bits, and the same in every run.

The memory has no name: the others open rank 0's `memfd` through /proc. However the job ends, nothing stays behind, and
it is allocated before it is used: too little memory is an error at the start, not a SIGBUS later.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import secrets
import time
from typing import Any, Callable

import numpy as np

from ppfleet.errors import CommError
from ppfleet.watchdog.process import this_host

_NONCE = 16  # bytes by which the memory is known
_LINE = 64  # bytes that two cores cannot write to at the same time without waiting for each other
_BLOCK = 1 << 15  # elements that are added up at a time: they stay in a core's own cache
_SPINS = 200  # looks, of about a microsecond, before a rank that waits lets others have its core


class Shared:
    """What this rank brings (`mine`) and gets (`total`). `total` stays as it is until all have come to the next sum;
    it is the same memory on all ranks: nobody may write to it."""

    def __init__(self, memory: mmap.mmap, rank: int, size: int, length: int, dtype: str) -> None:
        self._rank, self._size = rank, size
        kind, header = np.dtype(dtype), _header(size)
        areas = np.frombuffer(memory, kind, offset=header).reshape(size + 1, -1)
        self._areas = [area[:length] for area in areas[:size]]
        self.mine, self.total = self._areas[rank], areas[size, :length]
        per_line = _LINE // kind.itemsize
        edges = [length * part // size // per_line * per_line for part in range(size)]
        self._part = edges[rank], [*edges[1:], length][rank]
        self._arrived = np.frombuffer(memory, np.int64, size * _LINE // 8, offset=_LINE)[:: _LINE // 8]
        self._turn = 0
        self._broken = False
        self._spins = _SPINS if size <= len(os.sched_getaffinity(0)) else 0

    def all_reduce(self, means: int, check: Callable[[], None]) -> None:
        """`total` becomes the sum of everybody's `mine`; its first `means` elements are divided by the number of ranks.

        `check` is called again and again while this rank waits, and raises if waiting is pointless.
        """
        if self._broken:
            raise CommError("an earlier sum through shared memory was interrupted: the ranks are out of step")
        self._broken = True
        self._meet(check)
        self._add(means)
        self._meet(check)
        self._broken = False

    def late(self) -> list[int]:
        """The ranks that this one waits for."""
        return [rank for rank, turn in enumerate(self._arrived.tolist()) if turn < self._turn]

    def _add(self, means: int) -> None:
        first, second, *others = self._areas
        share = self.total.dtype.type(1.0 / self._size)
        for start in range(*self._part, _BLOCK):
            block = slice(start, min(start + _BLOCK, self._part[1]))
            out = self.total[block]
            np.add(first[block], second[block], out=out)
            for other in others:
                np.add(out, other[block], out=out)
            if start < means:
                out = out[: means - start]
                np.multiply(out, share, out=out)

    def _meet(self, check: Callable[[], None]) -> None:
        self._turn += 1
        self._arrived[self._rank] = self._turn  # seen by the others after all that was written before: this is x86-64
        for _ in range(self._spins):
            if self._arrived.min() >= self._turn:
                return
        began = time.monotonic()
        while self._arrived.min() < self._turn:
            check()
            # In pieces, as a signal must find Python awake; the longer it takes, the less a few per cent matter.
            time.sleep(min(2e-3, 2e-5 + (time.monotonic() - began) / 50))


def share(
    rank: int, size: int, length: int, dtype: str, gather: Callable[[Any, str], list[Any]]
) -> tuple[Shared | None, str]:
    """All ranks together: memory for sums of `length` elements; or nothing, and why not: the same on all ranks.

    `gather` gives what each rank brought.
    """
    room = _header(size) + (size + 1) * _rounded(length * np.dtype(dtype).itemsize)
    memory, offer, why = None, None, _unfit()
    with contextlib.ExitStack() as until_all_have_it:
        if rank == 0 and not why:
            try:
                memory, offer = _make(room, until_all_have_it)
            except OSError as failure:
                why = f"there is no room for {room >> 20} MB of shared memory ({failure.strerror})"
        told = gather([this_host(), why, offer], "check for shared memory")
        if len({host for host, *_ in told}) > 1:
            why = "the ranks are on several hosts, or in containers that do not see each other"
        why = why or next((why for _, why, _ in told if why), "")
        if rank > 0 and not why:
            try:
                memory = _open(told[0][2], room)
            except OSError as failure:
                why = f"rank {rank} cannot open rank 0's memory ({failure.strerror})"
        why = next((why for why in gather(why, "check for shared memory") if why), "")
    return (None, why) if why or memory is None else (Shared(memory, rank, size, length, dtype), "")


def _unfit() -> str:
    """Why shared memory is of no use on this host."""
    if platform.machine() != "x86_64":
        return f"{platform.machine()} may show one rank's writes to another in a different order"
    return "" if hasattr(os, "memfd_create") else "this Python has no memfd_create"


def _make(room: int, until: contextlib.ExitStack) -> tuple[mmap.mmap, list[Any]]:
    """Rank 0: memory, and where others find it until then."""
    descriptor = os.memfd_create("ppfleet")
    until.callback(os.close, descriptor)
    os.posix_fallocate(descriptor, 0, room)
    memory = mmap.mmap(descriptor, room)
    memory[:_NONCE] = nonce = secrets.token_bytes(_NONCE)
    return memory, [os.getpid(), descriptor, nonce.hex()]


def _open(offer: list[Any], room: int) -> mmap.mmap:
    pid, number, nonce = offer
    descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, room) if os.fstat(descriptor).st_size == room else None
    finally:
        os.close(descriptor)
    if memory is None or memory[:_NONCE].hex() != nonce:
        raise OSError(errno.ESTALE, "it is something else")
    return memory


def _header(size: int) -> int:
    """Bytes for the nonce, and for where each rank is, on a line of its own."""
    return (1 + size) * _LINE


def _rounded(count: int) -> int:
    return (count + _LINE - 1) // _LINE * _LINE
