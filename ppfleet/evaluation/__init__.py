"""Metrics, the exact evaluation pass, the confusion matrix."""
