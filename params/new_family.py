"""The command that begins a family: its file and its test file, for a model type that nothing here reads yet.

    python -m params.new_family TYPE                 the example of docs/adding-a-family.md
    python -m params.new_family TYPE --like mixtral  a family that exists, to be changed (one with experts, say)

Run it in the root of a checkout. `python -m tests.support.find_seeds TYPE` finds the seeds of a family with experts: it
needs transformers as the reference, and therefore lives with the tests.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fnmodels.errors import UserError
from fnmodels.models.common.registry import families

from .command_line import Parser, run_command

PAGE = Path("docs", "adding-a-family.md")
FAMILIES, VARIANTS = Path("fnmodels", "models"), Path("tests", "variants")


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files; returns the exit code."""
    return run_command("python -m params.new_family", _parser, _write, argv)


def _parser() -> Parser:
    parser = Parser(prog="python -m params.new_family", description="Begin a family: its file and its test file.")
    parser.add_argument("model_type", metavar="TYPE", help="the model_type of its config.json")
    parser.add_argument("--like", metavar="FAMILY", help="a family to copy (default: the example of the documentation)")
    return parser


def _write(arguments: argparse.Namespace) -> int:
    name = arguments.model_type
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{name!r} is no model type: these are lower case letters, digits and underscores")
    if name in (known := families()):
        raise UserError(f"the model type {name!r} is read by {known[name]} already")
    if not (PAGE.is_file() and FAMILIES.is_dir() and VARIANTS.is_dir()):
        raise UserError(f"there is no {PAGE} here: run the command in the root of a checkout of this repository")
    texts = skeletons(name, arguments.like)
    for path in texts:
        if path.exists():
            raise UserError(f"{path} is there already")
    for path, text in texts.items():
        path.write_text(text)
        print(f"wrote {path}")
    print(f"{PAGE} says what to change. Test it with: .venv/bin/python -m pytest tests -k {name}")
    return 0


def skeletons(name: str, like: str | None = None) -> dict[Path, str]:
    """{path: text} of the family's file and of its test file."""
    ours, theirs = FAMILIES / f"{name}.py", VARIANTS / f"{name}.py"
    if like is None:
        page = PAGE.read_text()
        family, variants = re.findall(r"^```python\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)[:2]
        return {ours: _renamed(family, "example", name), theirs: _renamed(variants, "example", name)}
    if not (FAMILIES / f"{like}.py").is_file():
        files = sorted(path.stem for path in FAMILIES.glob("*.py") if path.stem not in ("__init__", "presets"))
        raise UserError(f"there is no family {like!r}; there are {', '.join(files)}")
    types = [found for found, module in families().items() if module.endswith(f".{like}")]
    texts = {ours: (FAMILIES / f"{like}.py").read_text(), theirs: (VARIANTS / f"{like}.py").read_text()}
    return {path: _renamed(text, types[0], name) for path, text in texts.items()}


def _renamed(text: str, old: str, new: str) -> str:
    """The text with the model type replaced, also in the names of classes."""
    before, after = ("".join(part.capitalize() for part in one.split("_")) for one in (old, new))
    return text.replace(old, new).replace(before, after)


if __name__ == "__main__":
    sys.exit(main())
