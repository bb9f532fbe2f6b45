"""Metrics for `job.evaluate`: the public name of ppfleet.evaluation.metrics."""

from ppfleet.evaluation.metrics import cross_entropy, top1, top5, topk

__all__ = ["cross_entropy", "top1", "top5", "topk"]
