"""PyTorch-Ignite: an engine with handlers, metrics and checkpoints around a sharded model."""

import ignite.distributed as idist
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, PiecewiseLinear, TerminateOnNan
from ignite.metrics import RunningAverage
from torch.distributed.fsdp import fully_shard


def training(local_rank: int) -> None:
    device = idist.device()
    layers = [torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Embedding(1000, 512), *layers, torch.nn.Linear(512, 1000)).to(device)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.randint(0, 1000, (1024, 129))
    loader = idist.auto_dataloader(torch.utils.data.TensorDataset(rows), batch_size=64, shuffle=True)

    def step(engine: Engine, batch: list[torch.Tensor]) -> float:
        model.train()
        tokens = batch[0].to(device, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    trainer = Engine(step)
    RunningAverage(output_transform=lambda loss: loss).attach(trainer, "loss")
    rates = PiecewiseLinear(optimizer, "lr", [(0, 0.0), (4, 1e-3), (20, 0.0)])
    trainer.add_event_handler(Events.ITERATION_STARTED, rates)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, TerminateOnNan())
    saver = Checkpoint({"trainer": trainer}, DiskSaver("saved", require_empty=False), n_saved=1)
    trainer.add_event_handler(Events.EPOCH_COMPLETED, saver)

    @trainer.on(Events.ITERATION_COMPLETED(every=2))
    def log(engine: Engine) -> None:
        if idist.get_rank() == 0:
            print(engine.state.iteration, engine.state.metrics["loss"])

    trainer.run(loader, max_epochs=2, epoch_length=6)


if __name__ == "__main__":
    with idist.Parallel(backend="nccl") as parallel:
        parallel.run(training)
