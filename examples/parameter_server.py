"""Training with a parameter server in GEO mode: a worker trains some steps, then exchanges what has changed since.

python -m ppfleet launch --server_num=1 --worker_num=2 examples/parameter_server.py
python -m ppfleet launch --servers=192.168.0.1:6170 --workers=192.168.0.1,192.168.0.2 examples/parameter_server.py

The second one on each machine. It needs PaddlePaddle 2.6: the 3.x wheels for CPU have no parameter server. Without
launch, one process trains the same. GEO mode is for sparse embeddings (without one it exchanges nothing), so the model
is one: a row of ten scores for each pixel. An image is the list of its inked pixels, and their rows are added up.
"""

import mnist

# isort: split
import os
import sys

import numpy as np
import paddle
from paddle import nn, static
from paddle.distributed import fleet

chosen = mnist.options(__doc__.partition(":")[0], lr=0.08)
alone = "TRAINING_ROLE" not in os.environ
if not hasattr(paddle.base.core, "DistFleetWrapper"):
    sys.exit("this PaddlePaddle was built without the parameter server (the 3.x wheels for CPU are): take 2.6")
paddle.enable_static()


def check_mode(strategy):
    """Refuse what PaddlePaddle 2.6 accepts and cannot do: it would crash, learn nothing, or exchange nothing."""
    if not strategy.a_sync:
        problem = "parameter servers in sync mode (a_sync=False) crash in this PaddlePaddle"
    elif strategy.a_sync_configs["k_steps"] <= 0:
        problem = "parameter servers in async mode learn nothing through Executor.run in this PaddlePaddle"
    elif fleet.is_worker() and not any(operator.type == "send" for operator in loss.block.program.global_block().ops):
        problem = "parameter servers in GEO mode exchange nothing unless the model has a sparse embedding"
    else:
        return
    sys.exit(f"{problem}: use GEO mode (a_sync=True, k_steps) with a sparse embedding")


PAPER = 784  # stands for every pixel without ink; its row does not count
pixels, labels = static.data("pixels", [None, 784], "int64"), static.data("labels", [None, 1], "int64")
scores = nn.Embedding(785, 10, PAPER, sparse=True, weight_attr=nn.initializer.Constant(0.0))(pixels).sum(1)
loss, right = nn.functional.cross_entropy(scores, labels), paddle.metric.accuracy(scores, labels)
test = static.default_main_program().clone(for_test=True)
sgd = paddle.optimizer.SGD(chosen.lr / chosen.size)  # the server adds the changes of all workers, it takes no mean
if alone:
    sgd.minimize(loss)
else:
    strategy = fleet.DistributedStrategy()
    strategy.a_sync, strategy.a_sync_configs = True, {"k_steps": 4}  # exchanges every four steps
    fleet.init(strategy=strategy)
    fleet.distributed_optimizer(sgd).minimize(loss)
    check_mode(strategy)
    if fleet.is_server():
        fleet.init_server()
        fleet.run_server()
        sys.exit()


def wait_for_all():
    """Until every worker is here, through the server: `fleet.barrier_worker` returns at once unless gloo is set up."""
    if not alone:
        fleet.fleet._runtime_handle._worker.barrier(0)


def run(program, pictures, digits):
    """Mean loss and share of right answers, with the weights as this worker has them."""
    feed = {"pixels": np.where(pictures > 0.5, np.arange(784), PAPER), "labels": digits[:, None]}
    return [float(value) for value in executor.run(program, feed, [loss, right])]


def measure(pictures, digits):
    """The same of many images, some at a time."""
    parts = [slice(start, start + 1000) for start in range(0, len(digits), 1000)]
    results = [run(test, pictures[part], digits[part]) for part in parts]
    return np.average(results, axis=0, weights=[len(digits[part]) for part in parts])


train = static.default_main_program()  # not before minimize: Fleet has put another one there, which sends
executor = static.Executor(paddle.CPUPlace())
executor.run(static.default_startup_program())
if not alone:
    fleet.init_worker()
pictures, digits = mnist.load(chosen.data_path, train=True)
wait_for_all()  # the first worker has given the server its weights, and nobody runs ahead
losses = []
for epoch in range(chosen.epochs):
    before = len(losses)
    for part in mnist.batches(len(digits), epoch, chosen):
        losses.append(run(train, pictures[part], digits[part])[0])
    print(f"epoch {epoch}: the mean loss was {np.mean(losses[before:]):.6f}", flush=True)
wait_for_all()  # so that faster workers get the changes of the others
print(f"after {len(losses)} steps the loss of all {len(digits)} images is {measure(pictures, digits)[0]:.6f}")
pictures, digits = mnist.load(chosen.data_path, train=False)
accuracy = measure(pictures, digits)[1]
print(f"{100 * accuracy:.2f} % of {len(digits)} test images are read right")
if chosen.save and chosen.rank == 0:
    np.savez(chosen.save, losses=losses, accuracy=accuracy)
if not alone:
    fleet.stop_worker()
