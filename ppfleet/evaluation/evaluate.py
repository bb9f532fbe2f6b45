"""One pass over a data set in evaluation mode that adds up metrics over the real samples."""

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


def evaluate(
    model: Any, loader: Loader, metrics: Mapping[str, Callable[..., Any]], comm: Comm
) -> dict[str, float] | None:
    """The mean of each metric over all ranks and the number of samples; None if a rank was asked to stop by SIGTERM."""
    totals = _measure(model, loader, metrics, comm)
    gathered = comm.gather(totals.to_json() if totals else None, "evaluation")
    if None in gathered:
        return None
    merged = Totals.merged(gathered)
    return {**merged.means(), SAMPLES: round(merged.total(SAMPLES))}


def _measure(model: Any, loader: Loader, metrics: Mapping[str, Callable[..., Any]], comm: Comm) -> Totals | None:
    """This rank's sums and counts; None after SIGTERM. A batch is `(input, *targets)`, a metric takes
    `(model(input), *targets)`."""
    if SAMPLES in metrics:
        raise DataError(f"a metric cannot be named {SAMPLES!r}, which is the number of samples: use another name")
    totals, expected = Totals(), loader.plan.batch_size
    loader.begin(0, 0, EVALUATION)
    progress = log.Progress("eval", loader.steps_left, loader.plan.global_batch, every=10**9, shown=comm.world.first)
    try:
        with evaluating(model), paddle.no_grad():
            batches = iter(loader)
            while True:
                with comm.flight.during("data", "next batch of the evaluation"):
                    batch = next(batches, _END)
                if batch is _END:
                    break
                if comm.watchdog.stop_requested:
                    return None
                if not isinstance(batch, (list, tuple)):
                    raise DataError("job.evaluate needs batches of (input, *targets): make the data set return a tuple")
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
    """The values and the weights, if any, that a metric returned, each one-dimensional."""
    parts = answer if isinstance(answer, tuple) else (answer, None)
    if len(parts) != 2:
        raise DataError(
            f"metric {name!r} returned a tuple of {len(parts)}: it must return one value per sample, or a pair "
            f"(values, weights)"
        )
    return per_sample(name, parts[0]), None if parts[1] is None else per_sample(name, parts[1])


def _check_output(output: Any, expected: int, comm: Comm) -> None:
    """A single row of output would be compared with every target and give the expected number of values."""
    shape = list(getattr(output, "shape", ()))
    if expected > 1 and shape[:1] == [1] and len(shape) <= 2 and expected not in shape:
        raise DataError(
            f"the model returned shape {shape} for a batch of {expected} samples on {comm.world.name()}: it must "
            f"return one row per sample"
        )


def _miscount(name: str, what: str, count: int, expected: int, batch: Any, comm: Comm) -> str:
    """Whether collate or the metric is why the number of values is not that of the samples."""
    sizes = {int(part.shape[0]) for part in batch if len(getattr(part, "shape", ()))}
    if sizes == {count}:
        return (
            f"collate got {expected} samples and returned a batch of {count} on {comm.world.name()}, so padding cannot "
            f"be told from real samples. It must return every sample: remove bad ones from the data set, or give them "
            f"a weight of 0 with a metric that returns (values * keep, keep)"
        )
    return (
        f"metric {name!r} returned {count} {what}{'s' if count != 1 else ''} for a batch of {expected} samples on "
        f"{comm.world.name()}: it must return one per sample, also for padding, not a mean or sum over the batch "
        f"(in Paddle's losses: reduction='none')"
    )
