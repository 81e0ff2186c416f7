"""A recommendation model with sharded embedding tables, as torchrec's documentation trains it."""

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper

ROWS, SAMPLES, WIDTH = 100_000, 256, 64
FEATURES = [f"feature{number}" for number in range(8)]
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
tables = [
    EmbeddingBagConfig(name=f"of_{name}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[name])
    for name in FEATURES
]
bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
dlrm = DLRM(bags, 13, dense_arch_layer_sizes=[128, WIDTH], over_arch_layer_sizes=[64, 1], dense_device=device)
apply_optimizer_in_backward(torch.optim.SGD, dlrm.sparse_arch.parameters(), {"lr": 0.01})
model = DistributedModelParallel(DLRMTrain(dlrm), device=device)
optimizer = KeyedOptimizerWrapper(
    dict(model.named_parameters()), lambda parameters: torch.optim.SGD(parameters, lr=0.01)
)


def batches() -> Iterator[Batch]:
    """Yield batches with one random row of each table in each sample."""
    count = SAMPLES * len(FEATURES)
    for _ in range(12):
        rows = KeyedJaggedTensor(
            FEATURES, torch.randint(0, ROWS, (count,)), lengths=torch.ones(count, dtype=torch.int64)
        )
        yield Batch(torch.rand(SAMPLES, 13), rows, torch.randint(0, 2, (SAMPLES,)))


for batch in batches():
    optimizer.zero_grad()
    loss, _ = model(batch.to(device))
    loss.backward()
    optimizer.step()
