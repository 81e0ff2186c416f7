"""Exit codes, the table and JUnit of a proof; what cannot be judged never passes; the user's files stay."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from fsdpbench.answers.prove.verdict import Part, PartVerdict, Proof, Verdict, judged, unknown, write_page
from fsdpbench.base.errors import ExitCode
from fsdpbench.cli.group import command_named
from fsdpbench.script.real_ranks.shrinking import shrunk

OK, BAD = judged(Part.RACES, [], "none"), judged(Part.RANKS, ["train.py:3: a\x1b[0m"], "differ")
NOT, SKIPPED = (
    unknown(Part.RESUME, "no checkpoint"),
    PartVerdict(Part.SPEED, Verdict.SKIPPED, "no --baseline"),
)
CASES = (
    ([OK], ExitCode.OK),
    ([OK, SKIPPED], ExitCode.OK),
    ([OK, BAD, NOT], ExitCode.REGRESSION),
    ([OK, NOT], ExitCode.CANNOT_JUDGE),
    ([SKIPPED], ExitCode.CANNOT_JUDGE),
    ([], ExitCode.CANNOT_JUDGE),
    ([unknown(Part.SPEED, "why", ["slower"])], ExitCode.REGRESSION),
)


@pytest.mark.parametrize(("parts", "code"), CASES)
def test_exit_code(parts: list[PartVerdict], code: ExitCode) -> None:
    assert Proof("train.py", 8, "h100-80gb", parts).exit_code is code


def test_table_and_junit() -> None:
    proof = Proof("train.py", 8, "h100-80gb", [OK, BAD, NOT, SKIPPED])
    lines = proof.as_text().splitlines()
    assert lines[0].split() == ["races", "ok", "none"]
    assert lines[1].split()[:2] == ["ranks", "1"]
    assert lines[3].startswith("resume      unknown  could not judge: no checkpoint")
    rows = proof.as_markdown().splitlines()
    assert rows[0] == "**Findings**: `train.py` on 8 simulated GPUs (h100-80gb)"
    assert rows[5] == "| ranks | 1 | differ<br>train.py:3: a\\x1b[0m |"
    suite = ElementTree.fromstring(proof.as_junit())
    assert [suite.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["4", "1", "1", "1"]
    assert suite.find("testcase[@name='ranks']/failure") is not None


def test_markdown_keeps_its_cells() -> None:
    hostile = judged(Part.RACES, ["a | b <img src=x> `c`\n| d |"], "none")
    last = Proof("a`b|c.py", 8, "h100-80gb", [hostile]).as_markdown().splitlines()
    assert last[-1] == "| races | 1 | none<br>a \\| b &lt;img src=x&gt; 'c'\\n\\| d \\| |"
    assert last[0] == "**Findings**: `a'b\\|c.py` on 8 simulated GPUs (h100-80gb)"


def test_the_page_names_every_part_and_believes_no_text(tmp_path: Path) -> None:
    hostile = judged(Part.RACES, ["<script>alert(1)</script>"], "a & b")
    page = tmp_path / "proof.html"
    write_page(page, Proof("<b>train.py", 8, "h100-80gb", [hostile, NOT, SKIPPED]))
    text = page.read_text()
    assert "<h1>Findings</h1>" in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "<script" not in text
    assert "<b>" not in text
    assert all(f'<th scope="row">{part}</th>' in text for part in ("races", "resume", "speed"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "which script?"),
        (("--only", "gradient", "x.py"), "unknown part 'gradient'"),
        (("--ranks", "1", "x.py"), "--ranks 1"),
        (("--ranks", "many", "x.py"), "--ranks many"),
    ],
)
def test_bad_requests(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("")
    given = [str(tmp_path / each) if each == "x.py" else each for each in arguments]
    command = command_named("prove")
    assert command is not None
    error = CliRunner().invoke(command, given).exception
    assert words in str(error)


def test_sizes_shrink_together() -> None:
    llama = {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
    }  # fmt: skip
    small = llama | shrunk(llama)
    assert small["num_hidden_layers"] == 2
    assert small["hidden_size"] == small["num_attention_heads"] * small["head_dim"]
    assert small["num_attention_heads"] % small["num_key_value_heads"] == 0
    assert small["intermediate_size"] * 2 == small["hidden_size"] * 7
    assert shrunk({"width": 64, "heads": 4, "layers": 2}) == {}
    assert shrunk({"interval": 500, "global_batch_size": 64}, "Checkpoint") == {"interval": 1}
    assert shrunk({"save_steps": 500, "batch_size": 8}) == {"batch_size": 4}


def test_a_script_without_a_step_is_not_judged_and_its_files_stay(tmp_path: Path) -> None:
    from fsdpbench.answers.prove.parts import Request, prove
    from fsdpbench.cli.requests.script_request import script_config
    from fsdpbench.launch import fork_server

    script = tmp_path / "train.py"
    script.write_text("open('left.txt', 'w').write('new')\nopen('mine.txt', 'a').write('new')\n")
    (tmp_path / "mine.txt").write_text("old")
    fork_server.start("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        config = script_config({"script": script, "gpus": "4"}, ())
        assert config is not None
        proof = prove(Request(config, frozenset({Part.GRADIENTS}), (2,)))
    assert proof.exit_code is ExitCode.CANNOT_JUDGE
    assert "no optimizer step" in proof.parts[0].summary
    assert (tmp_path / "mine.txt").read_text() == "old"
    assert not (tmp_path / "left.txt").exists()
