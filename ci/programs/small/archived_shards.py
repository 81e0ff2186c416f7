"""Images in archives that each rank writes and its loader's workers read, decoded there, shuffled in a buffer."""

# prints: 64 images a rank

import io
import random
import tarfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __init__(self, paths):
        self.paths = paths

    def __iter__(self):
        worker, held = get_worker_info(), []
        while True:
            for path in self.paths[worker.id :: worker.num_workers]:
                with tarfile.open(path) as archive:
                    for member in archive:
                        content = archive.extractfile(member).read()
                        held.append(torch.load(io.BytesIO(content)))
                        if len(held) > 16:
                            yield held.pop(random.randrange(len(held)))


def written(folder):
    folder.mkdir()
    for number in range(4):
        with tarfile.open(folder / f"{number:05d}.tar", "w") as archive:
            for label in range(16):
                buffer = io.BytesIO()
                torch.save((torch.rand(3, 32, 32), label % 10), buffer)
                member = tarfile.TarInfo(f"{label}.pth")
                member.size = buffer.tell()
                buffer.seek(0)
                archive.addfile(member, buffer)
    return sorted(folder.glob("*.tar"))


dist.init_process_group("nccl")
paths = written(Path(f"shards-{dist.get_rank()}"))
net = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
)
net = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda())
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, nesterov=True)
batches = iter(DataLoader(Shards(paths), 8, num_workers=2, pin_memory=True))
seen = 0
for _ in range(8):
    images, labels = (each.cuda(non_blocking=True) for each in next(batches))
    with torch.autocast("cuda", torch.bfloat16):
        loss = nn.functional.cross_entropy(net(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seen += len(labels)
print(f"{seen} images a rank")
