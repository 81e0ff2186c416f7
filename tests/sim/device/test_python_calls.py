"""Python's calls between operators are counted, whatever functions there are."""

from __future__ import annotations

from types import SimpleNamespace

from fsdpbench.sim.torch_device.python_calls import FIRST, PythonCalls


def test_code_without_a_hash_is_counted() -> None:
    """Dynamo makes functions whose constants cannot be hashed; compilers run before the first step."""

    def function() -> int:
        return 1

    function.__code__ = function.__code__.replace(co_consts=(None, {}))
    costs = SimpleNamespace(python_call_ns=1_000)
    accelerator = SimpleNamespace(timeline=SimpleNamespace(cpu=0), cpu_costs=costs)
    calls = PythonCalls(accelerator)
    calls.leave()
    for _ in range(3):
        calls.begin_step()
        calls.before("first")
        function()
        calls.before("second")
        calls.end_step()
    assert accelerator.timeline.cpu == 2 * 1_000 * FIRST // 100
