"""Stories of jobs that went wrong, told as rings: who did what when, by a clock that the story sets."""

import time

from ppfleet.commands.why import cause
from ppfleet.watchdog import events
from ppfleet.watchdog.events import Code, Event, Operation
from ppfleet.watchdog.recorder import Flight, Pulse

GRADIENTS = "all-reduce of gradients"
A, B = "192.168.0.1", "192.168.0.2"


class Trainer:
    """One rank of a story. Every call says when it happens, in seconds since the story began."""

    def __init__(self, story, number, size, run, boot, address, pid, skew):
        self.story, self.number, self.skew = story, number, skew
        self.at(0)
        story.rings += 1
        path = story.directory / "flight" / f"{story.rings:013d}-rank{number}.ring"
        facts = {"rank": number, "size": size, "run": run, "host": f"host-{address}", "address": address, "pid": pid}
        self.flight = Flight(path, {**facts, "boot": boot, "started": time.time()}, slots=512)
        self.path = path

    def at(self, when):
        self.story.now = self.story.began + when + self.skew
        return self

    def enter(self, when, kind, what, **more):
        return self.at(when).flight.enter(kind, what, **more)

    def leave(self, when, entry):
        self.at(when).flight.leave(entry)

    def reduce(self, when, what=GRADIENTS, detail="[10] float32"):
        return self.enter(when, "collective", what, detail=detail, waits=True, numbered=True)

    def pulse(self, when, kills=0, memory=2 << 30):
        self.at(when).flight.pulse(Pulse(time.time(), 1.0, memory, 1 << 30, kills))

    def say(self, when, code, rank=None, host=A, operation=None, waiting=(), **fields):
        """What its watchdog pronounces of another rank, or records of its own."""
        rank = self.number if rank is None else rank
        self.at(when).flight.record(
            Event(Code(code), rank, host, operation or Operation(), waiting=waiting, fields=fields)
        )

    def fail(self, when, failure, where="t.py:1"):
        self.at(when).flight.record(events.exception(failure, self.number, A, where))

    def step(self, when, data=0.01, work=0.05):
        """Until it waits for the others: the step, the collective, and when that began."""
        self.leave(when + data, self.enter(when, "data", "next batch"))
        step = self.enter(when + data, "step", f"step {self.flight.step + 1}")
        return step, self.reduce(when + data + work), when + data + work


class Story:
    """Writes the rings of jobs into one run directory, with the clock in its hand."""

    def __init__(self, directory, monkeypatch):
        self.directory, self.rings = directory, 0
        self.began = self.now = time.time()
        monkeypatch.setattr("ppfleet.watchdog.recorder.time.time", lambda: self.now)

    def rank(self, number, size=2, run="token", boot="far", address=A, pid=1, skew=0.0):
        return Trainer(self, number, size, run, boot, address, pid, skew)

    def ranks(self, size=2, **more):
        return [self.rank(number, size, **more) for number in range(size)]

    def train(self, ranks, steps, when=0.0, data=(), work=()):
        """All steps to their end, at the pace of the slowest. When that was."""
        for _ in range(steps):
            begun = []
            for number, rank in enumerate(ranks):
                more = {
                    "data": dict(enumerate(data)).get(number, 0.01),
                    "work": dict(enumerate(work)).get(number, 0.05),
                }
                begun.append(rank.step(when, **more))
            when = max(each[2] for each in begun) + 0.002
            for rank, (step, reduce, _) in zip(ranks, begun):
                rank.leave(when, reduce)
                rank.flight.step += 1
                rank.leave(when, step)
            for rank in ranks:
                rank.pulse(when)
        for rank in ranks:  # is there another batch?
            rank.leave(when, rank.enter(when, "data", "next batch"))
        return when

    def look(self, when):
        """What `why` says then."""
        self.now = self.began + when
        found = cause.answer([self.directory])
        assert found is not None
        return found
