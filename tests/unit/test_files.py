"""Files that are there whole or not at all, and what a failure to write one is called."""

import pytest

from ppfleet.checkpoint.files import replace_file
from ppfleet.errors import CheckpointError, OutputError


def test_a_failed_write_of_another_file_is_no_checkpoint_error(tmp_path):
    with pytest.raises(OutputError, match="cannot write .*page.html") as caught:
        replace_file(tmp_path / "missing" / "page.html", b"page")
    assert not isinstance(caught.value, CheckpointError) and "checkpoint" not in str(caught.value)
    with pytest.raises(CheckpointError, match="cannot write .*latest.pdparams"):
        replace_file(tmp_path / "missing" / "latest.pdparams", b"weights", CheckpointError)


def test_a_reader_never_sees_a_part(tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"old")

    def fails(part):
        part.write_bytes(b"ne")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        replace_file(path, fails)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    replace_file(path, lambda part: part.write_bytes(b"new"))
    assert path.read_bytes() == b"new"
