"""Data-parallel training in static graph, on one process or several:

python -m ppfleet launch --nproc_per_node 2 examples/mnist_static.py --data-path=<directory of MNIST's files>

Cards with PaddlePaddle 2.6 take `fleet.distributed_optimizer`; nobody could run that branch here. Elsewhere that fails
(on a CPU in every version, with PaddlePaddle 3 before it comes to the device), so gradients are summed by an explicit
all-reduce.
"""

import mnist

# isort: split
import os

import numpy as np
import paddle
import paddle.distributed as dist
from paddle import nn, static
from paddle.distributed import fleet

chosen = mnist.options(__doc__.partition(",")[0])
cards = paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() > 0
place = paddle.CUDAPlace(dist.ParallelEnv().device_id) if cards else paddle.CPUPlace()
old = paddle.__version__.startswith("2.")
by_fleet = cards and old
how = "fleet.distributed_optimizer" if by_fleet else "an explicit all-reduce of gradients"
print(f"static graph, process {chosen.rank} of {chosen.size} on {place}: {how if chosen.size > 1 else 'alone'}")

if by_fleet:
    paddle.enable_static()
    fleet.init(is_collective=True)
elif chosen.size > 1 and old:
    dist.gloo_init_parallel_env(chosen.rank, chosen.size, os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")[0])
elif chosen.size > 1:
    dist.init_parallel_env()
paddle.enable_static()
paddle.seed(0)  # the same weights on every process


def forward():
    """Loss and accuracy, in the current program."""
    images, labels = static.data("images", [None, 784], "float32"), static.data("labels", [None, 1], "int64")
    scores = mnist.network()(images)
    return nn.functional.cross_entropy(scores, labels), paddle.metric.accuracy(scores, labels)


train, test, start = static.Program(), static.Program(), static.Program()
with static.program_guard(test, static.Program()):
    _, right = forward()
with static.program_guard(train, start):
    loss, _ = forward()
    sgd = paddle.optimizer.SGD(chosen.lr)
    if by_fleet:
        fleet.distributed_optimizer(sgd).minimize(loss)
    else:
        gradients = sgd.backward(loss)
        if chosen.size > 1:
            for _, gradient in gradients:
                dist.all_reduce(gradient)
            gradients = [(weight, gradient / chosen.size) for weight, gradient in gradients]
        sgd.apply_gradients(gradients)
    if chosen.size > 1:
        dist.all_reduce(loss)
    mean = loss / chosen.size

executor = static.Executor(place)
executor.run(start)
pictures, digits = mnist.load(chosen.data_path, train=True)
losses = []
for epoch in range(chosen.epochs):
    before = len(losses)
    for part in mnist.batches(len(digits), epoch, chosen):
        feed = {"images": pictures[part], "labels": digits[part, None]}
        losses.append(float(np.mean(executor.run(train, feed, [mean])[0])))
    print(f"epoch {epoch}: the mean loss was {np.mean(losses[before:]):.6f}", flush=True)
pictures, digits = mnist.load(chosen.data_path, train=False)
accuracy = float(np.mean(executor.run(test, {"images": pictures, "labels": digits[:, None]}, [right])[0]))
print(f"{100 * accuracy:.2f} % of {len(digits)} test images are read right")
if chosen.save and chosen.rank == 0:
    np.savez(chosen.save, losses=losses, accuracy=accuracy)
