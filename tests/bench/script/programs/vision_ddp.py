"""A convolutional network under DDP: channels last, SyncBatchNorm, label smoothing, mixup, SWA, SGD with warm-up."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn


def stage(inner, outer, stride):
    return nn.Sequential(
        nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(inplace=True)
    )


dist.init_process_group("nccl")
torch.backends.cudnn.benchmark = True
network = nn.Sequential(
    stage(3, 32, 2), stage(32, 64, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
)
network = nn.SyncBatchNorm.convert_sync_batchnorm(network).to("cuda", memory_format=torch.channels_last)
model = DDP(network, device_ids=[0], broadcast_buffers=False, bucket_cap_mb=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
averaged, swa = AveragedModel(network), SWALR(optimizer, swa_lr=0.05)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
beta = torch.distributions.Beta(0.2, 0.2)
images = [torch.randn(16, 3, 32, 32) for _ in range(2)]
for step in range(8):
    x = images[step % 2].to("cuda", memory_format=torch.channels_last, non_blocking=True)
    y, part = torch.randint(0, 10, (16,), device="cuda"), beta.sample().item()
    order = torch.randperm(16, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(part * x + (1 - part) * x[order])
        loss = part * criterion(out, y) + (1 - part) * criterion(out, y[order])
    loss.backward()
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    averaged.update_parameters(network)
    swa.step()
    top = out.topk(5, dim=1).indices.eq(y[:, None]).any(1).float().mean()
update_bn((image.cuda() for image in images), averaged, device="cuda")
dist.all_reduce(top, op=dist.ReduceOp.AVG)
print(top.item())
