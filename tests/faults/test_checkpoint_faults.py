"""The fault table of checkpoints: what the user reads, and that the earlier checkpoint still loads."""

import os
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import DEVICE, run, run_raising

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="mounting a small or read-only file system needs root; CI runs this as root"
)


@contextmanager
def mounted(path, options):
    """A file system of its own at `path`."""
    path.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def train(directory, epochs, width=16, other_optimizer=False, seed=1):
    """One epoch is 4 steps and ends with a save; returns where training started and how it ended."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from ppfleet.checkpoint import tensors
    from tests import blocks

    job = ppfleet.Job(directory, device=DEVICE, seed=seed)
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))
    optimizer = paddle.optimizer.SGD if other_optimizer else paddle.optimizer.Adam
    wrapped, adam = job.prepare(net, optimizer(0.01, parameters=net.parameters()))
    data = job.loader(blocks.Points(64), 16 // job.world.size, shuffle=True)
    job.resume()
    started = job.step
    for _ in job.epochs(epochs):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(wrapped(points), labels))
        job.save()
    return {"started": started, "step": job.step, "weights": tensors.fingerprint(net)}


def fills_up(directory, mount):
    """Save once; then somebody else fills the disk; the next save must fail on every rank, and training may go on."""
    import paddle
    import paddle.nn.functional as F
    from paddle import nn

    import ppfleet
    from tests import blocks

    job = ppfleet.Job(directory, device=DEVICE, seed=1)
    net = nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 10))
    wrapped, adam = job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    data = job.loader(blocks.Points(64), 16 // job.world.size, shuffle=True)
    failures = []
    for epoch in job.epochs(3):
        for points, labels in job.steps(data):
            job.backward(F.cross_entropy(wrapped(points), labels))
        if job.world.first:
            rest = os.statvfs(mount).f_bavail * os.statvfs(mount).f_frsize
            if epoch == 1:
                with open(f"{mount}/somebody-elses", "wb") as stream:  # noqa: PTH123
                    stream.write(b"x" * (rest - 600_000))
            if epoch == 2:
                os.unlink(f"{mount}/somebody-elses")  # noqa: PTH108
        try:
            job.save()
        except ppfleet.FleetError as failure:
            failures.append([epoch, type(failure).__name__, str(failure)])
    return failures


@needs_root
@pytest.mark.parametrize("ranks", [1, 2])
def test_disk_full(tmp_path, ranks):
    with mounted(tmp_path / "disk", "size=24m") as disk:
        for rank, failures in enumerate(run(fills_up, ranks, tmp_path / "out", str(disk / "run"), str(disk))):
            assert [failure[:2] for failure in failures] == [[1, "CheckpointError"]], failures
            message = failures[0][2]
            if "latest.pdparams: the disk is full" not in message:  # it is written meanwhile: either may be the first
                assert "safetensors: the disk is full" in message and "Earlier checkpoints are untouched" in message
            assert rank == 0 or "saving a checkpoint failed on rank 0" in message
        names = sorted(p.name for p in (disk / "run/checkpoints").iterdir())
        assert names[:2] == ["000001-step-4", "000002-step-12"] and "latest" in names, names
        assert not [name for name in names if name.startswith(".")], names


def load_newest(directory, width):
    import paddle
    from paddle import nn

    import ppfleet

    job = ppfleet.Job(f"{directory}-reader", device=DEVICE, seed=1)
    net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 10))
    job.prepare(net, paddle.optimizer.Adam(0.01, parameters=net.parameters()))
    job.resume(f"{directory}/checkpoints/latest")
    return job.step


@needs_root
def test_disk_full_from_the_start_of_a_save_keeps_the_earlier_checkpoint(tmp_path):
    with mounted(tmp_path / "disk", "size=24m") as disk:
        run(train, 1, tmp_path / "out", str(disk / "run"), 1, 4096)
        rest = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "full").write_bytes(b"x" * rest)
        ((kind, message),) = run_raising(train, 1, tmp_path / "out", str(disk / "run"), 2, 4096)
        assert kind in ("CheckpointError", "FleetError") and "the disk is full" in message, message
        assert run(load_newest, 1, tmp_path / "out", str(disk / "run"), 4096) == [4]


@needs_root
@pytest.mark.parametrize("ranks", [1, 2])
def test_read_only_directory(tmp_path, ranks):
    with mounted(tmp_path / "disk", "size=8m") as disk:
        run(train, 1, tmp_path / "out", str(disk / "run"), 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for kind, message in run_raising(train, ranks, tmp_path / "out", str(disk / "run"), 2):
            assert kind == "FleetError" and "the file system is read-only: choose another output directory" in message
        # What is there can still be read from a run directory elsewhere.
        shutil.copytree(disk / "run/checkpoints", tmp_path / "elsewhere/checkpoints", symlinks=True)
        assert run(train, 1, tmp_path / "out", str(tmp_path / "elsewhere"), 2)[0]["started"] == 4


def without_rights(directory):
    """As an ordinary user, for root may write anywhere."""
    import ppfleet.job  # while the interpreter's files can still be read

    root = os.geteuid() == 0
    if root and ppfleet.job:
        os.seteuid(65534)
    try:
        return train(directory, 1)
    finally:
        if root:
            os.seteuid(0)


def test_directory_without_permission(tmp_path):
    with tempfile.TemporaryDirectory() as locked:
        Path(locked).chmod(0o555)
        ((kind, message),) = run_raising(without_rights, 1, tmp_path / "out", f"{locked}/run")
    assert kind == "FleetError" and "/run: no permission to write there" in message


def truncate(path):
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])


def alter(path):
    data = bytearray((path / "optimizer.safetensors").read_bytes())
    data[-1] ^= 0x40
    (path / "optimizer.safetensors").write_bytes(data)


def remove(path):
    (path / "state.json").unlink()


DAMAGES = {
    truncate: "model.safetensors is truncated or altered",
    alter: "optimizer.safetensors is altered: its SHA-256 is not the manifest's",
    remove: "state.json is missing",
}


@pytest.mark.parametrize(
    ("ranks", "damage"),
    [
        *((1, damage) for damage in DAMAGES),
        (2, truncate),
        *(pytest.param(2, damage, marks=pytest.mark.slow) for damage in (alter, remove)),
    ],
)
def test_a_damaged_file_is_named_and_training_goes_on_from_the_earlier_one(tmp_path, ranks, damage):
    whole = run(train, ranks, tmp_path / "out", str(tmp_path / "whole"), 3)
    run(train, ranks, tmp_path / "out", str(tmp_path / "run"), 2)
    damage((tmp_path / "run/checkpoints/latest").resolve())
    resumed = run(train, ranks, tmp_path / "out", str(tmp_path / "run"), 3)
    assert resumed[0]["started"] == 4
    assert resumed[0]["weights"] == whole[0]["weights"]
    said = [line for line in (tmp_path / "run/logs/rank0.log").read_text().splitlines() if "skipped" in line]
    assert len(said) == 1 and "000002-step-8" in said[0] and DAMAGES[damage] in said[0], said


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_architecture(tmp_path, ranks):
    run(train, ranks, tmp_path / "out", str(tmp_path / "run"), 1)
    for kind, message in run_raising(train, ranks, tmp_path / "out", str(tmp_path / "run"), 2, 24):
        assert kind == "CheckpointError", message
        assert "model.safetensors is for a different architecture" in message and "Nothing was loaded" in message
        assert "0.weight has shape [16, 16], the model's [16, 24]" in message
    for kind, message in run_raising(train, ranks, tmp_path / "out", str(tmp_path / "run"), 2, 16, True):
        assert (
            kind == "CheckpointError"
            and "optimizer.safetensors was written by a different optimizer than SGD" in message
        )
    assert run(train, ranks, tmp_path / "out", str(tmp_path / "run"), 2)[0]["started"] == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_seed(tmp_path, ranks):
    run(train, ranks, tmp_path / "out", str(tmp_path / "run"), 1)
    for kind, message in run_raising(train_with_seed_2, ranks, tmp_path / "out", str(tmp_path / "run")):
        assert kind == "CheckpointError" and "was trained with seed=1, not 2" in message


def train_with_seed_2(directory):
    return train(directory, 2, seed=2)


def test_a_second_job_in_the_same_directory_is_refused(tmp_path):
    ends = run(two_jobs, 1, tmp_path / "out", str(tmp_path / "run"))
    code, message, has_record, code_after = ends[0]
    assert has_record  # a start that is refused removes no records of the job that runs
    assert code == 1 and message.startswith("ppfleet.errors.FleetError: another job is writing to"), message
    assert code_after == 0


def two_jobs(directory):
    import sys

    import ppfleet
    from ppfleet.watchdog import recorder

    job = ppfleet.Job(directory, device=DEVICE)
    for number in range(recorder.KEPT):  # as so many refused starts would leave them
        (job.flight.path.parent / f"9{number:012d}-rank0.ring").touch()
    code = f"import ppfleet; ppfleet.Job({directory!r}, device='cpu')"
    refused = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    has_record = job.flight.path.exists()
    job.close()
    allowed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message = (refused.stderr.strip().splitlines() or [""])[-1]
    return [refused.returncode, message, has_record, allowed.returncode]
