"""DeepSpeed's engine on a stack of blocks, as its getting-started page writes it."""

import argparse

import deepspeed
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--stage", type=int, default=3)
given = parser.parse_args()
deepspeed.init_distributed()
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    "zero_optimization": {"stage": given.stage},
    "gradient_clipping": 1.0,
}


class Block(torch.nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


with deepspeed.zero.Init(config_dict_or_path=config, enabled=given.stage == 3):
    model = torch.nn.Sequential(*(Block(512) for _ in range(6)))
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for _ in range(12):
    x = torch.randn(4, 256, 512, device=engine.device, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
engine.save_checkpoint("saved")
