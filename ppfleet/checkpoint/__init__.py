"""Atomic files, manifest, run directory, saver, tensor formats, safe unpickling."""
