"""Parallelism beside FSDP: tensor (`tp`), context (`cp`) and expert parallelism (`ep`) of a model.

build ─> cut by tp / experts by ep (DTensor parameters) ─> fully_shard over what is left of the ranks
"""
