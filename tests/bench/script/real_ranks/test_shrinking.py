"""A vocabulary that is shrunk: tokens beyond it are numbers of what is left, in embeddings and losses."""

from __future__ import annotations

from typing import Any

SCRIPT = """
import dataclasses
import torch
from torch.nn import functional as F
from fsdpbench.script.real_ranks.shrinking import Shrinking

notes = set()
Shrinking(notes, saves=False)

@dataclasses.dataclass
class Model:
    dim: int = 4096
    heads: int = 32
    vocab_size: int = 50257

model = Model()
table = torch.nn.Embedding(model.vocab_size, model.dim, padding_idx=50256)
tokens = torch.tensor([3, 515, 50256])
assert table.weight.shape[0] == 512 and table.padding_idx == 50256 % 512
assert torch.equal(table(tokens), table(torch.tensor([3, 3, 50256 % 512])))
scores, target = torch.randn(3, 512), torch.tensor([-100, 50256, 1])
assert torch.equal(F.cross_entropy(scores, target), F.cross_entropy(scores, torch.tensor([-100, 80, 1])))
try:
    table(torch.tensor([50257]))
except IndexError:
    print("beyond the vocabulary")
"""


def test_tokens_follow_a_vocabulary_that_is_shrunk(in_forks: Any) -> None:
    (done,) = in_forks(SCRIPT, [[]])
    assert done.stdout.strip() == "beyond the vocabulary", done.stderr
