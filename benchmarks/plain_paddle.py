"""The same network, images and recipe through plain Paddle, without ppfleet's loop: accuracy to compare with.

python -m paddle.distributed.launch --nproc_per_node 2 benchmarks/plain_paddle.py --data-path=… --epochs=15

Written as a careful user would: DataParallel, DistributedBatchSampler, evaluation of the whole set on rank 0.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np  # noqa: E402
import paddle  # noqa: E402
import paddle.distributed as dist  # noqa: E402
from paddle.io import DataLoader, DistributedBatchSampler  # noqa: E402

from deploy.inference_python import preprocess  # noqa: E402
from models.mobilenet_v3_small import data, recipe  # noqa: E402
from models.mobilenet_v3_small.net import MobileNetV3Small  # noqa: E402
from ppfleet import cli  # noqa: E402
from ppfleet.cli import Parser, number  # noqa: E402


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--data-path", required=True, help="train/<class>/ and val/<class>/")
    parser.add_argument("--epochs", type=number(int, 1), default=15, help="passes over the training set")
    parser.add_argument("--batch-size", type=number(int, 1), default=32, help="images a rank")
    parser.add_argument("--image-size", type=number(int, 32), default=64, help="pixels")
    parser.add_argument("--crop", type=number(float, 0.01, 1), default=0.08, help="least share that a crop keeps")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order and augmentation")
    o = parser.parse_args()
    paddle.set_device("cpu")
    dist.init_parallel_env()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    paddle.seed(o.seed)
    random.seed(1000 * o.seed + rank)
    files, how = data.find(o.data_path), preprocess.settings(o.image_size)
    train_set = data.Images(files.train, how, o.crop, ["flip"])
    sampler = DistributedBatchSampler(train_set, o.batch_size, shuffle=True, drop_last=True)
    train = DataLoader(train_set, batch_sampler=sampler, num_workers=0)
    val = DataLoader(data.Images(files.val, how), batch_size=64, num_workers=0)
    net = MobileNetV3Small(len(files.classes))
    rate = recipe.Schedule(recipe.REFERENCE_LR, o.batch_size * ranks, o.epochs, len(train))
    optimizer = recipe.optimizer(net, rate)
    model = paddle.DataParallel(net) if ranks > 1 else net
    for epoch in range(o.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train:
            recipe.loss(model, images, labels).backward()
            optimizer.step()
            optimizer.clear_grad()
            rate.step()
    if rank == 0:
        net.eval()
        with paddle.no_grad():
            right = [np.asarray(net(images)).argmax(-1) == np.asarray(labels) for images, labels in val]
        print(f"plain Paddle, {ranks} rank(s), seed {o.seed}: top1: {np.concatenate(right).mean():.6f}", flush=True)


if __name__ == "__main__":
    cli.run(main)
