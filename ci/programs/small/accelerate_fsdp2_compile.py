"""accelerate with FSDP2, blocks compiled by regions, sharded states saved and loaded."""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import TorchDynamoPlugin
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM, LlamaConfig

accelerator = Accelerator(
    mixed_precision="bf16",
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], state_dict_type="SHARDED_STATE_DICT",
        activation_checkpointing=False,
    ),
    dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=True),
)  # fmt: skip
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.randint(0, 512, (256, 64))), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, (ids,) in enumerate(loader):
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step == 2:
        accelerator.save_state("state")
        accelerator.load_state("state")
