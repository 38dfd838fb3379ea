"""Runs a benchmark and keeps its tables: results/NAME.json, and from it the page results/NAME.md.

    python benchmarks/record.py moe.py --rounds 3      whatever follows the script are its own flags
    python benchmarks/record.py --pages                writes every page again from its JSON

A page begins with date, commit, CPU flags and command, then has the tables that the script printed; those of the same
columns are one table. What stands below the line NOTES is written by hand and stays: at most 300 words.
"""

from __future__ import annotations

import ast
import datetime
import json
import platform
import re
import shlex
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NOTES = "<!-- notes: written by hand -->"
FLAGS = ("avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


@dataclass(frozen=True)
class Table:
    """A table of Markdown. title: the line above it, "" without one."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class Record:
    """One run of a script. command: as typed in the root of the repository."""

    script: str
    date: str
    commit: str
    torch: str
    cpu_flags: str
    command: str
    tables: tuple[Table, ...]


def tables(printed: str) -> list[Table]:
    """The tables in what a script printed. Other lines may stand between the rows of one."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    title, lines = "", printed.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        cells = _cells(line)
        if cells and re.fullmatch(r"\|[-:| ]+\|", following.strip()):
            found.append((title, cells, []))
            title = ""
        elif cells and found and len(cells) == len(found[-1][1]):
            if not re.fullmatch(r"[-: |]+", line.strip()):
                found[-1][2].append(cells)
        elif line.strip():
            title = line.strip().strip("#:* ")
    return [Table(title, columns, tuple(rows)) for title, columns, rows in found if rows]


def _cells(line: str) -> tuple[str, ...]:
    line = line.strip()
    whole = line.startswith("|") and line.endswith("|") and len(line) > 1
    return tuple(cell.strip() for cell in line[1:-1].split("|")) if whole else ()


def joined(found: list[Table]) -> list[Table]:
    """Tables of the same columns as one, with their titles in a first column."""
    groups: dict[tuple[str, ...], list[Table]] = {}
    for table in found:
        groups.setdefault(table.columns, []).append(table)
    return [_join(same) if len(same) > 1 else same[0] for same in groups.values()]


def _join(same: list[Table]) -> Table:
    rows = tuple((table.title, *row) for table in same for row in table.rows)
    return Table("", ("of", *same[0].columns), rows)


def page(record: Record) -> str:
    """The page, up to and with the line NOTES."""
    facts = {
        "date": record.date,
        "commit": record.commit,
        "torch": record.torch,
        "CPU flags": record.cpu_flags,
        "command": f"`{record.command}`",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    parts = [f"# {record.script}", about(record.script), f"| run | |\n|---|---|\n{rows}"]
    for table in record.tables:
        parts += [table.title, table.markdown()] if table.title else [table.markdown()]
    return "\n\n".join([*parts, NOTES]) + "\n"


def about(script: str) -> str:
    """The first line of the script's docstring."""
    text = ast.get_docstring(ast.parse((HERE / script).read_text())) or ""
    return text.partition("\n")[0]


def read(path: Path) -> Record:
    """A record from its JSON file."""
    data = json.loads(path.read_text())
    found = (Table(t["title"], tuple(t["columns"]), tuple(map(tuple, t["rows"]))) for t in data.pop("tables"))
    return Record(**data, tables=tuple(found))


def write(record: Record, folder: Path) -> None:
    """Writes JSON and page. The notes of an existing page stay."""
    folder.mkdir(parents=True, exist_ok=True)
    name = Path(record.script).stem
    (folder / f"{name}.json").write_text(json.dumps(asdict(record), indent=1, ensure_ascii=False) + "\n")
    path = folder / f"{name}.md"
    notes = path.read_text().partition(NOTES)[2] if path.exists() else ""
    path.write_text(page(record).removesuffix("\n") + (notes or "\n"))


def run(script: str, flags: list[str], *, limit: float | None = None) -> Record:
    """Runs a script and shows what it prints. RuntimeError where it fails, prints no table or takes `limit` seconds."""
    command = [sys.executable, "-u", str(HERE / script), *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        timer = _Timer(process, limit)
        printed = [line for line in process.stdout if not print(line, end="", flush=True)]
        timer.cancel()
    found = joined(tables("".join(printed)))
    if process.returncode or not found:
        why = f"was stopped after {limit:.0f} s" if timer.over else f"ended with exit code {process.returncode}"
        raise RuntimeError(f"benchmarks/{script} {why}" + ("." if found else " and printed no table."))
    import torch

    typed = shlex.join(["python", f"benchmarks/{script}", *flags])
    date = datetime.date.today().isoformat()
    return Record(script, date, _commit(), torch.__version__, cpu_flags(), typed, tuple(found))


class _Timer:
    """Ends a process after some seconds. over: it did."""

    def __init__(self, process: subprocess.Popen[str], limit: float | None) -> None:
        import threading

        self.over = False
        self._process = process
        self._timer = threading.Timer(limit, self._end) if limit else None
        if self._timer:
            self._timer.start()

    def _end(self) -> None:
        self.over = True
        self._process.kill()

    def cancel(self) -> None:
        if self._timer:
            self._timer.cancel()


def cpu_flags() -> str:
    """The instruction sets that decide speed, and no name of a machine."""
    info = Path("/proc/cpuinfo")
    words = set(info.read_text().split()) if info.exists() else set()
    return " ".join(flag for flag in FLAGS if flag in words) or platform.machine()


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def main() -> None:
    if sys.argv[1:] == ["--pages"]:
        for path in sorted(RESULTS.glob("*.json")):
            write(read(path), RESULTS)
        return
    if len(sys.argv) < 2 or not (HERE / sys.argv[1]).is_file():
        raise SystemExit(f"{__doc__}\nThe first argument must be a script of {HERE}.")
    try:
        write(run(sys.argv[1], sys.argv[2:]), RESULTS)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
