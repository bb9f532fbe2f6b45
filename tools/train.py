"""Train MobileNetV3-small on an image folder: alone, on all cards of a machine, or on many machines.

python tools/train.py --data-path=lite_data
python -m paddle.distributed.launch --nproc_per_node 2 tools/train.py --device=cpu --data-path=lite_data
python -m paddle.distributed.launch --ips 192.168.0.1,192.168.0.2 --gpus 0,1 tools/train.py --data-path=lite_data
"""

from __future__ import annotations

import os
import sys
import warnings
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for models/ and deploy/, which pip does not install
for message in ("No ccache found", "When training, we now always track"):  # Paddle says them at every start
    warnings.filterwarnings("ignore", message=message)
import common

import ppfleet
from deploy.inference_python import preprocess
from models.mobilenet_v3_small import data, pictures, recipe
from models.mobilenet_v3_small.augment import STEPS
from models.mobilenet_v3_small.net import MobileNetV3Small, load_weights
from ppfleet import cli, log
from ppfleet.cli import number
from ppfleet.errors import FleetError


def train(o: Namespace) -> None:
    job = ppfleet.Job(
        o.output_dir or f"output/{common.MODEL}",
        device=o.device,
        seed=o.seed,
        accumulate=o.accumulate,
        amp=o.amp_level,
        on_nan=o.on_nan,
        save_every=o.save_every,
        existing="move" if o.resume == "none" else "refuse",
    )
    files = find_files(job, o)
    how = preprocess.settings(o.image_size or 224)
    on_card = job.device != "cpu"  # which then normalises the images
    train = loader(job, o, data.Images(files.train, how, o.crop, o.augment, on_card), shuffle=True)
    val = loader(job, o, data.Images(files.val, how, pixels=on_card))
    net = MobileNetV3Small(len(files.classes))
    if o.pretrained:
        load_weights(net, o.pretrained, partial=True)
    rate = recipe.Schedule(o.lr, train.plan.global_batch * o.accumulate, o.epochs, len(train))
    net, optimizer = job.prepare(net, recipe.optimizer(net, rate), fast_cpu=o.fast_cpu)
    job.settings.update(lr_rule=rate.rule, data=describe(files), **options_used(o))
    job.card = {"model": o.model, "classes": files.classes, "preprocess": how}
    job.resume(o.resume)
    for epoch in job.epochs(o.epochs):
        for images, labels in job.steps(train):
            if job.world.first and epoch == 0 and train.position == train.plan.global_batch:
                job.board.picture("input", pictures.inputs(images, how))
            rate.follow(epoch, train)
            job.backward(recipe.loss(net, images, labels, o.mixup))
        seen = ppfleet.Confusion(val, files.classes)
        job.save(**job.evaluate(net, val, top1=seen, **recipe.MEASURED))  # type: ignore[arg-type]
        show(job, seen, files.val, o.data_path, f"step {job.step}", last=epoch + 1 == o.epochs)
    best = f", best.pdparams (top1 {job.best:.6f})" if job.best is not None else ""
    if job.world.first and (job.directory / "latest.pdparams").exists():
        log.info(f"trained: {job.directory}/latest.pdparams{best}")


def evaluate(o: Namespace) -> None:
    if not o.pretrained:
        raise FleetError("--pretrained=<run>/latest.pdparams is required")
    card = common.card(o.pretrained)
    output = Path(o.output_dir or common.run_directory(o.pretrained))
    job = ppfleet.Job(output / "eval", device=o.device, seed=o.seed)
    files = find_files(job, o, card.get("classes"))
    how = common.preprocessing(o, card, log.info)
    net = MobileNetV3Small(len(files.classes))
    load_weights(net, o.pretrained)
    mine = {"weights": ppfleet.fingerprint(net), "preprocess": how, "batch_size": o.batch_size, **describe(files)}
    job.comm.check_same("weights or data", mine)
    val = loader(job, o, data.Images(files.val, how, pixels=job.device != "cpu"))
    seen = ppfleet.Confusion(val, files.classes)
    scores = job.evaluate(net, val, top1=seen, **recipe.MEASURED)
    show(job, seen, files.val, o.data_path, o.pretrained)
    results = {**scores, "weights": o.pretrained, "data": {"path": o.data_path, **describe(files)}}
    job.write_json(output / "eval.json", results)
    if job.world.first:
        print(f"top1: {scores['top1']:.6f} top5: {scores['top5']:.6f} samples: {scores['samples']}", flush=True)


def loader(job: ppfleet.Job, o: Namespace, images: data.Images, shuffle: bool = False) -> ppfleet.Loader:
    cores = (os.cpu_count() or 1) // job.world.local_size  # of this rank; the network computes on them, too
    workers = max(1, min(8, cores)) if o.workers is None else o.workers
    return job.loader(images, o.batch_size, shuffle=shuffle, workers=workers, on_device=images.normalised)


