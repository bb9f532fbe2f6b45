"""A training step and its saver without a Job, in the process of the test: one linear layer, no bias."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable

import numpy as np


class Training:
    """`rate` is a number or a schedule; `told` stands for what two or more ranks would have told each other."""

    def __init__(
        self,
        rate: Any = 0.5,
        accumulate: int = 1,
        on_nan: str = "stop",
        samples: int = 1 << 20,
        told: Any = None,
        directory: Path | None = None,
        seed: int = 3,
        adam: bool = False,
    ) -> None:
        import paddle

        from ppfleet.checkpoint.run_directory import RunDir
        from ppfleet.checkpoint.saver import Saver
        from ppfleet.distributed.collectives import Comm
        from ppfleet.distributed.devices import CPU
        from ppfleet.distributed.world import World
        from ppfleet.training.gradients import HostExchange
        from ppfleet.training.precision import Precision
        from ppfleet.training.state import TrainingState
        from ppfleet.training.step import Stepper

        self.net = paddle.nn.Linear(2, 1, bias_attr=False)
        self.net.weight.set_value(np.array([[1.0], [-2.0]], "float32"))
        kind = paddle.optimizer.Adam if adam else paddle.optimizer.SGD
        optimizer = kind(rate, parameters=self.net.parameters())
        self.comm: Any = Comm(World(), CPU)
        self.state = TrainingState()
        parameters = {"weight": self.net.weight}
        exchange: Any = HostExchange(self.comm, parameters, [], [])
        comm = self.comm
        if told is not None:
            exchange.reduce = lambda loss, rate: told
            world = World(0, len(told.rates), 0, 1, tuple(f"127.0.0.1:{6000 + r}" for r in range(len(told.rates))))
            comm = SimpleNamespace(world=world, device=CPU, flight=self.comm.flight)
        self.stepper = Stepper(
            comm, self.state, Precision("O0", None, CPU), exchange, self.net, optimizer, accumulate, on_nan
        )
        self._loader: Any = SimpleNamespace(plan=SimpleNamespace(length=samples, global_batch=4), position=0, real=0)
        if directory is not None:
            run = RunDir(directory, keep=3)
            run.take()
            self.run = run
            self.saver = Saver(run, seed, self.net, self.stepper, parameters)

    def close(self) -> None:
        self.comm.watchdog.stop()
        if hasattr(self, "run"):
            self.run.release()

    def weights(self) -> np.ndarray[Any, Any]:
        return self.net.weight.numpy()[:, 0].copy()

    def losses(self, points: np.ndarray[Any, Any]) -> Any:
        import paddle

        return self.net(paddle.to_tensor(points))

    def loss(self, points: np.ndarray[Any, Any]) -> Any:
        return self.losses(points).mean()

    def begin(self, real: int, left: int | None = None) -> None:
        """A batch with so many real samples is handed out; `left` counts it and those after it."""
        self._loader.real = real
        self._loader.position += real
        self.state.ahead = self._loader.position
        self.stepper.begin(self._loader, left)

    def batch(
        self,
        points: np.ndarray[Any, Any],
        left: int | None = None,
        change: Callable[[Any], Any] = lambda loss: loss,
        reduce: Callable[[Any], Any] = lambda losses: losses.mean(),
    ) -> float:
        """One turn of the loop over job.steps; the loss."""
        self.begin(len(points), left)
        loss = change(reduce(self.losses(points)))
        self.stepper.backward(loss)
        self.stepper.end()
        return float(loss)
