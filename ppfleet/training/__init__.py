"""From a loss to a step: training state, step, gradient exchange, precision."""
