"""The flight record: what a rank did last, in a small ring on disk that outlives the process. Pure: no Paddle.

    <run>/flight/<start>-rank3.ring        one for each rank and start; <log dir>/rank3.ring is a link to the newest

A ring is one file, mapped into memory: writing an entry is a copy of some bytes, and what was written is there after
SIGKILL. It holds who the rank is (`facts`), a pulse that the watchdog renews every second, where its time went since it
asked for its first batch (`spent`), the event that ended the rank, and the newest entries: each an operation with its
number, shape, source line, and when it was entered and left.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ppfleet.watchdog.events import Event, Kind, Operation

MAGIC = b"PPFLEET1"
SUFFIX = ".ring"
KEPT = 8  # rings of one rank that stay in a directory

KINDS = tuple(Kind)  # stored as their place in here

_FACTS, _PULSE, _EVENT, _SLOTS = 0, 8192, 12288, 28672  # where each part begins
_LENGTH = struct.Struct("<I")
_BEAT = struct.Struct("<ddQQQ")  # time, CPU seconds, memory in use, memory available, OOM kills
_SPENT = _PULSE + 64
_SUMS = struct.Struct("<Q6d")  # the fields of Spent
_SLOT = struct.Struct("<QddIIBB48s64s88s")  # number, entered, left, step, operation, kind, waits; what, where, detail
_LEFT = struct.Struct("<d")
_LEFT_AT = 16
_LARGEST = 1 << 26  # bytes that a ring may have
_PACKAGE, _PYTHON = (str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(os.__file__).parent))


@dataclass(frozen=True)
class Entry:
    """One operation. `left` is 0 while it lasts, and stays 0 if the rank died in it."""

    number: int  # of all entries of this rank
    entered: float  # seconds since 1970, by this host's clock
    left: float
    step: int  # steps of the optimizer done by then
    operation: int  # collectives and meetings have numbers, the same on all ranks; else 0
    kind: str  # a Kind
    waits: bool  # for other ranks: a rank that waits is not the late one
    what: str
    where: str  # file:line of the user's code
    detail: str  # shape and dtype of a collective, place in training of a step, the text of a mark
    began: float = 0.0  # the same as `entered` by the monotonic clock; not stored

    def as_operation(self, at: str = "") -> Operation:
        return Operation(self.operation, self.kind, self.what, self.detail, self.where, self.step, at)


@dataclass(frozen=True)
class Pulse:
    """The state of the process when its watchdog last looked."""

    time: float = 0.0
    cpu: float = 0.0  # seconds, of the process and its loader workers
    memory: int = 0  # bytes in use
    available: int = 0  # bytes left on the host
    oom_kills: int = 0  # by the host since it was started


@dataclass
class Spent:
    """Seconds since a rank asked for its first batch, added up by what it was in; what is left of `span` is its own."""

    steps: int = 0  # batches that it trained on
    span: float = 0.0  # from asking for the first batch to the newest end of an entry
    data: float = 0.0  # waiting for the next batch
    step: float = 0.0  # in steps, of which
    waited: float = 0.0  # … in operations that all ranks do together
    evaluate: float = 0.0
    save: float = 0.0


@dataclass
class Record:
    """What `read` found in a ring."""

    path: Path
    facts: dict[str, Any]  # rank, size, run, host, address, pid, started, boot, directory, script, launcher
    pulse: Pulse
    event: Event | None  # what ended the rank; None: it goes on, or could not record it
    entries: list[Entry] = field(default_factory=list)  # the oldest first
    spent: Spent = field(default_factory=Spent)

    def position(self) -> Operation:
        """What it was in, at its last step; if it was in nothing, the operation before that, without its kind."""
        entries = [entry for entry in self.entries if entry.kind != Kind.MARK]
        if not entries:
            return Operation()
        inside = next((entry for entry in reversed(entries) if not entry.left), None)
        last = (inside or entries[-1]).as_operation()
        return replace(last, kind=inside.kind if inside else "", step=max(entry.step for entry in entries))


class Flight:
    """The ring of this process. `Flight()` writes to memory only; so does a rank that has no directory."""

    def __init__(self, path: Path | None = None, facts: dict[str, Any] | None = None, slots: int = 2048) -> None:
        self.path, self.slots = path, slots
        self.step = 0  # kept by the stepper, copied into each entry
        self.operations = 0
        self.progress = time.monotonic()  # when the last entry was entered or left
        self.open: list[Entry] = []  # what this rank is in, the innermost last
        self.spent = Spent()
        self._began = 0.0  # when the first batch was asked for, by the monotonic clock
        self.recent: deque[Operation] = deque(maxlen=8)  # the numbered ones
        self._numbers = itertools.count(1)  # also for the watchdog's thread
        self._places: dict[tuple[Any, int], bytes] = {}
        size = _SLOTS + slots * _SLOT.size
        if path is None:
            self._map = mmap.mmap(-1, size)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".new")
            with unfinished.open("wb+") as ring:
                os.posix_fallocate(ring.fileno(), 0, size)  # a hole on a full disk would be a SIGBUS later
                self._map = mmap.mmap(ring.fileno(), size)
        self.facts = dict(facts or {}, slots=slots)
        self._map[:8] = MAGIC
        self.describe()
        if path is not None:  # only now: a reader never sees half a header
            unfinished.rename(path)

    def remove_old(self) -> None:
        """Keep only the newest of this rank's rings in the directory. Only for the job that holds the directory's lock:
        one that is refused must not remove the records of the one that runs."""
        if self.path is not None:
            rank = self.path.name.partition("-")[2]
            for old in sorted(self.path.parent.glob(f"*-{rank}"))[:-KEPT]:
                old.unlink(missing_ok=True)

    def describe(self, **facts: Any) -> None:
        """Who this rank is; more is added as it becomes known."""
        self.facts.update(facts)
        self._put(_FACTS + 8, _PULSE, self.facts)

    def enter(self, kind: str, what: str, detail: str = "", waits: bool = False, numbered: bool = False) -> Entry:
        """An operation begins. `numbered`: one that all ranks do together, in the same order."""
        now = time.time()
        if numbered:
            self.operations += 1
            self.recent.append(Operation(self.operations, kind, what, detail))
        operation = self.operations if numbered else 0
        place = self._place()
        self.progress = time.monotonic()
        entry = Entry(
            next(self._numbers),
            now,
            0.0,
            self.step,
            operation,
            kind,
            waits,
            what,
            place.decode(errors="ignore"),
            detail,
            self.progress,
        )
        _SLOT.pack_into(
            self._map, self._at(entry), entry.number, now, 0.0, self.step, operation, KINDS.index(kind), waits,
            what.encode()[:48], place, detail.encode()[:88],
        )  # fmt: skip
        self.open.append(entry)
        return entry

    def leave(self, entry: Entry) -> None:
        """An operation ends, and with it all that began inside it."""
        now, self.progress = time.time(), time.monotonic()
        while self.open:
            last = self.open.pop()
            _LEFT.pack_into(self._map, self._at(last) + _LEFT_AT, now)
            self._spend(last)
            if last is entry:
                break

    def _spend(self, entry: Entry) -> None:
        """Add up where the time goes: what is in nothing else, and of a step its waits for other ranks."""
        spent, seconds = self.spent, self.progress - entry.began
        if not self._began and entry.kind == "data" and not self.open:
            self._began = entry.began
        if not self._began:
            return
        if self.open:
            if not entry.waits or len(self.open) > 1 or self.open[0].kind != "step":
                return
            spent.waited += seconds
        elif entry.kind in ("data", "step", "evaluate", "save"):  # the names of the sums, too
            setattr(spent, entry.kind, getattr(spent, entry.kind) + seconds)
            spent.steps += entry.kind == "step"
        else:
            return
        spent.span = self.progress - self._began
        _SUMS.pack_into(self._map, _SPENT, *astuple(spent))

    def unwind(self, depth: int) -> None:
        """Leave everything that was entered since there were `depth` open entries."""
        while len(self.open) > depth:
            self.leave(self.open[-1])

    @contextmanager
    def during(self, kind: str, what: str, detail: str = "", waits: bool = False) -> Iterator[Entry]:
        entry = self.enter(kind, what, detail, waits)
        try:
            yield entry
        finally:
            self.leave(entry)

    def mark(self, what: str, detail: str = "") -> None:
        """Something that happened, without duration."""
        now, number = time.time(), next(self._numbers)
        words = what.encode()[:48], self._place(), detail.encode()[:88]
        place = _SLOTS + number % self.slots * _SLOT.size
        _SLOT.pack_into(self._map, place, number, now, now, self.step, 0, KINDS.index("mark"), False, *words)

    def pulse(self, pulse: Pulse) -> None:
        _BEAT.pack_into(self._map, _PULSE, pulse.time, pulse.cpu, pulse.memory, pulse.available, pulse.oom_kills)

    def record(self, event: Event) -> None:
        """What ends this rank. Only the first call counts: what follows is a consequence."""
        if not _get(self._map, _EVENT, _SLOTS):
            told = str(event.fields.get("text", ""))
            fields = {**event.fields, **({"text": told[:3500]} if told else {})}
            self._put(_EVENT, _SLOTS, replace(event, fields=fields, time=time.time()).to_json())

    def _at(self, entry: Entry) -> int:
        return _SLOTS + entry.number % self.slots * _SLOT.size

    def _put(self, start: int, end: int, value: dict[str, Any]) -> None:
        room = end - start - 16
        data = _json(value)
        while len(data) > room:  # the longest is cut: the rest still says who this is
            name = max(value, key=lambda each: len(str(value[each])))
            value = {**value, name: str(value[name])[: len(str(value[name])) // 2]}
            data = _json(value)
        self._map[start + 4 : start + 4 + len(data)] = data
        _LENGTH.pack_into(self._map, start, len(data))  # last: a reader never sees a length without its data

    def _place(self) -> bytes:
        """file:line of the user's code that this is called for."""
        frame: Any = sys._getframe(2)
        while frame is not None and not users(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return b""
        key = (frame.f_code, frame.f_lineno)
        found = self._places.get(key)
        if found is None:
            found = self._places[key] = f"{short(frame.f_code.co_filename)}:{frame.f_lineno}".encode()[-64:]
        return found


@lru_cache(maxsize=4096)
def users(filename: str) -> bool:
    """Whether that file is the user's code: not this package, not Python's or an installed library."""
    library = filename.startswith((_PACKAGE, _PYTHON, "<"))
    return not library and "site-packages" not in filename and "dist-packages" not in filename


def short(filename: str) -> str:
    """A path as a person would name it: relative to the working directory where it is below it."""
    try:
        return str(Path(filename).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return "/".join(Path(filename).parts[-2:])


def new_path(directory: Path, rank: int) -> Path:
    """Where the ring of a rank that starts now goes."""
    return directory / f"{time.time_ns() // 1_000_000:013d}-rank{rank}{SUFFIX}"


def read(path: Path) -> Record:
    """What a ring holds, also while its process runs and after it was killed. A ValueError if it is no ring, or damaged
    beyond telling whose it is."""
    with path.open("rb") as ring:
        data = ring.read(_LARGEST)
    if data[:8] != MAGIC or len(data) < _SLOTS:
        raise ValueError(f"{path} is not a flight record")
    facts = _get(data, _FACTS + 8, _PULSE)
    whole = {name: facts.get(name) for name in ("rank", "size", "pid")}
    if not all(isinstance(value, int) and 0 <= value < 1 << 22 for value in whole.values()):
        raise ValueError(f"{path} is damaged: it does not say whose record it is")
    if not _is_time(facts.get("started")):
        facts["started"] = 0.0
    event = None
    with suppress(ValueError):
        event = Event.from_json(told) if (told := _get(data, _EVENT, _SLOTS)) else None
        event = event if event and _is_time(event.time) else None
    entries = []
    for start in range(_SLOTS, len(data) - _SLOT.size + 1, _SLOT.size):
        number, entered, left, step, operation, kind, waits, *texts = _SLOT.unpack_from(data, start)
        if number and kind < len(KINDS) and _is_time(entered) and _is_time(left):
            what, where, detail = (text.rstrip(b"\0").decode(errors="ignore") for text in texts)
            entries.append(Entry(number, entered, left, step, operation, KINDS[kind], bool(waits), what, where, detail))
    entries.sort(key=lambda entry: entry.number)
    pulse = Pulse(*_BEAT.unpack_from(data, _PULSE))
    pulse = pulse if _is_time(pulse.time) and math.isfinite(pulse.cpu) else Pulse()
    spent = Spent(*_SUMS.unpack_from(data, _SPENT))
    sound = all(math.isfinite(value) and value >= 0 for value in vars(spent).values())
    return Record(path, facts, pulse, event, entries, spent if sound else Spent())


def _is_time(value: Any) -> bool:
    """Seconds since 1970, in this century; 0 stands for never."""
    return isinstance(value, (int, float)) and (value == 0 or 0 < value < 4.1e9)


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, default=str, ensure_ascii=False).encode(errors="replace")


def _get(data: Any, start: int, end: int) -> dict[str, Any]:
    length = _LENGTH.unpack_from(data, start)[0]
    try:
        found = json.loads(bytes(data[start + 4 : min(end, start + 4 + length)])) if length else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
