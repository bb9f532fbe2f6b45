import subprocess
import sys

import numpy as np
import pytest

from ppfleet.data.digest import digest

SAMPLE = "{'x': np.arange(6.0).reshape(2, 3), 'names': ['a', 'b'], 'ids': {'x', 'y', 'z'}, 'n': (1, 2.5, None)}"


def test_the_same_in_every_process():
    """Also where strings have other hashes, which decide the order of a set."""
    code = f"import numpy as np; from ppfleet.data.digest import digest; print(digest({SAMPLE}))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.strip()
        for seed in ("1", "2", "3")
    }
    assert found == {digest(eval(SAMPLE))}  # noqa: S307


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1, "1"),
        (1, 1.0),
        (0.1, 0.2),
        ("a", b"a"),
        ([1, 2], [2, 1]),
        ([[1], 2], [1, [2]]),
        (["ab", "c"], ["a", "bc"]),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({1, 2}, {1, 3}),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(4, "float32"), np.zeros(4, "int32")),
        (np.zeros(2), np.array([0, 1e-300])),
        (np.array(["a", None], dtype=object), np.array(["b", None], dtype=object)),
    ],
)
def test_other_content_has_another_digest(one, other):
    assert digest(one) != digest(other)


def test_equal_content_has_the_same_digest():
    rows = np.arange(12).reshape(3, 4)
    assert digest(rows[:, ::2]) == digest(rows[:, ::2].copy())
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert digest((1, 2)) == digest([1, 2])
    assert digest(float("nan")) == digest(float("nan"))
    assert digest(object()) == digest(object())
