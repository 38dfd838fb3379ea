"""python -m train.cache: shows what the cache holds and how much of the disk it takes; --clear removes it."""

import argparse
from collections.abc import Sequence
from datetime import date

from fnmodels.files import cache_folder
from train.command_line import Parser, program_name, run_command
from train.data.cache import KINDS, cached_files, clear, unfinished


def _name() -> str:
    return program_name("fnmodels-cache", "train.cache")


def parser() -> Parser:
    flags = Parser(
        prog=_name(),
        description="Show the cached tokenizers, token ids and rates, which runs share and make again where they are "
        "missing, and their sizes.",
    )
    flags.add_argument("--clear", action="store_true", help="remove them, and what killed writers left")
    return flags


def run(arguments: argparse.Namespace) -> int:
    files = clear() if arguments.clear else cached_files()
    for kind, what in KINDS.items():
        if own := [file for file in files if file.kind == kind]:
            last = date.fromtimestamp(max(file.used for file in own)).isoformat()
            print(f"{_size(sum(file.size for file in own)):>10}  {_counted(len(own))}, last used {last}: {what}")
    done = "removed from" if arguments.clear else "in"
    print(f"{_size(sum(file.size for file in files)):>10}  {_counted(len(files))} {done} {cache_folder()}")
    if left := len(unfinished()):
        print(f"{left} being written, or left by a process that was killed less than a minute ago")
    return 0


def _counted(count: int) -> str:
    return f"{count:,} file{'' if count == 1 else 's'}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} GB"


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(_name(), parser, run, argv, needs=())
