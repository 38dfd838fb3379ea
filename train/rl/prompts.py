"""Prompts of reinforcement learning, lines of JSON, and the checkers that judge the answers to them."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_bytes
from params.imported import place_raised
from params.io.files import parse_line
from train.data.pictures import BYTES_LIMIT
from train.data.turns.said import fault_beside
from train.imported import FunctionFailed, Imported, is_import_path

from .pictures import IMAGES, files_of

Record = Mapping[str, Any]
Checker = Callable[[str, Record], float]  # (answer, its prompt's record) -> reward
HELDOUT = 0.1  # of the prompts


def equal(answer: str, record: Record) -> float:
    """1 where the answer is the record's `answer`, apart from white space around it."""
    return float(answer.strip() == str(record["answer"]).strip())


def contains(answer: str, record: Record) -> float:
    """1 where the record's `answer` is in the answer."""
    return float(str(record["answer"]).strip() in answer)


def number(answer: str, record: Record) -> float:
    """1 where the last number of the answer equals the record's `answer`."""
    found = re.findall(r"-?\d+(?:\.\d+)?", answer)
    return float(bool(found) and float(found[-1]) == float(record["answer"]))


CHECKERS: dict[str, Checker] = {"equal": equal, "contains": contains, "number": number}


@dataclass(frozen=True)
class Prompts:
    """Records with `messages`, the last of which the model answers, perhaps "images", the files of their pictures, and
    what else their checker reads."""

    train: tuple[Record, ...]
    heldout: tuple[Record, ...]
    fingerprint: str

    @property
    def pictured(self) -> bool:
        """Whether a prompt has pictures."""
        return any(IMAGES in record for record in (*self.train, *self.heldout))


def read_prompts(path: Path, checker: str) -> Prompts:
    """The prompts of a file of JSON lines; one in ten, by a hash of its text, is held out.

    Args:
        path: The file.
        checker: The checker's name, for what it needs of a record.

    Returns:
        The prompts.

    Raises:
        UserError: A line is no prompt, or there are too few.
    """
    try:
        data = read_bytes(path, follow=True)
    except OSError as error:
        raise UserError(f"--data {path}: the file cannot be read ({error.strerror})") from error
    found: dict[str, Record] = {}
    for place, line in enumerate(data.splitlines(), 1):
        if line.strip():
            where = f"{path}, line {place}"
            record = _record(where, line, checker)
            key = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
            found[key] = {**record, **files_of(where, record, path.parent)}
    ordered = [found[key] for key in sorted(found)]
    count = max(1, round(len(ordered) * HELDOUT))
    if len(ordered) < 2:
        raise UserError(f"--data {path} has {len(ordered)} prompts: one must be held out, and others trained on")
    return Prompts(tuple(ordered[count:]), tuple(ordered[:count]), _fingerprint(data, ordered))


def _fingerprint(data: bytes, records: Sequence[Record]) -> str:
    """Of the file and of the pictures that it names."""
    found = hashlib.sha256(data)
    for name in dict.fromkeys(chain.from_iterable(record.get(IMAGES, ()) for record in records)):
        found.update(read_bytes(Path(name), BYTES_LIMIT, follow=True))
    return found.hexdigest()


def _record(place: str, line: bytes, checker: str) -> Record:
    try:
        value = parse_line(line)
    except ValueError as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise UserError(f"{place} has no list of `messages`, each with a role")
    if fault := fault_beside(value, "documents"):  # a checker of the user's may read those
        raise UserError(f"{place}: {fault}")
    if checker in CHECKERS and "answer" not in value:
        raise UserError(f"{place} has no `answer`, with which --checker {checker} compares")
    return dict(value)


def checker_of(name: str) -> Checker:
    """A checker by its name, or a function f(answer, record) -> reward by its import path. UserError.

    An exception of such a function, or what is no number, becomes FunctionFailed.
    """
    if name in CHECKERS:
        return CHECKERS[name]
    if not is_import_path(name):
        raise UserError(f"--checker {name}: it is none of {', '.join(CHECKERS)}, and no function as module:name")
    function = Imported(name, "--checker").function

    def judge(answer: str, record: Record) -> float:
        try:
            return float(function(answer, record))
        except Exception as error:
            raise FunctionFailed.of(f"--checker {name}", error, place=place_raised(error)) from error

    return judge
