"""What `torch.compile` cannot do here is refused before anything is compiled, with the way out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings import Settings
from fsdpbench.engine.results.records import RankRecord
from fsdpbench.engine.worker import require_compiled
from fsdpbench.sim.torch_device.compile.refusals import CompileRefusedError, refuse_mode, refuse_options
from fsdpbench.systems import get_system


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"options": {"cpp_wrapper": True}}, "cpp_wrapper.*leave that option out"),
        ({"backend": "cudagraphs"}, 'mode="reduce-overhead"'),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CompileRefusedError, match=words):
        refuse_mode(options)


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "default"}, {"fullgraph": True, "dynamic": True}, {"mode": "reduce-overhead"}],
    ids=str,
)
def test_taken(options: dict[str, Any]) -> None:
    refuse_mode(options)
    refuse_options(options)


@pytest.mark.parametrize(
    ("more", "words"),
    [({"sanitize": True}, "leave --sanitize"), ({"software": "fsdp1-2022"}, "not that of software")],
    ids=str,
)
def test_not_applicable(more: dict[str, Any], words: str) -> None:
    """Under the sanitizer Dynamo would compile nothing, and not say so."""
    config = Config(
        model="gpt-tiny", shape={}, system="torch-fsdp1", device="sim", hardware="a100-80gb", gpus=8,
        gpus_per_node=8, settings=Settings.of(compile=True), measurement=Measurement.default_for("sim"),
        **more,
    )  # fmt: skip
    refused = get_system("torch-fsdp1").not_applicable(config)
    assert words in refused["compile"]
    eager = replace(config, settings=Settings.of(compile=False))
    assert "compile" not in get_system("torch-fsdp1").not_applicable(eager)


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"])
def test_not_where_the_environment_switches_it_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the eager program would be measured under the name of the compiled one."""
    monkeypatch.setenv(name, "1")
    config = Config(
        model="gpt-tiny", shape={}, system="torch-fsdp2", device="sim", hardware="a100-80gb", gpus=8,
        gpus_per_node=8, settings=Settings.of(compile=True), measurement=Measurement.default_for("sim"),
    )  # fmt: skip
    system = get_system("torch-fsdp2")
    assert f"{name}=1" in system.not_applicable(config)["compile"]
    assert system.not_applicable(replace(config, settings=Settings.of(compile=False))) == {}
    monkeypatch.setenv(name, "0")
    assert system.not_applicable(config) == {}


def test_a_run_that_compiled_nothing_is_an_error() -> None:
    """The eager program would stand under the name of the compiled one."""
    config = Config(
        model="gpt-tiny", shape={}, system="torch-fsdp2", device="sim", hardware="a100-80gb", gpus=8,
        gpus_per_node=8, settings=Settings.of(compile=True), measurement=Measurement.default_for("sim"),
    )  # fmt: skip
    record = RankRecord(0, 8, "sim")
    require_compiled(config, record)  # not known: nothing was run
    nothing = {"traced": 0, "graph_breaks": {"a reason": 2}}
    for record.compilation in (nothing, {**nothing, "traced": 1, "graphs": 0}):
        with pytest.raises(BenchError, match=r"wrap=block\): a reason \(2x\)\. .* take units that hold no"):
            require_compiled(config, record)
        require_compiled(replace(config, settings=Settings.of(compile=False)), record)
    for record.compilation in ({**nothing, "traced": 1}, {**nothing, "traced": 1, "graphs": 1}):
        require_compiled(config, record)
    with_loss = replace(config, settings=Settings.of(compile=True, compile_loss=True))
    with pytest.raises(BenchError, match="no graph of the units or none of the loss"):
        require_compiled(with_loss, record)
