"""How much of the families is text that stands in three of their files or more.

    python -m tests.support.repeated_lines

Counted are lines of 20 characters or more, imports aside. The interface of a family (the heads of `from_hf`, `spec`,
`block`) is most of it.
"""

from collections import Counter
from pathlib import Path

MODELS = Path(__file__).parents[2] / "fnmodels" / "models"
SHORTEST, FILES = 20, 3


def main() -> None:
    """Print the share, and the lines that most files have."""
    paths = [path for path in MODELS.glob("*/*.py") if path.parent.name != "common" and path.name != "__init__.py"]
    lines = [[line.strip() for line in path.read_text().splitlines() if not _is_import(line)] for path in paths]
    lines = [[line for line in own if len(line) >= SHORTEST] for own in lines]
    files = Counter(line for own in lines for line in set(own))
    repeated, total = sum(files[line] >= FILES for own in lines for line in own), sum(map(len, lines))
    print(f"{repeated:,} of {total:,} lines in {len(paths)} files stand in {FILES} or more: {repeated / total:.1%}")
    for line, count in files.most_common(20):
        print(f"{count:5} {line}")


def _is_import(line: str) -> bool:
    return line.lstrip().startswith(("import ", "from "))


if __name__ == "__main__":
    main()