def find_files(job: ppfleet.Job, o: Namespace, classes: list[str] | None = None) -> data.Files:
    files = data.find(o.data_path, only_val=o.test_only, classes=classes)
    return data.without_unreadable(files, job, o.data_path) if o.skip_bad_images else files


def describe(files: data.Files) -> dict[str, Any]:
    """The data set, for settings.json and for the check that it is the same on all ranks."""
    sizes = {"classes": len(files.classes), "train": len(files.train), "val": len(files.val)}
    return {**sizes, "fingerprint": files.fingerprint}


def options_used(o: Namespace) -> dict[str, dict[str, Any]]:
    """The command line; what may differ from host to host is kept apart under "here"."""
    here = ("data_path", "output_dir", "pretrained", "workers")
    return {
        "options": {name: value for name, value in vars(o).items() if name not in here},
        "here": {name: value for name, value in vars(o).items() if name in here},
    }


def show(
    job: ppfleet.Job, seen: ppfleet.Confusion, val: list[data.Sample], root: str, of: str, last: bool = True
) -> None:
    """The confusion matrix: for `ppfleet report`, and at the end for VisualDL."""

    def sample(number: int) -> tuple[str, bytes]:
        path = val[number][0]
        return os.path.relpath(path, root), pictures.thumbnail(path)

    found = seen.gather(job.comm)
    found.write(job, of, sample)
    if job.world.first and last and (picture := pictures.confusion(found)) is not None:
        job.board.picture("confusion", picture, job.step)


def options(arguments: Sequence[str] | None = None) -> Namespace:
    parser = common.parser(__doc__)
    add = parser.add_argument
    add("--data-path", default="lite_data", metavar="DIR", help="train/<class>/ and val/<class>/, or list files")
    add("--output-dir", metavar="DIR", help=f"(default: output/{common.MODEL}; for evaluation the run of the weights)")
    add("--device", default="auto", help="auto, cpu or gpu")
    parser.switch("--use-gpu", "True is --device=gpu, False is --device=cpu", default=None)
    add("--epochs", type=number(int, 1), default=90, help="passes over the training set")
    add("--batch-size", type=number(int, 1), default=64, help="images per batch and rank")
    add("--accumulate", type=number(int, 1), default=1, help="batches per optimizer step")
    add(
        "--lr",
        type=number(float, 0),
        default=recipe.REFERENCE_LR,
        help=f"for a global batch of {recipe.REFERENCE_BATCH}",
    )
    add("--crop", type=number(float, 0.01, 1), default=0.08, help="smallest share of an image that a random crop keeps")
    add("--augment", type=steps, default="flip", metavar="STEPS", help=f"none, or a list of {', '.join(STEPS)}")
    add("--mixup", type=number(float, 0), default=0.0, help="strength of mixup, such as 0.2; 0: off")
    add("--amp-level", choices=["O0", "O1", "O2"], default="O0", help="mixed precision in training, on cards")
    add(
        "--on-nan",
        choices=["stop", "skip"],
        default="stop",
        help="when a loss or gradient is not finite: stop, or skip the step",
    )
    add("--seed", type=int, default=0, help="decides initial weights, order, augmentation, dropout")
    add("--workers", type=number(int, 0), help="threads per rank that load images (default: by the number of cores)")
    add(
        "--resume",
        default="auto",
        help="auto: continue if there is a checkpoint; none: from scratch, a run in the directory is moved to "
        "previous-1; or a checkpoint's directory",
    )
    add("--save-every", type=number(int, 0), default=500, help="steps between checkpoints within an epoch; 0: none")
    parser.switch("--fast-cpu", "on a CPU, use ppfleet's own operators", default=True)
    parser.switch("--skip-bad-images", "find unreadable images first and leave them out")
    parser.switch("--test-only", "evaluate --pretrained instead of training")
    o = parser.parse_args(arguments)
    if o.use_gpu is not None:
        wanted = "gpu" if o.use_gpu else "cpu"
        if o.device not in ("auto", wanted):
            parser.error(f"--use-gpu={o.use_gpu} and --device={o.device} contradict each other")
        o.device = wanted
    return o


def steps(text: str) -> list[str]:
    chosen = [] if text == "none" else text.split(",")
    if not set(chosen) <= set(STEPS):
        raise ArgumentTypeError(f"expected none or a list of {', '.join(STEPS)}, got {text!r}")
    return chosen


def main(arguments: Sequence[str] | None = None) -> None:
    o = options(arguments)
    evaluate(o) if o.test_only else train(o)


if __name__ == "__main__":
    cli.run(main)
