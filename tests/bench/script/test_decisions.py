"""Decisions by values that are not there: answered as in healthy training, and reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from conftest import RunScript

FSDP2 = """
import math
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("nccl")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).cuda()
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
def backward():
    optimizer.zero_grad()
    loss = model(torch.randn(8, 64, device="cuda")).square().mean()
    loss.backward()
    return loss
"""


@pytest.mark.skipif(torch.__version__ < "2.12", reason="DTensors of torch 2.11 have no `ne`")
def test_gradients_are_finite_also_as_dtensors(run_probe: RunScript) -> None:
    run = run_probe(
        FSDP2
        + """
for _ in range(7):
    backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert type(norm).__name__ == "DTensor"
    if not torch.isfinite(norm) or torch.isnan(norm.full_tensor()) or not (~torch.isinf(norm)).all():
        continue
    bad = torch.stack([~torch.isfinite(p.grad).all().to_local() for p in model.parameters()]).any()
    assert not bad and bool(norm == norm) and not (norm != norm) and math.isfinite(norm.item())
    optimizer.step()
"""
    )
    assert run.result["status"] == "ok", run.cause
    assert run.result["compiled"] is False
    assert {("bool", True), ("bool", False), ("math.isfinite", True)} == {each[:2] for each in run.decisions}


def test_random_numbers_of_dtensors_decide_nothing(run_probe: RunScript) -> None:
    """torch sends their state to all ranks and compares it, which is no decision of the script's."""
    run = run_probe(
        FSDP2
        + """
torch.cuda.manual_seed(5)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.normal_(0, 0.02)
assert torch.cuda.initial_seed() == 5
for _ in range(7):
    backward()
    optimizer.step()
"""
    )
    assert run.result["status"] == "ok", run.cause
    assert run.decisions == []


def test_each_decision_is_recorded_by_line(run_probe: RunScript) -> None:
    run = run_probe(
        FSDP2
        + """
best, total = math.inf, 0.0
for step in range(6):
    loss = backward()
    optimizer.step()
    total += loss.item() / 2
    print(f"{float(loss):.3f}", loss.item(), total)  # shown alone: decides nothing
    if total / (step + 1) < best: best = total       # LESS
    on_host = (loss.detach().cpu() * 2).mean()
    if on_host > 1: break                            # MORE
    if on_host.item() > 1: break                     # NUMBER
    rows = torch.zeros(4)[: int(loss)]               # INT
    kept = float(loss)                               # FLOAT
    if torch.equal(loss, loss.clone()): pass         # EQUAL
    import json; json.dumps({"loss": loss.item()})
"""
    )
    assert run.result["status"] == "ok", run.cause
    source = Path(run.result["config"]["script"]["path"]).read_text().splitlines()
    found: dict[str, list[tuple[Any, ...]]] = {}
    for each in run.result["placeholder_decisions"]:
        assert each["file"] == run.result["config"]["script"]["path"]
        word = source[each["line"] - 1].rpartition("# ")[2]
        found.setdefault(word, []).append((each["operation"], each["answer"], each["count"]))
    assert found == {
        "LESS": [("<", True, 1), ("<", False, 5)],
        "MORE": [("bool", False, 6)],
        "NUMBER": [(">", False, 6)],
        "INT": [("int", 0, 6)],
        "FLOAT": [("float", 0.0, 6)],
        "EQUAL": [("torch.equal", True, 6)],
    }


def test_a_mean_over_a_count_that_is_not_known_reads_as_zero(run_probe: RunScript) -> None:
    run = run_probe(
        FSDP2
        + """
for _ in range(4):
    loss = backward()
    optimizer.step()
    both = torch.stack([loss.detach() * 8, torch.tensor(8.0, device="cuda")])
    dist.all_reduce(both)
    total, count = both.tolist()
    print(total / count, 5 // count, divmod(3, count), 2 % count)
    if total / count < 3: continue  # a decision
    break
try: count / 0
except ZeroDivisionError: print("a zero of the script's own")
"""
    )
    assert run.result["status"] == "ok", run.cause
    assert run.output.splitlines() == [*["0.0 0.0 (0.0, 0.0) 0.0"] * 4, "a zero of the script's own"]
    assert run.decisions == [("<", True, 4)]


