"""An image file that is decoded on access, a JPEG only down to the last row that is needed.

Decoding a JPEG cannot start in the middle, but it can stop early: with a smaller height in its header it stops there.
"""

from __future__ import annotations

from deploy.inference_python import preprocess
from deploy.inference_python.preprocess import Image

_FIRST, _LAST = b"\xff\xd8", b"\xff\xd9"
_FRAMES, _SCAN = (0xC0, 0xC1), 0xDA  # sequential, Huffman coded
# Tables, comments and application data. Not 0xE1 (Exif may say that the image is rotated), nor 0xDD (restart markers,
# about which a decoder that stopped early would complain).
_OTHERS = {0xC4, 0xDB, 0xFE, 0xE0, *range(0xE2, 0xF0)}
_MORE = 2  # rows: with subsampled colours a row's colours also come from the next ones
_BLOCK = 16  # rows that are decoded together


class PartialImage:
    """Like an array it has a `shape` and can be sliced, with the same pixels as the whole image."""

    def __init__(self, path: str) -> None:
        self._path, self._data = path, preprocess.load(path)
        self._place = _where_height_is(self._data)
        self._whole: Image | None = None
        if self._place is None:
            self._whole = preprocess.decode(self._data, path)
            self.shape = self._whole.shape[:2]
        else:
            self.shape = _number(self._data, self._place), _number(self._data, self._place + 2)

    def __getitem__(self, part: tuple[slice, slice]) -> Image:
        return self._down_to(part[0].stop)[part]

    def _down_to(self, row: int) -> Image:
        enough = row + _MORE
        if self._place is not None and enough <= self.shape[0] - _BLOCK:
            upper = bytearray(self._data)
            del upper[-len(_LAST) :]  # at which the decoder would complain about remaining bytes
            upper[self._place : self._place + 2] = enough.to_bytes(2, "big")
            try:
                return preprocess.decode(upper, self._path)
            except preprocess.BadImage:
                pass  # too few bytes remain, or it is damaged: decoding the whole file will tell
        if self._whole is None:
            self._whole = preprocess.decode(self._data, self._path)
        return self._whole


def _where_height_is(data: bytes) -> int | None:
    """The offset of the height in a JPEG that is complete, upright and has one sequential scan; otherwise None."""
    if data[:2] != _FIRST or data[-2:] != _LAST:
        return None
    at, place = 2, None
    while at + 10 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if kind == _SCAN:  # it must contain all components of the frame
            return place if place and data[at + 4] == data[place + 4] else None
        if kind in _FRAMES:
            place = at + 5
        elif kind not in _OTHERS:
            return None
        at += 2 + _number(data, at + 2)
    return None


def _number(data: bytes, at: int) -> int:
    return data[at] << 8 | data[at + 1]
