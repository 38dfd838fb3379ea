"""Lines of JSON, one example each: the data of `python -m train.commands.documents`.

pairs      {"query": TEXT, "positive": TEXT, "negatives": [TEXT, ...]}    negatives may be left out
labels     {"text": TEXT, "label": TEXT or integer}
masked     {"text": TEXT}
captions   {"image": FILE, "text": TEXT}    the file of a picture, from the folder of the lines
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.io.files import parse_line

from .sampling import sample_rows


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_label(value: Any) -> bool:
    return _is_text(value) or (isinstance(value, int) and not isinstance(value, bool))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


# {kind of examples: {field: (whether a value fits, what fits)}}
_TEXT = (_is_text, "a text")
_KINDS: dict[str, dict[str, tuple[Callable[[Any], bool], str]]] = {
    "pairs": {"query": _TEXT, "positive": _TEXT, "negatives": (_are_texts, "a list of texts")},
    "labels": {"text": _TEXT, "label": (_is_label, "a text or an integer")},
    "masked": {"text": _TEXT},
    "captions": {"image": (_is_text, "the name of a file"), "text": _TEXT},
}
KINDS = tuple(_KINDS)
_OPTIONAL: dict[str, Any] = {"negatives": []}


def read_examples(path: Path, kind: str) -> list[dict[str, Any]]:
    """The examples in the file, of one of KINDS; UserError, with the line, for what does not fit. Other fields stay."""
    found = []
    for number, line in enumerate(read_text(path, follow=True).split("\n"), 1):  # not splitlines: U+2028 is text
        if not line.strip():
            continue
        try:
            values = parse_line(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: this is no JSON ({error})") from error
        if not isinstance(values, dict):
            raise UserError(f"{path}, line {number}: this is no JSON object")
        values = {**_OPTIONAL, **values}
        for name, (fits, what) in _KINDS[kind].items():
            if not fits(values.get(name)):
                raise UserError(f"{path}, line {number}: {name!r} must be {what}")
        found.append(values)
    if not found:
        raise UserError(f"{path} has no lines")
    return found


def label_numbers(examples: Sequence[dict[str, Any]]) -> dict[str | int, int]:
    """{label: its number}, sorted: numbers before texts."""
    labels = {one["label"] for one in examples}
    return {label: i for i, label in enumerate(sorted(labels, key=lambda value: (isinstance(value, str), value)))}


def chosen(examples: Sequence[dict[str, Any]], seed: int, step: int, count: int) -> list[dict[str, Any]]:
    """The examples of a step (from 0): all once, in an order that the seed gives, before any comes again."""
    return [examples[row] for _, row, _ in sample_rows([len(examples)], [1], seed, step, count)]
