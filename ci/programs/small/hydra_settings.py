"""A Hydra program: structured settings, an instantiated optimizer, a run folder."""

from dataclasses import dataclass, field

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from omegaconf import MISSING, OmegaConf
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass
class OptimizerSettings:
    _target_: str = "torch.optim.AdamW"
    lr: float = 1e-3
    weight_decay: float = 0.1


@dataclass
class Settings:
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    layers: int = 3
    width: int = 128
    name: str = MISSING


ConfigStore.instance().store("settings", Settings)


@hydra.main(version_base=None, config_name="settings")
def main(settings: Settings) -> None:
    dist.init_process_group("nccl")
    if dist.get_rank() == 0:
        print(OmegaConf.to_yaml(settings))
    model = nn.Sequential(*(nn.Linear(settings.width, settings.width) for _ in range(settings.layers))).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = instantiate(settings.optimizer, params=model.parameters(), _convert_="partial")
    for _ in range(8):
        model(torch.randn(4, settings.width, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    import sys

    sys.argv += ["name=tried"] if len(sys.argv) == 1 else []
    main()
