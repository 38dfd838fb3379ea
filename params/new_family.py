"""The command that begins a family: its file and its test file, for a model type that nothing here reads yet.

    python -m params.new_family TYPE                 the example of docs/adding-a-family.md
    python -m params.new_family TYPE --like mixtral  a family that exists, to be changed (one with experts, say)

Run it in the root of a checkout. `python -m tests.support.find_seeds TYPE` finds the seeds of a family with experts: it
needs transformers as the reference, and therefore lives with the tests.
"""

import argparse
import ast
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fnmodels.errors import UserError
from fnmodels.models.common.family import model_types
from fnmodels.models.common.registry import families, family_for

from .command_line import Parser, run_command

PAGE = Path("docs", "adding-a-family.md")
FOLDERS = (Path("fnmodels", "models", "decoder"), Path("fnmodels", "models", "encoder"))
VARIANTS = Path("tests", "variants")


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
    if not (PAGE.is_file() and FOLDERS[0].is_dir() and VARIANTS.is_dir()):
        raise UserError(f"there is no {PAGE} here: run the command in the root of a checkout of this repository")
    texts = skeletons(name, arguments.like)
    for path in texts:
        if path.exists():
            raise UserError(f"{path} is there already")
    for path, text in texts.items():
        path.write_text(text)
        print(f"wrote {path}")
    if arguments.like:
        types, default = _types_of(arguments.like)
        if rest := ", ".join(model_type for model_type in types if model_type != default):
            print(f"Remove from both what is there for {rest}: {arguments.like}.py reads these model types.")
    if "routed=True" in next(iter(texts.values())):
        print(f"Find the seeds of its variants with: .venv/bin/python -m tests.support.find_seeds {name}")
    print(f"{PAGE} says what to change. Test it with: .venv/bin/python -m pytest tests -k {name}")
    return 0


def skeletons(name: str, like: str | None = None) -> dict[Path, str]:
    """{path: text} of the family's file and of its test file."""
    if like is None:
        ours, theirs = FOLDERS[0] / f"{name}.py", VARIANTS / f"{name}.py"
        page = PAGE.read_text()
        family, variants = re.findall(r"^```python\n(.*?)^```\n", page, re.MULTILINE | re.DOTALL)[:2]
        return {ours: _renamed(family, "example", name), theirs: _renamed(variants, "example", name)}
    files = {path.stem: path for folder in FOLDERS for path in folder.glob("*.py") if path.stem != "__init__"}
    if like not in files:
        raise UserError(f"there is no family {like!r}; there are {', '.join(sorted(files))}")
    types, default = _types_of(like)
    family = _without_claims(files[like].read_text(), name)
    ours, theirs = files[like].with_stem(name), VARIANTS / f"{name}.py"
    texts = {ours: family, theirs: (VARIANTS / f"{like}.py").read_text()}
    return {path: _renamed(text, default, name, types) for path, text in texts.items()}


def _types_of(like: str) -> tuple[list[str], str]:
    """The model types of a family, and the one that its Config has by default."""
    types = [model_type for model_type, module in families().items() if module.endswith(f".{like}")]
    family = family_for(types[0])
    return types, family.Config.__dataclass_fields__["model_type"].default or model_types(family)[0]


def _without_claims(text: str, name: str) -> str:
    """The text of a family's file that claims the new model type only, and no presets."""
    lines = text.splitlines(keepends=True)
    for statement in reversed(ast.parse(text).body):
        assigned = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        targets = [target.value if isinstance(target, ast.Subscript) else target for target in assigned]
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        where = slice(statement.lineno - 1, statement.end_lineno)
        if "MODEL_TYPES" in names:
            lines[where] = [f'MODEL_TYPES = ("{name}",)\n']
        elif "PRESETS" in names:
            del lines[where]
    return "".join(lines).rstrip() + "\n"


def _renamed(text: str, old: str, new: str, types: Sequence[str] = ()) -> str:
    """The text with the model type replaced in quotes, also where a name begins with it, and in the names of classes.

    types: all model types of the family; the others stay, also those that begin with the old one.
    """
    before, after = ("".join(part.capitalize() for part in re.split("[_-]", name)) for name in (old, new))
    spoken = {name.replace("-", "_"): name for name in (old, *types)}  # as names of variants have it
    known = "|".join(sorted({*spoken, *spoken.values()}, key=len, reverse=True))
    quoted = re.sub(rf'"({known})(?=["_])', lambda m: f'"{new}' if spoken.get(m[1], m[1]) == old else m[0], text)
    return quoted.replace(before, after)


if __name__ == "__main__":
    sys.exit(main())
