"""A run written by version 0.1.0 (commit 7368823) is read: resumed to the weights it would have ended with, and shown.

tests/data/run-0.1.0.tar.gz holds a run directory that was stopped at step 13 of 24, in the middle of its second epoch;
run-0.1.0-final.npz the weights with which that commit ends it. On one machine they are the same to the bit, but other
processors round differently. The bias before BatchNorm has a gradient of nothing but rounding, so it is left out, and
with it the running mean.
"""

import tarfile

import numpy as np
import pytest

from ppfleet.commands.report import command as report
from ppfleet.commands.why import command as why
from tests.harness import ROOT, run

ROUNDING_ONLY = {"0.bias", "1._mean"}


@pytest.fixture
def old_run(tmp_path):
    with tarfile.open(ROOT / "tests/data/run-0.1.0.tar.gz") as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return tmp_path / "run"


def go_on(path):
    """The script that wrote it."""
    import paddle
    import paddle.nn.functional as F

    import ppfleet
    from ppfleet import metrics
    from tests import blocks

    job = ppfleet.Job(path, device="cpu", seed=3, keep=1, save_every=3, log_every=5)
    net = blocks.with_batch_norm()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.02, T_max=10)
    wrapped, _ = job.prepare(net, paddle.optimizer.AdamW(rate, parameters=net.parameters()))
    job.card = {"classes": [str(i) for i in range(10)]}
    train, val = job.loader(blocks.Points(128), 16, shuffle=True), job.loader(blocks.Points(100), 16)
    resumed, started, best = job.resume(), job.step, job.best
    for _ in job.epochs(3):
        for points, labels in job.steps(train):
            job.backward(F.cross_entropy(wrapped(points), labels))
        rate.step()
        job.save(**job.evaluate(wrapped, val, top1=metrics.top1))
    return [resumed, started, best, job.step, {name: value.tolist() for name, value in net.state_dict().items()}]


def test_it_is_resumed_to_the_same_weights(tmp_path, old_run):
    ((resumed, started, best, step, weights),) = run(go_on, 1, tmp_path / "out", str(old_run))
    assert resumed and started == 13 and best is not None and step == 24
    expected = np.load(ROOT / "tests/data/run-0.1.0-final.npz")
    assert set(weights) == set(expected.files)
    for name in set(weights) - ROUNDING_ONLY:  # moments or samples that are off by a little make 5e-3 and more
        error = np.abs(np.array(weights[name]) - expected[name]).max() / np.abs(expected[name]).max()
        assert error < 1e-4, (name, error)


def test_its_records_are_read(old_run, capsys):
    assert report.main([str(old_run)]) == 0
    page = (old_run / "report.html").read_text()
    assert "step 13" in page and "top1" in page
    assert why.main([str(old_run)]) in (0, 1)
    assert "rank 0" in capsys.readouterr().out
