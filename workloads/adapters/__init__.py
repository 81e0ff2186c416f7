"""Frozen models with small trained matrices beside them: LoRA, and bases in 4 bits."""
