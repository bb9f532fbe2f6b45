"""evaluation.json: what is written comes back, what is something else is refused; and its small pictures."""

import json
from types import SimpleNamespace

import cv2
import numpy as np
import pytest

from models.mobilenet_v3_small.pictures import thumbnail
from ppfleet.evaluation.confusion import NAME, Mistake, Seen, read

HOSTILE = "</table><script>alert(1)</script>\"'&\u202e"


class Alone:
    def on_first(self, work, what):
        return work()


def written(tmp_path, seen, show=None):
    seen.write(SimpleNamespace(directory=tmp_path, comm=Alone()), "step 7", show)
    return tmp_path / NAME


def test_it_comes_back(tmp_path):
    seen = Seen([HOSTILE, "\udcff", "c"], {(0, 0): 5, (0, 2): 2, (2, 1): 1}, [Mistake(17, 0, 2, 0.99)])
    found = read(written(tmp_path, seen, lambda sample: (f"{HOSTILE}{sample}", b"\xff\xd8\xff")))
    assert found.classes == seen.classes and found.pairs == seen.pairs and found.of == "step 7" and found.samples == 8
    assert found.mistakes == [Mistake(17, 0, 2, 0.99, f"{HOSTILE}17", "/9j/")]
    assert np.array_equal(found.matrix(), [[5, 0, 2], [0, 0, 0], [0, 1, 0]])
    assert read(written(tmp_path, seen)).mistakes == [Mistake(17, 0, 2, 0.99)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": 2}, "it has format 2, this ppfleet reads up to 1"),
        ({"pairs": [[0, 3, 1]]}, "its counts are not of its classes"),
        ({"pairs": [[-1, 0, 1]]}, "its counts are not of its classes"),
        ({"pairs": [[0, 0, -1]]}, "its counts are not of its classes"),
        ({"pairs": [[0, 0, 10**400]]}, "its counts are not of its classes"),
        ({"pairs": [[0, 0]]}, "not enough values"),
        ({"pairs": 3}, "damaged"),
        ({"classes": None}, "damaged"),
        ({"time": "yesterday"}, "could not convert"),
        ({"mistakes": [{"sample": 1}]}, "damaged"),
    ],
)
def test_what_is_no_evaluation_is_refused(tmp_path, change, said):
    path = written(tmp_path, Seen(["a", "b"], {(0, 1): 1}))
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=said):
        read(path)
    for text in ("", "[]", "[" * 10000, "\x00"):
        path.write_text(text)
        with pytest.raises(ValueError):
            read(path)


@pytest.mark.parametrize(
    ("height", "width", "expected"), [(8, 8, (112, 112)), (300, 600, (56, 112)), (2000, 3, (112, 1)), (1, 9, (12, 112))]
)
def test_a_thumbnail_is_small_and_whole(tmp_path, height, width, expected):
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 2] = 255  # red, in OpenCV's order
    cv2.imwrite(str(tmp_path / "a.png"), image)
    found = thumbnail(str(tmp_path / "a.png"))
    assert found.startswith(b"\xff\xd8\xff") and len(found) < 8000
    shown = cv2.imdecode(np.frombuffer(found, np.uint8), cv2.IMREAD_COLOR)
    assert shown.shape[:2] == expected and (shown[..., 2] > 240).all() and (shown[..., :2] < 15).all()


def test_an_image_that_is_gone_has_no_thumbnail(tmp_path):
    assert thumbnail(str(tmp_path / "gone.png")) == b""
