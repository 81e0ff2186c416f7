"""Image classification under DDP by the parts of timm's own script: its loader, which normalises on the GPU,
mixup, AMP with its scaler, an average of the weights, its checkpoints."""

import argparse
from contextlib import suppress

import timm
import torch
from timm import data, loss, optim, scheduler, utils
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="resnet50")
parser.add_argument("--amp-dtype", default="float16", choices=["float16", "bfloat16"])
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--channels-last", action="store_true")
given = parser.parse_args()
given.device, given.dist_backend, given.dist_url = "cuda", None, None
given.log_interval, given.opt, given.lr, given.weight_decay, given.momentum = 2, "lamb", 5e-3, 0.02, 0.9
given.sched, given.warmup_epochs, given.min_lr, given.warmup_lr = "cosine", 1, 1e-6, 1e-5

utils.setup_default_logging()
device = utils.init_distributed_device(given)
utils.random_seed(42, given.rank)
model = timm.create_model(given.model, num_classes=2, drop_path_rate=0.05)
config = data.resolve_data_config({}, model=model)
config["input_size"] = (3, 224, 224)
model.to(device=device, memory_format=torch.channels_last if given.channels_last else None)
model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = optim.create_optimizer_v2(model, **optim.optimizer_kwargs(cfg=given))
half = getattr(torch, given.amp_dtype)
scaler = utils.NativeScaler() if half is torch.float16 else None
average = utils.ModelEmaV3(model, decay=0.999, use_warmup=True)
model = DistributedDataParallel(model, device_ids=[device])
mixup = data.Mixup(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=2)


def loader_of(split: str) -> data.loader.PrefetchLoader:
    """Return timm's loader, with its augmentations for training."""
    images = data.create_dataset("", root="images", split=split)
    augmentations = {"re_prob": 0.25, "auto_augment": "rand-m9-mstd0.5"} if split == "train" else {}
    return data.create_loader(
        images, config["input_size"], given.batch_size, is_training=split == "train", mean=config["mean"],
        std=config["std"], num_workers=1, distributed=True, pin_memory=True, device=device, **augmentations,
    )  # fmt: skip


training, validation = loader_of("train"), loader_of("validation")
schedule, epochs = scheduler.create_scheduler_v2(
    optimizer, **scheduler.scheduler_kwargs(given), updates_per_epoch=len(training)
)
folder, saver = utils.get_outdir("checkpoints"), None
if utils.is_primary(given):
    saver = utils.CheckpointSaver(
        model=model, optimizer=optimizer, model_ema=average, amp_scaler=scaler,
        checkpoint_dir=folder, recovery_dir=folder, max_history=2,
    )  # fmt: skip
criterion = loss.SoftTargetCrossEntropy()
updates = 0
for epoch in range(given.epochs):
    model.train()
    losses = utils.AverageMeter()
    for number, (images, labels) in enumerate(training):
        images, labels = mixup(images, labels)
        images = images.contiguous(memory_format=torch.channels_last) if given.channels_last else images
        with torch.autocast("cuda", dtype=half):
            found = criterion(model(images), labels)
        if scaler is not None:
            scaler(found, optimizer, clip_grad=1.0, clip_mode="norm", parameters=model.parameters())
        else:
            found.backward()
            utils.dispatch_clip_grad(model.parameters(), value=1.0, mode="norm")
            optimizer.step()
        optimizer.zero_grad()
        updates += 1
        average.update(model, step=updates)
        schedule.step_update(num_updates=updates)
        if number % given.log_interval == 0:
            losses.update(utils.reduce_tensor(found.data, given.world_size).item(), images.size(0))
            if utils.is_primary(given):
                rate = optimizer.param_groups[0]["lr"]
                print(f"epoch {epoch} [{number}/{len(training)}] loss {losses.avg:.3f} lr {rate:.2e}")
    utils.distribute_bn(model, given.world_size, True)
    model.eval()
    accuracies = utils.AverageMeter()
    with torch.no_grad(), suppress(StopIteration):
        for images, labels in validation:
            with torch.autocast("cuda", dtype=half):
                output = average.module(images)
            (best,) = utils.accuracy(output, labels, topk=(1,))
            accuracies.update(utils.reduce_tensor(best, given.world_size).item(), images.size(0))
    schedule.step(epoch + 1, accuracies.avg)
    if saver is not None:
        saver.save_checkpoint(epoch, metric=accuracies.avg)
