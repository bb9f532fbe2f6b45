"""Training with a parameter server: workers send it gradients, it changes the weights, and they fetch them again.

python -m ppfleet launch --server_num=1 --worker_num=2 examples/parameter_server.py
python -m ppfleet launch --servers=192.168.0.1:6170 --workers=192.168.0.1,192.168.0.2 examples/parameter_server.py

The second one on each machine. It needs PaddlePaddle 2.6: the 3.x wheels for CPU have no parameter server. Async mode
with `train_from_dataset` is the one way in which 2.6 exchanges ordinary layers: GEO mode exchanges embeddings only.
"""

import mnist

# isort: split
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import paddle
from paddle import nn, static
from paddle.distributed import QueueDataset, fleet

# Small steps: a worker goes on with the weights that it has, and its gradients are of older ones than the server's.
chosen = mnist.options(__doc__.partition(":")[0], epochs=80, lr=0.02)
if not hasattr(paddle.base.core, "DistFleetWrapper"):
    sys.exit("this PaddlePaddle was built without the parameter server (the 3.x wheels for CPU are): take 2.6")
if "TRAINING_ROLE" not in os.environ:
    sys.exit("this is for a server and workers: python -m ppfleet launch --server_num=1 --worker_num=2 …")
paddle.enable_static()
paddle.seed(0)
strategy = fleet.DistributedStrategy()
strategy.a_sync = True
fleet.init(strategy=strategy)

images, labels = static.data("images", [None, 784], "float32"), static.data("labels", [None, 1], "int64")
loss = nn.functional.cross_entropy(mnist.network()(images), labels)
sgd = paddle.optimizer.SGD(chosen.lr / chosen.size)  # each worker's part of a global batch is a step of its own
fleet.distributed_optimizer(sgd).minimize(loss)
program = static.default_main_program()

if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
    sys.exit()


def measure(pictures, digits):
    """Loss and share of right answers, with the weights as this worker has them. In NumPy: Executor.run between two
    calls of train_from_dataset crashes now and then."""
    values = pictures
    for number in range(3):
        weight, bias = (
            np.array(static.global_scope().find_var(f"{name}{number}").get_tensor()) for name in ("weight", "bias")
        )
        values = (np.tanh(values) if number else values) @ weight + bias
    values = values - values.max(1, keepdims=True)
    losses = np.log(np.exp(values).sum(1)) - values[np.arange(len(digits)), digits]
    return losses.mean(), (values.argmax(1) == digits).mean()


executor = static.Executor(paddle.CPUPlace())
executor.run(static.default_startup_program())
fleet.init_worker()
pictures, digits = mnist.load(chosen.data_path, train=True)
lines = [f"784 {' '.join(f'{v:.4g}' for v in row)} 1 {digit}\n" for row, digit in zip(pictures.tolist(), digits)]
with tempfile.TemporaryDirectory() as directory:
    file = Path(directory, "part.txt")  # Paddle's data sets read text: the number of values, and the values
    data = QueueDataset()
    part_size = chosen.global_batch // chosen.size
    data.init(use_var=[images, labels], pipe_command="cat", batch_size=part_size, thread_num=1)
    data.set_filelist([str(file)])
    for epoch in range(chosen.epochs):
        with file.open("w") as out:
            for part in mnist.batches(len(digits), epoch, chosen):
                out.writelines(lines[number] for number in part)
        executor.train_from_dataset(program, data)
        print(f"epoch {epoch}: the loss is {measure(pictures, digits)[0]:.6f}", flush=True)
pictures, digits = mnist.load(chosen.data_path, train=False)
print(f"{100 * measure(pictures, digits)[1]:.2f} % of {len(digits)} test images are read right")
fleet.stop_worker()
