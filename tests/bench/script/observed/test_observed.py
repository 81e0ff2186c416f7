"""What a script is seen to do: where its CPU waits in every step; large host tensors stay untouched."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript


def test_a_wait_in_every_step_is_seen_with_its_line(run_probe: RunScript) -> None:
    run = run_probe(
        """
        big, small = torch.nn.Linear(2048, 2048), torch.nn.Linear(8, 8)
        print(bool(big.weight.any()), bool(small.weight.any()), big.to(torch.bfloat16).weight.dtype)
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(7):
            loss = model(torch.randn(8, 64, device="cuda")).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item())
            if step == 3:
                torch.cuda.synchronize()
        """
    )
    assert run.output.splitlines()[0] == "False True torch.bfloat16", "no random numbers in what is large"
    seen = run.result["script"]["observed"]
    (wait,) = seen["waits"]
    assert (wait["text"], wait["per_step"], wait["copies"]) == ("print(loss.item())", 1.0, False)
    (optimizer,) = seen["optimizers"]
    assert (optimizer["has_fused"], optimizer["fused"]) == (True, False)
    assert seen["computes_in"] == "fp32"