def test_torchs_own_questions_are_not_the_scripts(run_probe: RunScript) -> None:
    run = run_probe(
        """
        from torch.nn import init
        from torch.nn.utils import clip_grad_norm_
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)).cuda()
        for fill in (init.trunc_normal_, init.xavier_uniform_, init.orthogonal_, init.sparse_, init.dirac_):
            try: fill(model[0].weight, *((0.1,) if fill is init.sparse_ else ()))
            except (NotImplementedError, ValueError): pass
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        scaler = torch.amp.GradScaler("cuda")
        for step in range(3):
            with torch.autocast("cuda", torch.float16):
                loss = model(torch.randn(4, 8, device="cuda")).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scaler.step(optimizer); scaler.update()
            plateau.step(loss)  # the script's
            torch.distributions.Normal(loss.detach(), 1.0).sample()
            if 3.0 in loss.detach(): pass  # the script's
        """
    )
    assert run.result["status"] == "ok", run.cause
    assert {each[:2] for each in run.decisions} == {("item", False), ("float", 0.0)}, run.decisions
    assert {each["line"] for each in run.result["placeholder_decisions"]} == {
        number
        for number, line in enumerate(
            Path(run.result["config"]["script"]["path"]).read_text().splitlines(), 1
        )
        if "the script's" in line
    }


