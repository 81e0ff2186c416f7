"""OLMo-core's trainer on a small Llama with FSDP, as its documentation shows."""

import sys

import numpy as np
from olmo_core.config import DType
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig, CosWithWarmup
from olmo_core.train import (
    Duration,
    TrainerConfig,
    prepare_training_environment,
    teardown_training_environment,
)
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

SEQUENCE = 1024


def main() -> None:
    prepare_training_environment()
    tokenizer = TokenizerConfig.gpt2()
    np.random.default_rng(0).integers(0, 50000, SEQUENCE * 600, dtype=np.uint16).tofile("tokens.npy")
    model = TransformerConfig.llama2_271M(vocab_size=tokenizer.padded_vocab_size()).build(init_device="meta")
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=4 * SEQUENCE,
        max_sequence_length=SEQUENCE,
        optim=AdamWConfig(lr=1e-3),
        compile_model="compile" in sys.argv,
        dp_config=TransformerDataParallelConfig(
            name=DataParallelType.fsdp, param_dtype=DType.bfloat16, reduce_dtype=DType.float32
        ),
        max_grad_norm=1.0,
        scheduler=CosWithWarmup(warmup_steps=10),
    ).build(model)
    dataset = NumpyFSLDatasetConfig(
        paths=["tokens.npy"], sequence_length=SEQUENCE, tokenizer=tokenizer, work_dir="work"
    ).build()
    loader = NumpyDataLoaderConfig(global_batch_size=8 * 4 * SEQUENCE, seed=0, num_workers=0).build(
        dataset, dp_process_group=train_module.dp_process_group
    )
    TrainerConfig(
        save_folder="saved", save_overwrite=True, metrics_collect_interval=5, max_duration=Duration.steps(10)
    ).build(train_module, loader).fit()
    teardown_training_environment()


if __name__ == "__main__":
    main()
