"""What comes before torch's calls in a script's process, and what is asked of its model.

`calls.py` puts functions before `fully_shard`, FSDP1's wrapper, loaders and optimizers; `blocks.py` finds a
model's repeated blocks and its units; `arguments.py` finds a batch's size among a script's arguments.
"""
