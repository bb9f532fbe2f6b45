"""Handwritten digits on one device, in plain Paddle: what `digits.py` starts from."""

import argparse

from sklearn.datasets import load_digits  # before Paddle: after it, the import crashes with Paddle 2.6

# isort: split
import paddle
import paddle.nn.functional as F
from paddle import nn


class Digits(paddle.io.Dataset):
    """scikit-learn's 1797 digits of 8x8 pixels; every fifth is for evaluation."""

    def __init__(self, train):
        images, labels = load_digits(return_X_y=True)
        chosen = [i for i in range(len(labels)) if (i % 5 != 0) == train]
        self.images = (images[chosen].reshape(-1, 1, 8, 8) / 8 - 1).astype("float32")
        self.labels = labels[chosen].astype("int64")

    def __getitem__(self, index):
        return self.images[index], self.labels[index]

    def __len__(self):
        return len(self.labels)


def network():
    def block(inside, outside):
        return nn.Sequential(nn.Conv2D(inside, outside, 3, padding=1), nn.BatchNorm2D(outside), nn.ReLU())

    return nn.Sequential(block(1, 16), block(16, 32), nn.MaxPool2D(2), block(32, 32), nn.Flatten(), nn.Linear(512, 10))


def main(arguments):
    paddle.seed(arguments.seed)
    net = network()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(0.05, T_max=arguments.epochs)
    sgd = paddle.optimizer.Momentum(rate, parameters=net.parameters(), weight_decay=1e-4)
    train = paddle.io.DataLoader(Digits(train=True), batch_size=32, shuffle=True, drop_last=True)
    val = paddle.io.DataLoader(Digits(train=False), batch_size=32)

    for epoch in range(arguments.epochs):
        for images, labels in train:
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            sgd.step()
            sgd.clear_grad()
        rate.step()
        net.eval()
        with paddle.no_grad():
            right = sum(int((net(images).argmax(-1) == labels).sum()) for images, labels in val)
        net.train()
        print(f"epoch {epoch}: top1 {right / len(val.dataset):.4f}")
        paddle.save(net.state_dict(), f"{arguments.output_dir}/latest.pdparams")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", default="output/digits", help="where the run is kept (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=5, help="passes over the training set (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="decides weights and order (default: %(default)s)")
    main(parser.parse_args())
