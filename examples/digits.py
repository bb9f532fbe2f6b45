"""Handwritten digits, the whole way: training that resumes, exact evaluation, checkpoints, an exported model."""

import argparse

from model import Digits, network

# isort: split
import paddle
import paddle.nn.functional as F

import ppfleet
from ppfleet import metrics

GLOBAL_BATCH = 32


def main(arguments):
    job = ppfleet.Job(arguments.output_dir, device=arguments.device, seed=arguments.seed)
    net = network()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=arguments.epochs)
    sgd = paddle.optimizer.Momentum(rate, parameters=net.parameters(), weight_decay=1e-4)
    net, sgd = job.prepare(net, sgd)
    job.settings["lr_rule"] = f"0.05 at a global batch of {GLOBAL_BATCH}, cosine over {arguments.epochs} epochs"
    train = job.loader(Digits(train=True), GLOBAL_BATCH // job.world.size, shuffle=True, workers=arguments.workers)
    val = job.loader(Digits(train=False), batch_size=64)

    job.resume(arguments.resume)
    for _ in job.epochs(arguments.epochs):
        for images, labels in job.steps(train):
            job.backward(F.cross_entropy(net(images), labels))
        rate.step()
        job.save(**job.evaluate(net, val, top1=metrics.top1, loss=metrics.cross_entropy))
    job.export(net, [None, 1, 8, 8], classes=[str(digit) for digit in range(10)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="output/digits", help="where the run is kept (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or gpu (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training set (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that load data, a rank (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="decides weights, order, dropout (default: %(default)s)")
    parser.add_argument(
        "--resume", default="auto", help="auto, none or a checkpoint's directory (default: %(default)s)"
    )
    main(parser.parse_args())
