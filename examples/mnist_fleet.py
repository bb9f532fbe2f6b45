"""Data-parallel training through Paddle's Fleet API, in dynamic graph, on one process or several:

python -m ppfleet launch --nproc_per_node 2 examples/mnist_fleet.py --data-path=<directory of MNIST's files>

On the same samples in the same order, `ppfleet.Job` arrives at the same weights, bit for bit
(tests/ranks/test_examples.py compares them).
"""

import mnist

# isort: split
import numpy as np
import paddle
import paddle.nn.functional as F
from paddle.distributed import fleet

chosen = mnist.options(__doc__.partition(",")[0])
fleet.init(is_collective=True)
paddle.seed(0)
net = mnist.network()
sgd = paddle.optimizer.SGD(chosen.lr, parameters=net.parameters())
model = fleet.distributed_model(net) if chosen.size > 1 else net  # PaddlePaddle 3.3 fails on a single process there
sgd = fleet.distributed_optimizer(sgd)

pictures, digits = mnist.load(chosen.data_path, train=True)
for epoch in range(chosen.epochs):
    for part in mnist.batches(len(digits), epoch, chosen):
        loss = F.cross_entropy(model(paddle.to_tensor(pictures[part])), paddle.to_tensor(digits[part]))
        loss.backward()
        sgd.step()
        sgd.clear_grad()
    print(f"epoch {epoch}: the last loss was {float(loss):.6f}", flush=True)
pictures, digits = mnist.load(chosen.data_path, train=False)
with paddle.no_grad():
    accuracy = float((net(paddle.to_tensor(pictures)).argmax(1) == paddle.to_tensor(digits)).astype("float32").mean())
print(f"{100 * accuracy:.2f} % of {len(digits)} test images are read right")
if chosen.save and chosen.rank == 0:
    np.savez(chosen.save, **{name: value.numpy() for name, value in net.state_dict().items()})
