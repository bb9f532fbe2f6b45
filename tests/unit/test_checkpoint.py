import json
import os
import shutil
from pathlib import Path

import pytest

from ppfleet.checkpoint import manifest as checkpoint
from ppfleet.checkpoint import retention
from ppfleet.errors import CheckpointError


def writers(text="weights"):
    return {name: f"{name} {text}".encode() for name in checkpoint.PARTS}


def test_written_verified_linked(tmp_path):
    path = checkpoint.write(tmp_path, 12, writers(), best=True)
    assert path.name == "000001-step-12"
    assert set(checkpoint.verify(path)["files"]) == set(checkpoint.PARTS)
    assert (tmp_path / "latest").resolve() == (tmp_path / "best").resolve() == path.resolve()
    assert checkpoint.newest(tmp_path).path == path
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000001-step-12", "best", "latest"]


def test_newest_is_the_one_written_last_also_after_going_back(tmp_path):
    checkpoint.write(tmp_path, 500, writers())
    back = checkpoint.write(tmp_path, 100, writers())
    assert checkpoint.newest(tmp_path).path == back
    assert (tmp_path / "latest").resolve() == back.resolve()


def test_nothing_has_its_final_name_before_it_is_whole_and_on_the_disk(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").resolve().name))
        real_fsync(descriptor)

    def rename(self, target):
        events.append(("rename", Path(target).name))
        return real_rename(self, target)

    def write(path, data):
        assert path.parent.name.startswith(".tmp-") and not list(tmp_path.glob("0*"))
        real_write(path, data)

    real_write = checkpoint.write_bytes
    monkeypatch.setattr(checkpoint, "write_bytes", write)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    checkpoint.write(tmp_path, 2, writers())
    at = events.index(("rename", "000001-step-2"))
    before = [name for kind, name in events[:at] if kind == "fsync"]
    assert {*checkpoint.PARTS, "manifest.json"} <= set(before) and any(name.startswith(".tmp-") for name in before)
    assert ("fsync", tmp_path.name) in events[at:]


def test_killed_while_an_old_one_is_removed(tmp_path, monkeypatch):
    """Half of a checkpoint must not look like one."""
    checkpoint.write(tmp_path, 1, writers())

    def killed(path, **_):
        for part in path.glob("*"):
            part.unlink()
            raise KeyboardInterrupt

    checkpoint.write(tmp_path, 2, writers())
    monkeypatch.setattr(retention.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        retention.prune(tmp_path, keep=1)
    monkeypatch.undo()
    whole = [path.name for path in tmp_path.glob("0*") if checkpoint.verify(path)]
    assert whole == ["000002-step-2"]
    checkpoint.write(tmp_path, 3, writers())
    assert not list(tmp_path.glob(".tmp-*"))


def test_keep_and_best(tmp_path):
    checkpoint.write(tmp_path, 1, writers(), best=True)
    for step in (2, 3, 4):
        checkpoint.write(tmp_path, step, writers())
        retention.prune(tmp_path, keep=2)
    assert [p.name for p in sorted(tmp_path.glob("0*"))] == ["000001-step-1", "000003-step-3", "000004-step-4"]
    assert (tmp_path / "best").resolve().name == "000001-step-1"


def test_nothing_there_is_no_error(tmp_path):
    assert checkpoint.newest(tmp_path / "none").path is None


def damage_truncate(path):
    part = path / "model.safetensors"
    part.write_bytes(part.read_bytes()[:-3])


def damage_flip(path):
    part = path / "optimizer.safetensors"
    data = bytearray(part.read_bytes())
    data[2] ^= 1
    part.write_bytes(data)


def damage_remove(path):
    (path / "state.json").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_text("{")


def damage_no_manifest(path):
    (path / "manifest.json").unlink()


def damage_unlist(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"]["model.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES = {
    damage_truncate: "model.safetensors is truncated or altered",
    damage_flip: "optimizer.safetensors is altered",
    damage_remove: "state.json is missing",
    damage_manifest: "manifest.json is damaged",
    damage_no_manifest: "manifest.json is missing",
    damage_unlist: "does not list model.safetensors",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_a_damaged_one_is_named_and_the_earlier_one_taken(tmp_path, damage):
    good = checkpoint.write(tmp_path, 1, writers())
    bad = checkpoint.write(tmp_path, 2, writers())
    damage(bad)
    with pytest.raises(CheckpointError, match=DAMAGES[damage]):
        checkpoint.verify(bad)
    found = checkpoint.newest(tmp_path)
    assert found.path == good
    assert len(found.skipped) == 1 and DAMAGES[damage] in found.skipped[0] and bad.name in found.skipped[0]


def test_all_damaged_is_an_error_not_a_new_start(tmp_path):
    for step in (1, 2):
        damage_flip(checkpoint.write(tmp_path, step, writers()))
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints"):
        checkpoint.newest(tmp_path)


def test_a_failing_write_leaves_no_trace(tmp_path, monkeypatch):
    earlier = checkpoint.write(tmp_path, 1, writers())

    def full(path, data):
        path.write_bytes(data[:4])
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "write_bytes", full)
    with pytest.raises(CheckpointError, match="model.safetensors: the disk is full.*Earlier checkpoints are untouched"):
        checkpoint.write(tmp_path, 2, writers())
    assert sorted(p.name for p in tmp_path.iterdir()) == [earlier.name, "latest"]
    assert checkpoint.newest(tmp_path).path == earlier


def test_a_write_that_reads_back_wrong_is_not_published(tmp_path, monkeypatch):
    earlier = checkpoint.write(tmp_path, 1, writers())
    real_write = checkpoint.write_bytes

    def corrupting_write(path, data):
        """A bit flips on the way to the disk."""
        flipped = bytes([data[0] ^ 1]) + data[1:] if path.name == "model.safetensors" else data
        real_write(path, flipped)

    monkeypatch.setattr(checkpoint, "write_bytes", corrupting_write)
    with pytest.raises(CheckpointError, match="altered"):
        checkpoint.write(tmp_path, 2, writers())
    assert checkpoint.newest(tmp_path).path == earlier


def test_left_over_temporary_directories_are_removed(tmp_path):
    leftover = tmp_path / ".tmp-000001-step-3-99"
    leftover.mkdir()
    (leftover / "model.safetensors").write_text("half")
    assert checkpoint.newest(tmp_path).path is None
    checkpoint.write(tmp_path, 1, writers())
    assert not leftover.exists()


def test_a_newer_format_is_refused(tmp_path):
    path = checkpoint.write(tmp_path, 1, writers())
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match="upgrade ppfleet"):
        checkpoint.verify(path)


def test_a_manifest_cannot_point_outside(tmp_path):
    path = checkpoint.write(tmp_path, 1, writers())
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../latest"] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        checkpoint.verify(path)


def test_copying_a_checkpoint_keeps_it_good(tmp_path):
    path = checkpoint.write(tmp_path / "a", 1, writers())
    shutil.copytree(path, tmp_path / "copy")
    checkpoint.verify(tmp_path / "copy")
    assert (tmp_path / "copy" / "manifest.json").exists()
