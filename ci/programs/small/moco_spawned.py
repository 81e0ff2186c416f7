"""Momentum contrast: processes are spawned, a target that forward averages, a queue, shuffles among ranks."""

import argparse
import builtins
import math

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("-b", "--batch-size", default=128, type=int)
parser.add_argument("--lr", default=0.03, type=float)
parser.add_argument("--dist-url", default="tcp://localhost:10001")
parser.add_argument("--moco-k", default=1024, type=int)
parser.add_argument("--cos", action="store_true")


def conv_net(dim=64):
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, dim),
    )


@torch.no_grad()
def concat_all_gather(tensor):
    gathered = [torch.ones_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor, async_op=False)
    return torch.cat(gathered, dim=0)


class MoCo(nn.Module):
    def __init__(self, dim=64, K=1024, m=0.999, T=0.07):
        super().__init__()
        self.K, self.m, self.T = K, m, T
        self.encoder_q, self.encoder_k = conv_net(dim), conv_net(dim)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=False):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(dim, K), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def _momentum_update(self):
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=False):
            k.data = k.data * self.m + q.data * (1.0 - self.m)

    @torch.no_grad()
    def _dequeue_and_enqueue(self, keys):
        keys = concat_all_gather(keys)
        batch_size = keys.shape[0]
        ptr = int(self.queue_ptr)
        assert self.K % batch_size == 0
        self.queue[:, ptr : ptr + batch_size] = keys.T
        self.queue_ptr[0] = (ptr + batch_size) % self.K

    @torch.no_grad()
    def _batch_shuffle_ddp(self, x):
        n = x.shape[0]
        x_gather = concat_all_gather(x)
        all_n = x_gather.shape[0]
        idx = torch.randperm(all_n).cuda()
        dist.broadcast(idx, src=0)
        unshuffle = torch.argsort(idx)
        this = idx.view(all_n // n, -1)[dist.get_rank()]
        return x_gather[this], unshuffle

    @torch.no_grad()
    def _batch_unshuffle_ddp(self, x, unshuffle):
        n = x.shape[0]
        x_gather = concat_all_gather(x)
        return x_gather[unshuffle.view(x_gather.shape[0] // n, -1)[dist.get_rank()]]

    def forward(self, im_q, im_k):
        q = nn.functional.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update()
            im_k, un = self._batch_shuffle_ddp(im_k)
            k = nn.functional.normalize(self.encoder_k(im_k), dim=1)
            k = self._batch_unshuffle_ddp(k, un)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        labels = torch.zeros(logits.shape[0], dtype=torch.long).cuda()
        self._dequeue_and_enqueue(k)
        return logits, labels


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [
            correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk
        ]


def main_worker(gpu, ngpus, args):
    if gpu != 0:

        def print_pass(*a):
            pass

        builtins.print = print_pass
    dist.init_process_group("nccl", init_method=args.dist_url, world_size=ngpus, rank=gpu)
    torch.cuda.set_device(gpu)
    model = MoCo(K=args.moco_k).cuda(gpu)
    args.batch_size = int(args.batch_size / ngpus)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    criterion = nn.CrossEntropyLoss().cuda(gpu)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    data = torch.utils.data.TensorDataset(torch.randn(1024, 3, 32, 32), torch.randn(1024, 3, 32, 32))
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(
        data, args.batch_size, sampler=sampler, num_workers=0, pin_memory=True, drop_last=True
    )
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        lr = args.lr * 0.5 * (1 + math.cos(math.pi * epoch / args.epochs))
        for g in optimizer.param_groups:
            g["lr"] = lr
        for i, images in enumerate(loader):
            images = [im.cuda(gpu, non_blocking=True) for im in images]
            output, target = model(im_q=images[0], im_k=images[1])
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 4 == 0:
                print(f"[{epoch}][{i}] loss {loss.item():.4f} acc1 {acc1[0]:.2f} acc5 {acc5[0]:.2f}")
        if gpu == 0:
            torch.save(
                {"epoch": epoch + 1, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict()},
                f"checkpoint_{epoch:04d}.pth.tar",
            )


def main():
    args = parser.parse_args()
    ngpus = torch.cuda.device_count()
    mp.spawn(main_worker, nprocs=ngpus, args=(ngpus, args))


if __name__ == "__main__":
    main()
