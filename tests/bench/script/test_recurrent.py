"""Recurrent layers and CTC: operators whose shapes torch cannot tell by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript


def test_packed_sequences(run_probe: RunScript) -> None:
    """Lengths are on the host, as CUDA wants them."""
    run = run_probe(
        """
        from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
        layer = torch.nn.LSTM(8, 8, batch_first=True).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for _ in range(7):
            rows = torch.randn(3, 7, 8, device="cuda", requires_grad=True)
            lengths = torch.tensor([5, 7, 3])
            packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
            assert packed.data.shape == (15, 8) and packed.batch_sizes.tolist() == [3, 3, 3, 2, 2, 1, 1]
            output, found = pad_packed_sequence(layer(packed)[0], batch_first=True)
            assert output.shape == (3, 7, 8) and output.is_cuda and found.tolist() == [5, 7, 3]
            output.sum().backward()
            assert rows.grad.shape == rows.shape
            optimizer.step()
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert run.decisions == []


@pytest.mark.parametrize(
    "layer", ["GRU(64, 32, 2)", "GRU(64, 32, bias=False)", "LSTM(64, 32)", "RNN(64, 32)"]
)
def test_recurrent_layers_train_with_ctc(layer: str, run_probe: RunScript) -> None:
    run = run_probe(
        f"""
        layer, head = torch.nn.{layer}.cuda(), torch.nn.Linear(32, 10).cuda()
        parameters = [*layer.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        targets = torch.ones(4, 5, dtype=torch.long)
        for _ in range(7):
            output, state = layer(torch.randn(20, 4, 64, device="cuda"))
            assert output.shape == (20, 4, 32)
            scores = torch.log_softmax(head(output), -1)
            torch.nn.functional.ctc_loss(scores, targets, (20,) * 4, (5,) * 4).backward()
            for parameter in parameters:
                assert parameter.grad.shape == parameter.shape and parameter.grad.is_cuda
            optimizer.step()
            optimizer.zero_grad()
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert run.result["unknown_operators"] == {}
