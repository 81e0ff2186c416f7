"""TRL's SFTTrainer on token ids: LoRA by PEFT, FSDP2."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

vocabulary = {f"w{i}": i for i in range(510)} | {"<pad>": 510, "</s>": 511}
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="</s>")),
    pad_token="<pad>",
    eos_token="</s>",
)
config = LlamaConfig(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
data = Dataset.from_list([{"input_ids": torch.randint(0, 510, (64,)).tolist()} for _ in range(256)])
arguments = SFTConfig(
    output_dir="sft", per_device_train_batch_size=2, max_steps=9, logging_steps=3, bf16=True, report_to="none",
    save_strategy="no", max_length=64, gradient_checkpointing=True, fsdp="full_shard auto_wrap",
    fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
)  # fmt: skip
trainer = SFTTrainer(
    AutoModelForCausalLM.from_config(config), args=arguments, train_dataset=data, processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)  # fmt: skip
trainer.train()
