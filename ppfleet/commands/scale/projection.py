"""What a step would take on more machines, from the measured parts of one that ran. Pure.

A step is its own work and waits, as measured, and one exchange in a ring over all p ranks, as gloo makes it: each rank
sends and receives 2(p-1)/p times its bytes, in 2(p-1) messages one after the other. What the exchange took beyond
that on the measured network is the handling of bytes (copies, sums, kernel), which grows with them.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAYLOAD = 1448 / 1538  # of a link's rate that TCP can use: Ethernet frames of the usual size with all their headers


@dataclass(frozen=True)
class Network:
    bandwidth: float  # bytes a second that arrive, of one machine in each direction
    latency: float  # seconds, one way

    @classmethod
    def of_link(cls, mbit: float, milliseconds: float) -> Network:
        """By the rate that is printed on it."""
        return cls(mbit * 125e3 * _PAYLOAD, milliseconds / 1e3)


@dataclass(frozen=True)
class Step:
    """A measured one."""

    own: float  # seconds: computing, data, waiting for slower ranks and what is between steps
    exchange: float  # seconds
    ranks: int  # in all
    bytes: int  # that a rank brings to the exchange


def model(step: Step, network: Network) -> str:
    """In one sentence, for a reader."""
    return (
        f"A step's own work and waits as measured ({1e3 * step.own:.1f} ms), plus one exchange of "
        f"{step.bytes / 1e6:.2f} MB in a ring over all p ranks: 2(p−1)/p × {step.bytes / 1e6:.2f} MB at "
        f"{network.bandwidth * 8e-6:.4g} Mbit/s, 2(p−1) messages of {1e3 * network.latency:.3g} ms, and the handling "
        f"of the bytes as measured"
    )


def on_wire(size: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends, and receives, for a sum of that many."""
    return 2 * (ranks - 1) / ranks * size


def wire_time(size: float, ranks: int, network: Network) -> float:
    return on_wire(size, ranks) / network.bandwidth + 2 * (ranks - 1) * network.latency


def handling(step: Step, network: Network | None) -> float:
    """Seconds a byte on the wire that the measured exchange took beyond the network's time; None: there was no network
    in between, all of it was handling."""
    if step.ranks < 2 or not step.bytes:
        return 0.0
    beyond = step.exchange - (wire_time(step.bytes, step.ranks, network) if network else 0.0)
    return max(0.0, beyond) / on_wire(step.bytes, step.ranks)


def step_time(step: Step, a_byte: float, ranks: int, network: Network) -> float:
    """Seconds of a step with the same batch a rank on that many ranks in all."""
    return step.own + wire_time(step.bytes, ranks, network) + a_byte * on_wire(step.bytes, ranks)
