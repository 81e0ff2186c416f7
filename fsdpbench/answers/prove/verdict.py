"""The verdicts on a script, one for each part, as a table, as JSON and as JUnit XML."""

import html
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from xml.etree import ElementTree

import msgspec

from fsdpbench.base.errors import ExitCode
from fsdpbench.base.reading import one_line, printable_lines

SCHEMA = 1
_LISTED = 2


class Part(StrEnum):
    """The parts of a proof, in the order of the table."""

    GRADIENTS = "gradients"
    RACES = "races"
    RANKS = "ranks"
    MEMORY = "memory"
    RESUME = "resume"
    SPEED = "speed"
    SETTINGS = "settings"


class Verdict(StrEnum):
    """ok: nothing found. finding: a fault. unknown: could not judge. skipped: not requested."""

    OK = "ok"
    FINDING = "finding"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


class PartVerdict(msgspec.Struct, frozen=True):
    """The verdict of one part, with a one-line `summary` and one line for each of `findings`. `mark`: the
    word in the table, if it is more specific than the verdict (`risky`, `slower`)."""

    part: Part
    verdict: Verdict
    summary: str
    findings: list[str] = []
    mark: str = ""
    seconds: float = 0.0

    @property
    def word(self) -> str:
        """Return the word in the table."""
        words = {Verdict.UNKNOWN: "unknown", Verdict.SKIPPED: "-"}
        found = str(len(self.findings)) if self.findings else self.verdict.value
        return self.mark or words.get(self.verdict, found)


class Proof(msgspec.Struct, frozen=True):
    """The verdicts of all requested parts."""

    script: str
    gpus: int
    hardware: str
    parts: list[PartVerdict]
    schema: int = SCHEMA

    @property
    def exit_code(self) -> ExitCode:
        """Return 1 for a finding, else 3 if a part could not judge or no part ran, else 0."""
        found = {each.verdict for each in self.parts}
        if Verdict.FINDING in found:
            return ExitCode.REGRESSION
        if Verdict.UNKNOWN in found or Verdict.OK not in found:
            return ExitCode.CANNOT_JUDGE
        return ExitCode.OK

    def as_text(self) -> str:
        """Return the table: a line for each part, findings below it."""
        lines = []
        for each in self.parts:
            lines.append(f"{each.part.value:<11} {each.word:<8} {each.summary}")
            lines += [f"{'':<20} {line}" for line in each.findings]
        return "\n".join(lines)

    def as_markdown(self) -> str:
        """Return the table as Markdown, with the findings in its last column."""
        place = f"`{_cell(self.script)}` on {self.gpus} simulated GPUs ({_cell(self.hardware)})"
        lines = [f"**{_OUTCOMES[self.exit_code]}**: {place}", "", "| part | | |", "|---|---|---|"]
        for each in self.parts:
            said = "<br>".join(_cell(line) for line in (each.summary, *each.findings))
            lines.append(f"| {each.part.value} | {each.word} | {said} |")
        return "\n".join(lines)

    def as_junit(self) -> str:
        """Return JUnit XML: a test case for each part."""
        tags = {Verdict.FINDING: "failure", Verdict.UNKNOWN: "error", Verdict.SKIPPED: "skipped"}
        count = {verdict: str(sum(each.verdict is verdict for each in self.parts)) for verdict in tags}
        named = zip(("failures", "errors", "skipped"), count.values(), strict=True)
        name = printable_lines(f"fsdpbench prove {self.script}")
        suite = ElementTree.Element("testsuite", {"name": name, "tests": str(len(self.parts)), **dict(named)})
        for each in self.parts:
            about = {"classname": "prove", "name": each.part.value, "time": f"{each.seconds:.1f}"}
            case = ElementTree.SubElement(suite, "testcase", about)
            if each.verdict in tags:
                said = {"message": printable_lines(each.summary)}
                below = ElementTree.SubElement(case, tags[each.verdict], said)
                below.text = printable_lines("\n".join(each.findings))
        return ElementTree.tostring(suite, encoding="unicode")


def write_page(path: Path, proof: Proof) -> None:
    """Write the proof as a self-contained HTML page. Raises `OSError`."""
    from fsdpbench.reports.pages import shell  # slow, and only the page needs it

    template, outcome = "answers/prove/page.html.jinja", _OUTCOMES[proof.exit_code]
    shell.write_page(path, template, draws=False, proof=proof, outcome=outcome)


_OUTCOMES = ("Nothing found", "Findings", "", "Not judged as a whole")  # by exit code


def _cell(text: str) -> str:
    """Escape text so that it cannot end a Markdown cell or form an HTML tag."""
    return html.escape(one_line(text), quote=False).replace("|", "\\|").replace("`", "'")


def shown(names: Sequence[str]) -> str:
    """Return the first few `names` of parameters as text."""
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")


def judged(part: Part, findings: Sequence[str], summary: str, mark: str = "") -> PartVerdict:
    """Return the verdict of a part that could judge."""
    verdict = Verdict.FINDING if findings else Verdict.OK
    return PartVerdict(part, verdict, summary, list(findings), mark)


def unknown(part: Part, why: str, findings: Sequence[str] = ()) -> PartVerdict:
    """Return the verdict of a part that could not judge; a finding if there are `findings` already."""
    verdict = Verdict.FINDING if findings else Verdict.UNKNOWN
    return PartVerdict(part, verdict, f"could not judge: {why}", list(findings))
