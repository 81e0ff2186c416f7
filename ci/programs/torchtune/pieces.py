"""Make `pieces.model`, a SentencePiece tokenizer of `text.txt` as torchtune's Llama 2 tokenizer reads it."""

import sentencepiece

sentencepiece.SentencePieceTrainer.train(
    input="text.txt", model_prefix="pieces", vocab_size=48, bos_id=1, eos_id=2, pad_id=3, unk_id=0
)
