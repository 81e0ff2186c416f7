"""Scripts may give every argument by the name that torch and Python have for it, wrapped or not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.sim.torch_device.patches.dynamo import passing_to

if TYPE_CHECKING:
    from conftest import RunScript


def test_calls_by_keyword_run(run_probe: RunScript) -> None:
    run = run_probe(
        """
        import subprocess, sys
        from torch.distributed.fsdp import fully_shard
        from torch.nn.utils.rnn import pack_padded_sequence

        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, device="cuda") for _ in range(2)))
        for block in model:
            fully_shard(module=block)
        fully_shard(module=model)
        optimizer = torch.optim.SGD(params=model[0].parameters(), lr=0.1)
        optimizer.add_param_group(param_group={"params": list(model[1].parameters())})
        packed = pack_padded_sequence(input=torch.ones(5, 2, 3), lengths=[5, 2])
        with subprocess.Popen(args=[sys.executable, "-c", "print('child')"], stdout=subprocess.PIPE) as child:
            assert child.stdout.read() == b"child\\n"
        for step in range(6):
            for last in (False, True):
                model.set_requires_gradient_sync(requires_gradient_sync=last)
                model.set_requires_all_reduce(requires_all_reduce=last, recurse=False)
                model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        torch.save(obj={"weight": torch.ones(2, device="cuda")}, f="saved.pt")
        assert torch.load(f="saved.pt", weights_only=True)["weight"].shape == (2,)
        """,
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause


def test_a_script_that_times_itself_runs_without_its_waits(run_probe: RunScript) -> None:
    run = run_probe(
        """
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        train(4)
        end.record()
        end.synchronize()
        start.elapsed_time(end_event=end)
        """,
        varied="no-waits",
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause


def test_a_wrapper_with_names_of_its_own_is_refused_where_it_is_made() -> None:
    def call(original: Any, module: Any, wanted: bool) -> Any:
        return original(module, wanted)

    def named(self: Any, is_last: bool) -> bool:
        return is_last

    def alike(self: Any, wanted: bool) -> bool:
        return wanted

    with pytest.raises(TypeError, match=r"'wanted' is 'is_last' of .*named"):
        passing_to(call)(named)
    assert passing_to(call)(alike)(None, wanted=True)
