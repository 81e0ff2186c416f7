"""Megatron-Core's training loop on a small GPT, as `run_simple_mcore_train_loop` of its documentation."""

import argparse
import os
from collections.abc import Iterator
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

LENGTH, VOCABULARY, SAMPLES = 512, 1024, 4
parser = argparse.ArgumentParser()
parser.add_argument("--tensor", type=int, default=2)
parser.add_argument("--pipeline", type=int, default=1)
parser.add_argument("--microbatches", type=int, default=1)
parser.add_argument("--distributed-optimizer", action="store_true")
given = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl")
parallel_state.initialize_model_parallel(given.tensor, given.pipeline)
model_parallel_cuda_manual_seed(123)
config = TransformerConfig(
    num_layers=4,
    hidden_size=512,
    num_attention_heads=8,
    tensor_model_parallel_size=given.tensor,
    pipeline_model_parallel_size=given.pipeline,
    bf16=True,
    params_dtype=torch.bfloat16,
    pipeline_dtype=torch.bfloat16,
)
gpt = GPTModel(
    config,
    get_gpt_layer_local_spec(),
    vocab_size=VOCABULARY,
    max_sequence_length=LENGTH,
    pre_process=parallel_state.is_pipeline_first_stage(),
    post_process=parallel_state.is_pipeline_last_stage(),
).cuda()
overlapped = given.distributed_optimizer
reduction = DistributedDataParallelConfig(
    overlap_grad_reduce=overlapped, overlap_param_gather=overlapped, use_distributed_optimizer=overlapped
)
model = DistributedDataParallel(config, reduction, Float16Module(config, gpt))
adam = OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, use_distributed_optimizer=overlapped)
optimizer = get_megatron_optimizer(adam, [model])
config.finalize_model_grads_func = finalize_model_grads


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of random tokens."""
    while True:
        tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH))
        yield {
            "input_ids": tokens,
            "position_ids": torch.arange(LENGTH).expand(SAMPLES, LENGTH),
            "attention_mask": torch.ones(SAMPLES, 1, LENGTH, LENGTH).tril() < 0.5,
            "labels": tokens,
        }


def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple:
    """Return the model's output, and the function that makes its loss."""

    def loss_of(mask: torch.Tensor, output: torch.Tensor) -> tuple:
        loss = torch.sum(output.float().view(-1) * mask) / mask.sum()
        return loss, {"lm loss": loss}

    batch = {name: tensor.to("cuda", non_blocking=True) for name, tensor in next(iterator).items()}
    mask = torch.ones(SAMPLES * LENGTH, device="cuda")
    return model(**batch), partial(loss_of, mask)


run_batch, data = get_forward_backward_func(), batches()
for _ in range(12):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = run_batch(
        forward_step_func=forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=given.microbatches,
        seq_length=LENGTH,
        micro_batch_size=SAMPLES,
        decoder_seq_length=LENGTH,
        forward_only=False,
    )
    _, norm, _ = optimizer.step()
    print(losses, norm)
torch.save(model.state_dict(), "model.pt")
