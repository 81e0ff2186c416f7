"""Detection with a Hungarian matching on the host (SciPy), boxes of differing counts, and assertions on values."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment


def box_cxcywh_to_xyxy(x):
    xc, yc, w, h = x.unbind(-1)
    return torch.stack([xc - 0.5 * w, yc - 0.5 * h, xc + 0.5 * w, yc + 0.5 * h], -1)


def giou(a, b):
    def area(t):
        return (t[:, 2] - t[:, 0]) * (t[:, 3] - t[:, 1])

    assert (a[:, 2:] >= a[:, :2]).all()
    lt, rb = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    union = area(a)[:, None] + area(b) - inter
    wh = (torch.max(a[:, None, 2:], b[:, 2:]) - torch.min(a[:, None, :2], b[:, :2])).clamp(min=0)
    c = wh[..., 0] * wh[..., 1]
    return inter / union - (c - union) / c


class Matcher(nn.Module):
    @torch.no_grad()
    def forward(self, outputs, targets):
        bs, nq = outputs["logits"].shape[:2]
        prob = outputs["logits"].flatten(0, 1).softmax(-1)
        box = outputs["boxes"].flatten(0, 1)
        ids = torch.cat([t["labels"] for t in targets])
        tb = torch.cat([t["boxes"] for t in targets])
        C = (
            5 * torch.cdist(box, tb, p=1)
            - prob[:, ids]
            - 2 * giou(box_cxcywh_to_xyxy(box), box_cxcywh_to_xyxy(tb))
        )
        C = C.view(bs, nq, -1).cpu()
        sizes = [len(t["boxes"]) for t in targets]
        idx = [linear_sum_assignment(c[i]) for i, c in enumerate(C.split(sizes, -1))]
        return [
            (torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in idx
        ]


class Criterion(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.classes, self.matcher = classes, Matcher()
        w = torch.ones(classes + 1)
        w[-1] = 0.1
        self.register_buffer("w", w)

    def forward(self, outputs, targets):
        indices = self.matcher(outputs, targets)
        n = sum(len(t["labels"]) for t in targets)
        n = torch.as_tensor([n], dtype=torch.float, device=outputs["logits"].device)
        dist.all_reduce(n)
        n = torch.clamp(n / dist.get_world_size(), min=1).item()
        bi = torch.cat([torch.full_like(s, i) for i, (s, _) in enumerate(indices)])
        si = torch.cat([s for s, _ in indices])
        tc_o = torch.cat([t["labels"][J] for t, (_, J) in zip(targets, indices, strict=False)])
        tc = torch.full(outputs["logits"].shape[:2], self.classes, dtype=torch.int64, device=tc_o.device)
        tc[(bi, si)] = tc_o
        ce = F.cross_entropy(outputs["logits"].transpose(1, 2), tc, self.w)
        sb = outputs["boxes"][(bi, si)]
        tb = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, indices, strict=False)])
        l1 = F.l1_loss(sb, tb, reduction="none").sum() / n
        gi = (1 - torch.diag(giou(box_cxcywh_to_xyxy(sb), box_cxcywh_to_xyxy(tb)))).sum() / n
        return {"ce": ce, "bbox": l1, "giou": gi}


class DETR(nn.Module):
    def __init__(self, classes=10, d=64, nq=20):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU(), nn.Conv2d(32, d, 3, 4, 1))
        self.tr = nn.Transformer(d, 4, 2, 2, 128, 0.0)
        self.cls, self.box = nn.Linear(d, classes + 1), nn.Linear(d, 4)
        self.q = nn.Parameter(torch.rand(nq, d))
        self.row, self.col = nn.Parameter(torch.rand(8, d // 2)), nn.Parameter(torch.rand(8, d // 2))

    def forward(self, x):
        h = self.backbone(x)
        H, W = h.shape[-2:]
        pos = (
            torch.cat(
                [self.col[:W].unsqueeze(0).repeat(H, 1, 1), self.row[:H].unsqueeze(1).repeat(1, W, 1)], -1
            )
            .flatten(0, 1)
            .unsqueeze(1)
        )
        h = self.tr(
            pos + h.flatten(2).permute(2, 0, 1), self.q.unsqueeze(1).repeat(1, x.shape[0], 1)
        ).transpose(0, 1)
        return {"logits": self.cls(h), "boxes": self.box(h).sigmoid()}


def reduce_dict(d):
    with torch.no_grad():
        names = sorted(d)
        v = torch.stack([d[k] for k in names])
        dist.all_reduce(v)
        v /= dist.get_world_size()
        return dict(zip(names, v, strict=False))


def main():
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    g = torch.Generator().manual_seed(dist.get_rank())
    model = nn.parallel.DistributedDataParallel(DETR().cuda(), device_ids=[local])
    crit = Criterion(10).cuda()
    opt = torch.optim.AdamW(
        [
            {"params": [p for n, p in model.named_parameters() if "backbone" not in n]},
            {"params": [p for n, p in model.named_parameters() if "backbone" in n], "lr": 1e-5},
        ],
        lr=1e-4,
    )
    sched = torch.optim.lr_scheduler.StepLR(opt, 5)
    for step in range(8):
        images = torch.randn(4, 3, 128, 128, generator=g).cuda()
        targets = []
        for _ in range(4):
            n = int(torch.randint(1, 6, (1,), generator=g))
            targets.append(
                {
                    "labels": torch.randint(0, 10, (n,), generator=g).cuda(),
                    "boxes": (torch.rand(n, 4, generator=g) * 0.4 + 0.2).cuda(),
                }
            )
        losses = crit(model(images), targets)
        w = {"ce": 1, "bbox": 5, "giou": 2}
        total = sum(losses[k] * w[k] for k in losses)
        red = reduce_dict(losses)
        opt.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        opt.step()
        sched.step()
        print({k: v.item() for k, v in red.items()})


if __name__ == "__main__":
    main()
