"""From a loss to a step: training state, loop, step, gradient exchange, precision."""
