"""The data and the network that the examples share: scikit-learn's 1797 handwritten digits of 8x8 pixels."""

from sklearn.datasets import load_digits  # before Paddle: after it, this import crashes with Paddle 2.6

# isort: split
import paddle
from paddle import nn


class Digits(paddle.io.Dataset):
    """Every fifth digit is for evaluation, the others are for training."""

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
