"""A small FSDP training package whose tests need no GPU."""
