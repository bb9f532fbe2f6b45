"""Who this process is in the job: read once from the environment, checked, frozen. Pure: no Paddle, no sockets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ppfleet.errors import WorldError

_REQUIRED = ("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT")
_ADVICE = (
    "start the script with `python -m paddle.distributed.launch`, or with none of the PADDLE_* variables to train alone"
)


@dataclass(frozen=True)
class World:
    """Rank and size of this process, and where its peers are.

    `endpoints[r]` is the `ip:port` of rank r; `master` is where rank 0's store listens.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    endpoints: tuple[str, ...] = ()
    master: str = ""

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> World:
        """The world that the launcher described; a single process where it described none."""
        env = os.environ if env is None else env
        present = [name for name in _REQUIRED if env.get(name)]
        size = _integer(env, "PADDLE_TRAINERS_NUM") if env.get("PADDLE_TRAINERS_NUM") else 1
        if not present or (size == 1 and _integer(env, "PADDLE_TRAINER_ID", 0) == 0):
            return cls()
        missing = [name for name in _REQUIRED if name not in present]
        if missing:
            raise WorldError(f"{', '.join(present)} set, but not {', '.join(missing)}; {_ADVICE}")

        rank = _integer(env, "PADDLE_TRAINER_ID")
        if size < 1 or not 0 <= rank < size:
            raise WorldError(
                f"PADDLE_TRAINER_ID={rank} is not a rank of a job of PADDLE_TRAINERS_NUM={size}; {_ADVICE}"
            )
        endpoints = tuple(part.strip() for part in env["PADDLE_TRAINER_ENDPOINTS"].split(","))
        _check_endpoints(endpoints, size)
        if endpoints[rank] != env["PADDLE_CURRENT_ENDPOINT"].strip():
            raise WorldError(
                f"rank {rank} is {endpoints[rank]} in PADDLE_TRAINER_ENDPOINTS, but PADDLE_CURRENT_ENDPOINT is "
                f"{env['PADDLE_CURRENT_ENDPOINT']}: this host's own address was probably not found in --ips; "
                f"add `--host <own ip>` to the launch command"
            )
        same_host = [r for r in range(size) if _host(endpoints[r]) == _host(endpoints[rank])]
        return cls(
            rank=rank,
            size=size,
            local_rank=_integer(env, "PADDLE_LOCAL_RANK", same_host.index(rank)),
            local_size=_integer(env, "PADDLE_LOCAL_SIZE", len(same_host)),
            endpoints=endpoints,
            master=_master(env, endpoints),
        )

    @property
    def alone(self) -> bool:
        return self.size == 1

    @property
    def first(self) -> bool:
        """Whether this is rank 0: the one that writes."""
        return self.rank == 0

    @property
    def host(self) -> str:
        """This rank's address in the list; empty when alone."""
        return self.host_of(self.rank)

    def host_of(self, rank: int) -> str:
        return _host(self.endpoints[rank]) if self.endpoints else ""

    def name(self, rank: int | None = None) -> str:
        """How a message names a rank: `rank 3 on 192.168.0.2`."""
        rank = self.rank if rank is None else rank
        return f"rank {rank} on {_host(self.endpoints[rank])}" if self.endpoints else f"rank {rank}"


def _check_endpoints(endpoints: tuple[str, ...], size: int) -> None:
    if len(endpoints) != size:
        raise WorldError(
            f"PADDLE_TRAINERS_NUM={size}, but PADDLE_TRAINER_ENDPOINTS lists {len(endpoints)}: {endpoints}"
        )
    for endpoint in endpoints:
        host, colon, port = endpoint.rpartition(":")
        if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
            raise WorldError(f"PADDLE_TRAINER_ENDPOINTS holds {endpoint!r}, which is not `ip:port`")
    twice = sorted({endpoint for endpoint in endpoints if endpoints.count(endpoint) > 1})
    if twice:
        raise WorldError(
            f"PADDLE_TRAINER_ENDPOINTS lists {', '.join(twice)} more than once: two ranks cannot share a port"
        )


def _master(env: Mapping[str, str], endpoints: tuple[str, ...]) -> str:
    # The same order of precedence as Paddle's own init_parallel_env.
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return f"{env['MASTER_ADDR']}:{env['MASTER_PORT']}"
    return env.get("PADDLE_MASTER") or endpoints[0]


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text!r} is not a whole number; {_ADVICE}") from None


def _host(endpoint: str) -> str:
    return endpoint.rpartition(":")[0]
