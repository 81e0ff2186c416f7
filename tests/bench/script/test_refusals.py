"""What cannot be simulated is refused by name, and errors that only placeholders cause say so."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.requests.script_request import script_config

if TYPE_CHECKING:
    from conftest import RunScript

REFUSED = """
import torch.distributed as dist
from torch.utils.cpp_extension import load_inline
dist.init_process_group("nccl")
x = torch.randn(4, 4, device="cuda")
def exported():
    torch.utils.checkpoint  # loaded by then
for name, call in {
    'backend="cudagraphs"': lambda: torch.compile(torch.nn.Linear(2, 2), backend="cudagraphs"),
    "torch.cuda.CUDAGraph": lambda: torch.cuda.CUDAGraph(),
    "torch.cuda.graph_pool_handle": lambda: torch.cuda.graph_pool_handle(),
    "torch.cuda.make_graphed_callables": lambda: torch.cuda.make_graphed_callables(None, ()),
    "torch.nn.DataParallel": lambda: torch.nn.DataParallel(torch.nn.Linear(2, 2)),
    "torch.utils.cpp_extension.load_inline": lambda: load_inline("name", "source"),
    "recv from any rank": lambda: dist.recv(x),
    "aten::nonzero": lambda: x.nonzero(),
    "aten::_unique2": lambda: x.unique(),
    "aten::masked_select": lambda: torch.masked_select(x, x > 0),
    "sparse tensors are not simulated": lambda: torch.nn.functional.embedding(
        torch.tensor([1, 2], device="cuda"), x.detach().requires_grad_(), sparse=True
    ).sum().backward(),
}.items():
    try:
        call()
    except NotImplementedError as error:
        assert name.strip() in str(error), (name, error)
        print("refused", name)
    else:
        raise AssertionError(name)
"""


def test_refused_classes_stay_classes(run_probe: RunScript) -> None:
    run = run_probe(
        """
        def replay(graph: torch.cuda.CUDAGraph | None, pool: "torch.cuda.MemPool | None" = None): ...
        class Parallel(torch.nn.DataParallel): ...
        model = torch.nn.Linear(2, 2)
        assert not isinstance(model, torch.nn.DataParallel)
        assert not isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel))
        kinds = (torch.cuda.Stream, torch.cuda.Event, torch.cuda.device)
        assert all(isinstance(kind, type) for kind in kinds)
        try:
            Parallel(model)
        except NotImplementedError as error:
            assert "torch.nn.DataParallel is not simulated" in str(error)
        else:
            raise AssertionError
        train(2)
        """
    )
    assert run.result["status"] == "ok", run.cause


def test_each_of_them_by_its_name(run_probe: RunScript) -> None:
    run = run_probe(REFUSED + "train(2)")
    assert run.result["status"] == "ok", run.cause
    assert run.output.count("refused") == 11


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1 / int(torch.rand((), device='cuda').item())", "answers item() and float() with 0"),
        ("import flash_attn", "compiled for CUDA"),
        ("torch.distributed.init_process_group('nccl', world_size=4)", "world_size=4"),
        ("raise SystemExit(3)", "exit code 3"),
        (
            "torch.distributed.init_process_group('nccl')\n"
            "torch.ops.symm_mem.one_shot_all_reduce(torch.ones(4, device='cuda'), 'sum', '0')",
            "use the collectives of torch.distributed",
        ),
        (
            "import torch.distributed.checkpoint as dcp\n"
            "dcp.save({'a': torch.ones(2)}, checkpoint_id='there')\n"
            "dcp.load({'b': torch.ones(2)}, checkpoint_id='there')",
            "CheckpointException: RuntimeError: Missing key in checkpoint state_dict: b",
        ),
        (
            "rows = torch.nested.nested_tensor([torch.ones(3, 16)], layout=torch.jagged, device='cuda')\n"
            "rows = rows.unflatten(-1, [2, -1]).transpose(1, 2)\n"
            "torch.nn.functional.scaled_dot_product_attention(rows, rows, rows)",
            "attention of nested tensors is simulated as flash attention",
        ),
    ],
)
def test_a_failed_script_says_why(
    text: str, words: str, run_probe: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = run_probe(text)
    assert run.result["status"] == "error"
    assert words in run.cause
    assert run.result["step_time_s"] is None


def test_out_of_memory_is_an_answer(run_probe: RunScript) -> None:
    run = run_probe("train(2); torch.zeros(1 << 38, device='cuda')")
    assert run.result["status"] == "oom"
    assert "1024.00 GiB" in run.cause


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"script": Path("nowhere.py")}, "nowhere.py: cannot be read"),
        ({"script": Path(__file__), "model": "gpt-125m"}, "--model"),
        ({"script": Path(__file__), "batch": "4"}, "--batch"),
        ({"script": Path(__file__), "device": "cuda"}, "torchrun"),
        ({"script": Path(__file__), "hardware": "a101"}, "a101"),
        ({"script": Path(__file__), "gpus": "12"}, "does not fill nodes"),
        ({"script_arguments": ("--fast",)}, "^'--fast' belongs to --script$"),
        ({"script_arguments": ("best.toml",)}, "^'best.toml' belongs to --script; `sweep` takes a file"),
        ({"steps_by": "profiler"}, "belongs to --script"),
    ],
    ids=str,
)
def test_options_that_do_not_belong_together(options: dict[str, object], words: str) -> None:
    with pytest.raises((UsageError, click.UsageError), match=words):
        script_config({"gpus": None, **options}, ())


@pytest.mark.parametrize(
    "switch",
    [
        pytest.param("import os; os.environ['TORCHDYNAMO_DISABLE'] = '1'", marks=pytest.mark.campaign),
        "torch.compiler.set_stance('force_eager')",
        pytest.param("import torch._dynamo; torch._dynamo.config.disable = True", marks=pytest.mark.campaign),
    ],
)
def test_an_eager_program_is_told_where_compilation_is_off(switch: str, run_probe: RunScript) -> None:
    text = """
model = torch.compile(torch.nn.Linear(8, 8))
@torch.compile
def plus_one(x): return x + 1
plus_one(torch.ones(2))
train(7)
"""
    run = run_probe(switch + text)
    assert run.result["status"] == "ok", run.cause
    assert run.result["compiled"] is False
    assert any("the eager program was simulated" in note for note in run.result["script"]["notes"])
