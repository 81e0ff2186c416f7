"""An LSTM and a GRU on padded rows under DDP: packed sequences with lengths of the host, truncated backward, CTC."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, 64, padding_idx=0)
        self.lstm = nn.LSTM(64, 64, 2, batch_first=True, dropout=0.1, bidirectional=True)
        self.gru, self.head = nn.GRU(128, 64, batch_first=True), nn.Linear(64, 32)

    def forward(self, tokens, state=None):
        x, state = self.lstm(self.embed(tokens), state)
        return self.head(self.gru(x)[0]).log_softmax(-1), state


dist.init_process_group("nccl")
model = DDP(Network().cuda(), device_ids=[0])
optimizer = torch.optim.Adadelta(model.parameters())
state = None
for step in range(8):
    lengths = torch.randint(20, 30, (4,))
    lengths[0] = 30
    tokens = pad_sequence([torch.randint(1, 128, (int(n),)) for n in lengths], batch_first=True).cuda()
    scores, state = model(tokens, state)
    state = tuple(part.detach() for part in state)
    targets = torch.randint(1, 32, (4, 8), device="cuda")
    loss = nn.functional.ctc_loss(scores.transpose(0, 1), targets, lengths, torch.tensor([8] * 4))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