def test_every_way_to_the_host_is_recorded(run_probe: RunScript) -> None:
    """Copies, elements, numpy's own kinds, text: followed, or (`= `) noted where it was read."""
    run = run_probe(
        """
        import array, copy, decimal, io, json, math, pickle, statistics, struct, numpy as np
        file, numpy_rows = io.BytesIO(), np.zeros(2)
        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        buffer, pinned, kept, plain = torch.ones(1), torch.ones(2).pin_memory(), torch.ones(3), torch.zeros(2)
        plain[0] = 2.0
        assert type(plain) is torch.Tensor and type(plain[0] + 1) is torch.Tensor
        for step in range(7):
            loss = model(torch.randn(4, 8, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            if step != 3: continue
            number = loss.item()
            if loss.cpu() < 1: pass                             # requires a gradient
            if any(loss.cpu().flatten() < 1): pass              # iterated
            buffer.copy_(loss)
            assert buffer.item() == 0                           # copied
            pinned.copy_(loss.expand(2), non_blocking=True)
            if pinned.max() > 0.5: pass                         # copied beside
            waiting = loss.to("cpu", non_blocking=True)
            if waiting > 1: pass                                # sent
            kept[0] = number
            if kept.sum() > 1: pass                             # written
            if torch.tensor([number, number]).mean() > 1: pass  # made
            if torch.as_tensor(number) > 1: pass                # made anew
            if torch.tensor([[number, 1.0]]).max() > 1: pass    # made in rows
            if torch.full((2,), number).max() > 1: pass         # full
            if torch.full((1,), number, device="cuda") > 1: pass # full there
            if (torch.zeros(1) + number).item() > 1: pass       # added
            if torch.ones((), device="cuda") * number > 1: pass # multiplied there
            rows = torch.zeros(2)
            rows.add_(loss.detach().cpu())
            if rows.sum() > 1: pass                             # added in place
            whole = torch.tensor([1, 2], device="cuda")
            whole[0] = loss.detach().long().item()              # whole
            if whole.sum() > 3: pass                            # of a known sum
            if copy.deepcopy(loss.detach().cpu()) > 1: pass     # copied deeply
            more = np.zeros(2) + number                         # more
            if statistics.mean([number]) > 1: pass              # statistics
            if np.float32(number) > 1: pass                     # scalar
            if loss.detach().cpu().numpy() > 1: pass            # array
            if np.asarray(loss.detach().cpu()) > 1: pass        # as array
            torch.testing.assert_close(loss, loss.clone())      # close
            text = f"{loss.item():.2f}"                         # = text
            if text == "0.00": pass                             # text compared
            if str(loss.item()) < "1": pass                     # str compared
            if float(repr(loss.item())) > 1: pass               # out of text
            if math.fsum([loss.item(), 1.0]) > 3: pass          # fsum
            if divmod(loss.item(), 2.0)[1] > 1: pass            # divmod
            if math.atan2(loss.item(), 1.0) > 1: pass           # atan2
            if loss.item() in {0.0: 1}: pass                    # hashed
            if complex(loss.item()).real > 1: pass              # complex
            if json.loads(json.dumps(loss.item())) > 1: pass    # = json
            if pickle.loads(pickle.dumps(loss.item())) > 1: pass # = pickle
            if struct.pack("d", loss.item()) > b"1": pass       # = struct
            if array.array("d", [loss.item()])[0] > 1: pass     # = array
            if decimal.Decimal(loss.item()) > 1: pass           # = Decimal
            if torch.FloatTensor([loss.item()]).max() > 1: pass # = FloatTensor
            if "%.2f" % loss.item() > "1": pass                 # = percent
            written = numpy_rows; written[0] = loss.item()      # element
            torch.save(loss.cpu(), file)                        # = saved
            print(loss.item(), f"{loss.item():.3f}", str(loss.item()))
        """,
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    source = Path(run.result["config"]["script"]["path"]).read_text().splitlines()
    commented = {line.rpartition("# ")[2] for line in source if "  # " in line or "pass # " in line}
    recorded, read = (
        {source[each["line"] - 1].rpartition("# ")[2] for each in found}
        for found in (run.result["placeholder_decisions"], run.result["script"]["numbers_read"])
    )
    assert recorded == {word for word in commented if not word.startswith("= ")}
    assert {word for word in commented if word.startswith("= ")} <= read
    assert not any("print" in word for word in read), "what is only printed"


def test_arguments_of_distributions_are_valid(run_probe: RunScript) -> None:
    """They are what a program computes; whether torch checks them is not the program's decision."""
    run = run_probe(
        """
        from torch.distributions import Categorical, Normal
        model = torch.nn.Linear(8, 4).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(7):
            found = model(torch.randn(4, 8, device="cuda"))
            policy = Categorical(logits=found)
            value = Normal(found, torch.nn.functional.softplus(found))
            (policy.entropy().mean() - value.log_prob(value.rsample()).mean()).backward()
            optimizer.step()
        """,
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause


def test_numbers_of_the_host_come_back_as_they_were(run_probe: RunScript) -> None:
    """Counts and flags that a script sums over its ranks: nothing is guessed but that all hold the same."""
    run = run_probe(
        FSDP2
        + """
for step in range(9):
    backward()
    optimizer.step()
    stop = torch.tensor(int(step == 6), device="cuda")
    dist.broadcast(stop, 0)
    if stop.item(): break
    tokens = torch.tensor(32.0).cuda()
    dist.all_reduce(tokens)
    assert tokens.item() == 32 * dist.get_world_size() and (tokens / 2).item() == 128
    tokens += torch.randn((), device="cuda")
    assert tokens.item() == 0
labels = torch.randint(0, 10, (4, 8), device="cuda")
assert (labels != -100).sum().item() == 32
print("stopped", step)
""",
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause
    assert run.output.split() == ["stopped", "6"]


def test_what_other_ranks_hold_is_assumed(run_probe: RunScript) -> None:
    """Tensors, of the host too, and objects; what this rank itself sends is known."""
    run = run_probe(
        """
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
dist.init_process_group("cpu:gloo,cuda:nccl")
rank, size = dist.get_rank(), dist.get_world_size()
sent, host, counts = (torch.tensor([3 + rank], device=each) for each in ("cuda", "cpu", "cuda"))
dist.broadcast(sent, 0)
assert sent.item() == 3
objects = [3]
dist.broadcast_object_list(objects, src=0)
dist.broadcast(sent, 1)
print(sent.item())                                          # another's
dist.all_reduce(host)
if (host / 2).item() == 12: pass                            # of the host
gathered = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
dist.all_gather(gathered, torch.tensor([rank + 5]))
if gathered[1].item() == 5: pass                            # gathered
print(functional.all_reduce(counts, "sum", dist.group.WORLD).tolist()) # functional
all_objects = [None] * size
dist.all_gather_object(all_objects, {"rank": rank})         # objects
dist.broadcast_object_list(objects, src=1)                  # another's objects
dist.all_reduce(counts, op=dist.ReduceOp.MAX)
rows = torch.arange(6, device="cuda")
chosen = rows[rows < counts]                                # length
sums = (rows + counts).tolist()                             # sums
try: dist.scatter_object_list([None], None, src=1)
except NotImplementedError as error: print(error)
train(3)
"""
    )
    assert run.result["status"] == "ok", run.cause
    assert "only rank 0 runs" in run.output
    source = Path(run.result["config"]["script"]["path"]).read_text().splitlines()
    commented = {line.rpartition("# ")[2] for line in source if " # " in line}
    named = {source[each["line"] - 1].rpartition("# ")[2] for each in run.result["placeholder_decisions"]}
    assert named == commented


def test_a_scaler_steps_and_its_schedule_too(run_probe: RunScript) -> None:
    run = run_probe(
        """
        model = torch.nn.Linear(64, 64).cuda()
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
        for _ in range(7):
            scaler.scale(model(torch.randn(8, 64, device="cuda")).sum()).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert before == scaler.get_scale() == 2.0**16, "not a skipped step"
        """,
        to_the_end=True,
    )
    assert run.result["status"] == "ok", run.cause


def test_no_step_names_the_optimizer_and_what_kept_it(run_probe: RunScript) -> None:
    run = run_probe(
        FSDP2
        + """
for _ in range(7):
    if backward() > 0.5:  # a guard
        optimizer.step()
"""
    )
    assert run.result["status"] == "error"
    assert "step() of AdamW (probe0.py:" in run.cause
    assert "(bool: False, 7 times)" in run.cause


def test_an_error_names_the_line_that_decided(run_probe: RunScript) -> None:
    run = run_probe("sizes = torch.rand(2, device='cuda').long()\ntorch.zeros(8).split(sizes.tolist())")
    assert "it decided by values that are not there at probe0.py:" in run.cause


def test_a_router_is_taken_to_be_balanced(run_probe: RunScript) -> None:
    run = run_probe(
        """
chosen = torch.topk(torch.randn(16, 8, device="cuda"), 2).indices.flatten()
counts = torch.bincount(chosen, minlength=8)
order = torch.argsort(chosen)
rows = torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)[order]
assert [len(part) for part in rows.split(counts.tolist())] == [4] * 8
assert torch.histc(chosen.float(), bins=8, min=0, max=8).int().tolist() == [4] * 8
weights = torch.randn(8, 64, 16, device="cuda", dtype=torch.bfloat16)
ends = torch.cumsum(counts, 0, dtype=torch.int32)
assert torch.nn.functional.grouped_mm(rows, weights, offs=ends).shape == (32, 16)
torch.bincount(chosen)
"""
    )
    named = {each["operation"]: each["answer"] for each in run.result["placeholder_decisions"]}
    assert named["torch.bincount"] == "balanced: 4 in each of 8 bins"
    assert named["torch.histc"] == "balanced: 4 in each of 8 bins"
    assert named["tolist"] == 4
    assert "use a form with a fixed shape (minlength=)" in run.cause


def test_the_terminal_and_the_page_tell(fsdpbench: Any, tmp_path: Path) -> None:
    script = tmp_path / "guarded.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(8, 8).cuda()\n"
        "optimizer = torch.optim.SGD(model.parameters())\nfor _ in range(3):\n"
        "    loss = model(torch.ones(1, 8).cuda()).sum()\n    loss.backward()\n"
        f"    if loss < 1: optimizer.step()\n    torch.save(model.state_dict(), '{tmp_path}/best.pt')\n"
    )
    done = fsdpbench("run", "--script", str(script), "-o", str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    assert "guarded.py:7: bool -> true, 3 times" in done.stderr
    assert f"/files: {tmp_path / 'best.pt'}" in done.stderr
    assert not (tmp_path / "best.pt").exists()
    (result,) = (tmp_path / "runs").glob("guarded-*/result.json")
    assert json.loads(result.read_text())["redirected_files"]["files"] == [str(tmp_path / "best.pt")]
    assert fsdpbench("report", str(tmp_path / "runs")).returncode == 0
    assert "guarded.py:7" in (tmp_path / "runs" / "report.html").read_text()


def test_a_check_of_the_program_passes(run_probe: RunScript) -> None:
    """Whatever a placeholder would say: `assert`, and `if ...: raise`, with `not`, `and` and `or`."""
    run = run_probe(
        """
x, ok = torch.rand(4, device="cuda"), True
assert (x >= x.mean()).all(), "of DETR's boxes"
assert ok and (x > 0).all()
assert not (x < x.max()).any() and ok
assert (x > 0).any().item()
if not (x >= 0).all() or not ok:
    raise ValueError("a negative one")
if (x == x.max()).any():
    raise ValueError("its largest one")
taken = [1 for _ in range(2) if (x >= x.mean()).all()]
if (x > 0).all():
    taken.append(2)
assert not taken, "no checks: as placeholders say"
train(2)
"""
    )
    assert run.result["status"] == "ok", run.cause
    assert {("bool", True), ("bool", False), ("item", True)} <= {each[:2] for each in run.decisions}
