"""A recipe class: configuration by dataclass, Stateful application state, DCP saved in the background, resumed."""

import argparse
import dataclasses
import json
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tiny import GPT, Tokens
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


@dataclasses.dataclass(frozen=True)
class Settings:
    folder: str = "recipe"
    lr: float = 1e-3
    steps: int = 8
    every: int = 3


class Application(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        weights, states = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": states, "step": torch.tensor(self.step)}

    def load_state_dict(self, found):
        set_state_dict(
            self.model, self.optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"]
        )
        self.step = int(found["step"])


class Recipe:
    def __init__(self, settings):
        self.settings, self.device = settings, torch.device("cuda")
        dist.init_process_group("cpu:gloo,cuda:nccl")
        with torch.device("meta"):
            self.model = GPT()
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.model.to_empty(device=self.device)
        for module in self.model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr)
        self.state, self.saving = Application(self.model, self.optimizer), None
        self.folder = pathlib.Path(settings.folder)

    def save(self):
        if self.saving is not None:
            self.saving.result()
        name = self.folder / f"step-{self.state.step}"
        self.saving = dcp.async_save({"app": self.state}, checkpoint_id=str(name))

    def load(self):
        found = sorted(self.folder.glob("step-*"))
        if found:
            dcp.load({"app": self.state}, checkpoint_id=str(found[-1]))

    def train(self):
        self.load()
        data = Tokens(128)
        for tokens, labels in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):
            self.model(tokens.to(self.device), labels.to(self.device)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.state.step += 1
            if self.state.step % self.settings.every == 0:
                self.save()
            if self.state.step >= self.settings.steps:
                break
        if self.saving is not None:
            self.saving.result()
        self.load()
        if dist.get_rank() == 0:
            (self.folder / "settings.json").write_text(json.dumps(dataclasses.asdict(self.settings)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for field in dataclasses.fields(Settings):
        parser.add_argument(f"--{field.name}", type=type(field.default), default=field.default)
    recipe = Recipe(Settings(**vars(parser.parse_args())))
    try:
        recipe.train()
    finally:
        dist.destroy_process_group()
