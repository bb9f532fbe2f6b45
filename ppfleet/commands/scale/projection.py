"""How long a step would take on more machines, from the parts of a measured step. Pure.

A step is its own work and waits, as measured, plus one exchange in a ring over all p ranks, as gloo does it: each rank
sends and receives 2(p-1)/p times its bytes, in 2(p-1) consecutive messages. What the measured exchange took beyond
that is the handling of bytes (copies, sums, kernel), which is proportional to their number.
"""

from __future__ import annotations

from dataclasses import dataclass

_PAYLOAD = 1448 / 1538  # share of a link's rate that TCP can use, with 1500-byte Ethernet frames and all headers


@dataclass(frozen=True)
class Network:
    bandwidth: float  # bytes per second that one machine receives, in each direction
    latency: float  # seconds, one way

    @classmethod
    def of_link(cls, mbit: float, milliseconds: float) -> Network:
        """From the nominal rate of a link."""
        return cls(mbit * 125e3 * _PAYLOAD, milliseconds / 1e3)


@dataclass(frozen=True)
class Step:
    """A measured step."""

    own: float  # seconds: computing, data, waiting for slower ranks, time between steps
    exchange: float  # seconds
    ranks: int  # in total
    bytes: int  # that a rank contributes to the exchange


def model(step: Step, network: Network) -> str:
    """The model of the projection in one sentence."""
    return (
        f"A step's own work and waits as measured ({1e3 * step.own:.1f} ms), plus one exchange of "
        f"{step.bytes / 1e6:.2f} MB in a ring over all p ranks: 2(p−1)/p × {step.bytes / 1e6:.2f} MB at "
        f"{network.bandwidth * 8e-6:.4g} Mbit/s, 2(p−1) messages of {1e3 * network.latency:.3g} ms, and the measured "
        f"time to handle the bytes"
    )


def on_wire(size: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends, and receives, to sum that many."""
    return 2 * (ranks - 1) / ranks * size


def wire_time(size: float, ranks: int, network: Network) -> float:
    return on_wire(size, ranks) / network.bandwidth + 2 * (ranks - 1) * network.latency


def handling(step: Step, network: Network | None) -> float:
    """Seconds per byte on the wire that the measured exchange took beyond the time of the network; without a network,
    all of it."""
    if step.ranks < 2 or not step.bytes:
        return 0.0
    beyond = step.exchange - (wire_time(step.bytes, step.ranks, network) if network else 0.0)
    return max(0.0, beyond) / on_wire(step.bytes, step.ranks)


def step_time(step: Step, per_byte: float, ranks: int, network: Network) -> float:
    """Seconds of a step with the same batch per rank, on that many ranks in total."""
    return step.own + wire_time(step.bytes, ranks, network) + per_byte * on_wire(step.bytes, ranks)
