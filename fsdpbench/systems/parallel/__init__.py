"""Parallelism in addition to FSDP: tensor (`tp`), context (`cp`) and expert parallelism (`ep`) of a model.

build ─> shard by tp / experts by ep (DTensor parameters) ─> fully_shard over the remaining mesh dimensions
"""
