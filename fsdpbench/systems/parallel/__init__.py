"""Parallelism beside FSDP: tensor (`tp`), context (`cp`) and expert parallelism (`ep`) of a model.

build ─> cut by tp / experts by ep (DTensor parameters) ─> fully_shard over what is left of the ranks
"""

from fsdpbench.systems.parallel.experts import Meshes, make_meshes
from fsdpbench.systems.parallel.refusals import refuse_parallel
from fsdpbench.systems.parallel.tensor import context_of, parallelise
