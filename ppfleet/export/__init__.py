"""The static model, its parity check, and the runtimes it is compared with."""

from ppfleet.export.runtimes import installed
from ppfleet.export.static_model import FORMATS, agreement, export

__all__ = ["FORMATS", "agreement", "export", "installed"]
