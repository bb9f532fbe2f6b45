"""One pass over a data set in evaluation mode, adding up metrics over the real samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import paddle

from ppfleet import log
from ppfleet.data.loader import EVALUATION, Loader
from ppfleet.distributed.collectives import Comm
from ppfleet.errors import DataError
from ppfleet.evaluation.metrics import Totals, per_sample
from ppfleet.training.model import evaluating

SAMPLES = "samples"
_END = object()


def measure(
    model: Any, loader: Loader, metrics: Mapping[str, Callable[..., Any]], shown: bool, comm: Comm
) -> Totals | None:
    """This rank's sums and counts; none if the job is to end. A batch is `(input, *targets)`, a metric takes
    `(model(input), *targets)`."""
    if SAMPLES in metrics:
        raise DataError(f"a metric cannot be called {SAMPLES!r}, which is how many there were: give it another name")
    totals, expected = Totals(), loader.plan.batch_size
    loader.begin(0, 0, EVALUATION)
    progress = log.Progress("eval", loader.steps_left, loader.plan.global_batch, every=10**9, shown=shown)
    try:
        with evaluating(model), paddle.no_grad():
            batches = iter(loader)
            while True:
                with comm.flight.during("data", "next batch of the evaluation"):
                    batch = next(batches, _END)
                if batch is _END:
                    break
                if comm.watch.wanted:
                    return None
                if not isinstance(batch, (list, tuple)):
                    raise DataError("job.evaluate needs batches of (input, *targets): let the data set return a tuple")
                data, *targets = batch
                output = model(data)
                for name, metric in metrics.items():
                    values, weights = _pair(name, metric(output, *targets))
                    for what, numbers in (("value", values), ("weight", weights)):
                        if numbers is not None and len(numbers) != expected:
                            raise DataError(_miscount(name, what, len(numbers), expected, batch, comm))
                    totals.add(name, values, weights, int(loader.mask.sum()))
                _check_output(output, expected, comm)
                totals.add(SAMPLES, loader.mask)
                totals.read = loader.position
                progress.step()
    finally:
        progress.close()
    return totals


def _pair(name: str, answer: Any) -> tuple[Any, Any]:
    """The values and the weights, if any, that a metric returned: each of one dimension."""
    parts = answer if isinstance(answer, tuple) else (answer, None)
    if len(parts) != 2:
        raise DataError(
            f"metric {name!r} returned a tuple of {len(parts)}: it must return one value per sample, or two of these, "
            f"(values, weights)"
        )
    return per_sample(name, parts[0]), None if parts[1] is None else per_sample(name, parts[1])


def _check_output(output: Any, expected: int, comm: Comm) -> None:
    """A single row of output would be compared with every target of the batch, and give as many values as are due."""
    shape = list(getattr(output, "shape", ()))
    if expected > 1 and shape[:1] == [1] and len(shape) <= 2 and expected not in shape:
        raise DataError(
            f"the model returned shape {shape} for a batch of {expected} samples on {comm.world.name()}: one row for "
            f"all of them; it must return one row per sample"
        )


def _miscount(name: str, what: str, count: int, expected: int, batch: Any, comm: Comm) -> str:
    """Why the number of values is not that of the samples: because of collate, or of the metric."""
    sizes = {int(part.shape[0]) for part in batch if len(getattr(part, "shape", ()))}
    if sizes == {count}:
        return (
            f"collate got {expected} samples and returned a batch of {count} on {comm.world.name()}: which of them are "
            f"padding, and how many were evaluated, cannot be known. It must return every sample: leave bad ones out "
            f"of the data set, or give them a weight of 0 with a metric that returns (values * keep, keep)"
        )
    return (
        f"metric {name!r} returned {count} {what}{'s' if count != 1 else ''} for a batch of {expected} samples on "
        f"{comm.world.name()}: it must return one per sample, also for padding, not a mean or sum over the batch "
        f"(in Paddle's losses: reduction='none')"
    )
