"""Optimizers for sharded parameters: Muon, which needs whole matrices, and AdamW with states of two bytes."""
