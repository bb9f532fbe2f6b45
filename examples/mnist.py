"""What the examples of Paddle's other ways to train share: handwritten digits of 28x28 pixels, a network, options.

`--data-path` is a directory with MNIST's four files; without it, scikit-learn's 1797 digits are enlarged.
"""

from sklearn.datasets import load_digits  # before Paddle: after it, this import crashes with Paddle 2.6

# isort: split
import argparse
import gzip
import os
from pathlib import Path

import numpy as np
from paddle import nn


def options(text, epochs=8, lr=0.2):
    """The command line that the examples share, and who this process is: `rank` of `size`."""
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--data-path", help="directory of MNIST's four idx files, .gz")
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--global-batch", type=int, default=100, help="samples a step, of all processes together")
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--save", help="write the losses and weights of the first process there, as .npz")
    chosen = parser.parse_args()
    chosen.rank = int(os.environ.get("PADDLE_TRAINER_ID", "0"))
    chosen.size = int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))
    if chosen.global_batch < 1 or chosen.global_batch % chosen.size:
        parser.error(f"--global-batch={chosen.global_batch} cannot be shared by {chosen.size} processes")
    if chosen.data_path and not Path(chosen.data_path, "train-images-idx3-ubyte.gz").is_file():
        parser.error(f"--data-path={chosen.data_path} holds no train-images-idx3-ubyte.gz")
    return chosen


def network():
    """For dynamic and static graph. Parameters have names, so that two programs can share them."""
    layers, inside = [], 784
    for number, outside in enumerate((128, 128, 10)):
        layers += [nn.Linear(inside, outside, f"weight{number}", f"bias{number}"), nn.Tanh()]
        inside = outside
    return nn.Sequential(*layers[:-1])


def load(path, train):
    """Images as rows of 784 numbers from 0 to 1, and labels."""
    if path:
        name = "train" if train else "t10k"
        images, labels = (_idx(Path(path, f"{name}-{kind}-ubyte.gz")) for kind in ("images-idx3", "labels-idx1"))
        return images.reshape(-1, 784).astype("float32") / 255, labels.astype("int64")
    images, labels = load_digits(return_X_y=True)
    chosen = (np.arange(len(labels)) % 5 != 0) == train
    large = np.kron(images[chosen].reshape(-1, 8, 8), np.ones((3, 3)))  # 24x24
    framed = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    return framed.reshape(-1, 784).astype("float32") / 16, labels[chosen].astype("int64")


def _idx(path):
    data = gzip.decompress(path.read_bytes())  # two zeros, the type (8: bytes), the number of dimensions, each of them
    shape = np.frombuffer(data, ">i4", count=data[3], offset=4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(shape)


def batches(count, epoch, chosen):
    """This process's part of each global batch. Those are the same, in the same order, on any number of processes."""
    order = np.random.RandomState(epoch).permutation(count)
    part = chosen.global_batch // chosen.size
    for start in range(0, count - chosen.global_batch + 1, chosen.global_batch):
        yield order[start + chosen.rank * part : start + (chosen.rank + 1) * part]
