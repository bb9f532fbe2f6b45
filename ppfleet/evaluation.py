"""One pass over a data set in evaluation mode, adding up metrics over the real samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import paddle

from ppfleet import log
from ppfleet.comm import Comm
from ppfleet.errors import DataError
from ppfleet.loader import Loader
from ppfleet.metrics import Totals
from ppfleet.wrap import evaluating

SAMPLES = "samples"
_END = object()


def measure(
    model: Any, loader: Loader, metrics: Mapping[str, Callable[..., Any]], shown: bool, comm: Comm
) -> Totals | None:
    """This rank's sums and counts; none if the job is to end. A batch is `(input, *targets)`, a metric takes
    `(model(input), *targets)`."""
    totals = Totals()
    loader.epoch, loader.start = 0, 0
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
                    answer = metric(output, *targets)
                    values, weights = answer if isinstance(answer, tuple) else (answer, None)
                    totals.add(name, values, weights, int(loader.mask.sum()))
                totals.add(SAMPLES, loader.mask)
                progress.step()
    finally:
        progress.close()
    return totals
