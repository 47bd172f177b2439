"""A report as an object: its text, its figures, and what a notebook shows of it."""
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from ._run import PathLike, said
from ._shown import table as shown_table
from ._shown import text

# What most look at first; the others are one click away.
_OPEN = ("memory", "owners", "call_sites")


class Verdict(NamedTuple):
    """What a report begins with. Texts are for people and may change; `kind` does not (docs/JSON.md)."""

    #: `"out_of_memory"`, `"grew"`, `"wasted"`, ..., `"nothing_wrong"`.
    kind: str
    #: What people call its cause.
    cause: Optional[str]
    #: What happened, with its figures.
    what: Optional[str]
    #: The line that did it.
    where: Optional[str]
    #: How sure that is.
    sure: Optional[str]
    #: What to change, and what that would do.
    fix: Optional[str]
    #: The command to ask next.
    next: Optional[str]
    #: What else was found.
    also: Tuple[str, ...]
    #: The report's first line behind `Verdict: `.
    title: str

    def __str__(self) -> str:
        return "\n".join([f"Verdict: {self.title}"] + [f"  {name:<5}  {line}" for name, line in self._lines()])

    def _lines(self) -> List[Tuple[str, str]]:
        named = [(name, getattr(self, name)) for name in ("what", "where", "sure", "fix", "next")]
        return [(name, line) for name, line in named if line] + [("also", line) for line in self.also]

    def _repr_html_(self) -> str:
        lines = "".join(f'<tr><th align="left">{name}</th><td align="left">{text(line)}</td></tr>' for name, line in self._lines())
        return f"<p><b>Verdict: {text(self.title)}</b></p><table><tbody>{lines}</tbody></table>"


class Table(List[Dict[str, Any]]):
    """A table of a report: a list of dictionaries, which a notebook shows as a table. Numbers are integers, or floats from 0 to 1
    for shares; what is not known is `None`."""

    def _repr_html_(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row))
        return shown_table(names, self)


class Report:
    """The report of a trace. `str` and `repr` are its text, as `gputrace report` prints it."""

    def __init__(self, trace: PathLike) -> None:
        self.trace = os.fspath(trace)
        columns = shutil.get_terminal_size((100, 24)).columns
        # Each reads the trace once.
        with ThreadPoolExecutor(2) as both:
            written = both.submit(said, "report", "--color", "never", self.trace, columns=columns)
            figures = both.submit(said, "report", "--json", self.trace)
            #: The report as text.
            self.text: str = written.result()
            #: The report as `gputrace report --json` writes it (docs/schemas/report.v1.json).
            self.json: Dict[str, Any] = json.loads(figures.result())

    @property
    def verdicts(self) -> List[Verdict]:
        """The verdict of each process, where there is one."""
        return [_verdict(process["verdict"]) for process in self.json["processes"] if "verdict" in process]

    @property
    def verdict(self) -> Optional[Verdict]:
        """The verdict of the trace, or of the first of a folder's; `verdicts` has all of them."""
        return next(iter(self.verdicts), None)

    @property
    def tables(self) -> Dict[str, Table]:
        """All tables by name (`"owners"`, `"call_sites"`, ...). With several processes, the first column is the process."""
        tables: Dict[str, Table] = {}
        processes = self.json["processes"]
        for process in processes:
            of = {"pid": process.get("pid")} if len(processes) > 1 else {}
            for section in process["sections"]:
                for name, rows in _tables(section).items():
                    tables.setdefault(name, Table()).extend({**of, **row} for row in rows)
        return tables

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text.rstrip("\n")

    def _repr_html_(self) -> str:
        return "".join(_process(process) for process in self.json["processes"])


def report(trace: PathLike) -> Report:
    """The report of a trace, of a PyTorch snapshot, or of a folder of them.

    `print(gputrace.report("train.gtr"))` is what `gputrace report train.gtr` prints, `.verdict` its first lines, `.json` all of its
    figures and `.tables` its tables. A notebook shows the verdict and the tables.
    """
    return Report(trace)


def _verdict(said: Dict[str, Any]) -> Verdict:
    fix = said.get("fix")
    if fix and said.get("fix_remark"):
        fix = f"{fix} ({said['fix_remark']})"
    return Verdict(
        kind=said["kind"],
        cause=said.get("cause"),
        what=said.get("what"),
        where=said.get("call_site"),
        sure=said.get("confidence"),
        fix=fix,
        next=said.get("next"),
        also=tuple(said["also"]),
        title=said["title"],
    )


def _tables(section: Dict[str, Any]) -> Dict[str, List[Dict[str, Any]]]:
    return {name: value for name, value in section.items() if isinstance(value, list) and value and isinstance(value[0], dict)}


def _process(process: Dict[str, Any]) -> str:
    pid = "" if process.get("pid") is None else f" (pid {process['pid']})"
    parts = [f"<p>{text(process.get('trace', ''))}{pid}: {text(' '.join(process.get('command', [])))}</p>"]
    if "verdict" in process:
        parts.append(_verdict(process["verdict"])._repr_html_())
    for section in process["sections"]:
        said_of_it = [f"warning: {line}" for line in section.get("warnings", [])] + section.get("notes", [])
        notes = "".join(f"<p>{text(line)}</p>" for line in said_of_it)
        inside = notes + "".join(Table(rows)._repr_html_() for rows in _tables(section).values())
        if inside:
            is_open = " open" if section["name"] in _OPEN else ""
            parts.append(f"<details{is_open}><summary>{text(section['name'].replace('_', ' '))}</summary>{inside}</details>")
    return "".join(parts)
