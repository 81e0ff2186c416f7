"""Sentence Transformers' trainer with FSDP, as its page on distributed training shows."""

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

words = Transformer("bert", max_seq_length=128)
model = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), pooling_mode="mean")])
pairs = load_dataset("json", data_files="pairs/train.jsonl", split="train")
pairs = pairs.select_columns(["prompt", "chosen"]).rename_columns({"prompt": "anchor", "chosen": "positive"})
arguments = SentenceTransformerTrainingArguments(
    output_dir="embedder",
    max_steps=10,
    per_device_train_batch_size=4,
    bf16=True,
    report_to=[],
    logging_steps=2,
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["BertLayer"]},
)
SentenceTransformerTrainer(
    model=model, args=arguments, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
).train()
