"""Prompts of the sampler: lines of a file, and their messages, with images among them."""

from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.io.files import parse_line
from train.data.turns.pictured import parts_of
from train.data.turns.said import fault_beside

_UNREAD = {"video", "video_url", "audio", "audio_url", "input_audio"}  # types of parts of messages


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, each with a text "prompt" or a list "messages". UserError names the line."""
    rows = []
    for number, line in enumerate(read_text(path, follow=True).split("\n"), 1):  # not splitlines: U+2028 is text
        if not line.strip():
            continue
        try:
            row = parse_line(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number} is not JSON ({error})") from error
        if not isinstance(row, dict) or not (
            isinstance(row.get("prompt"), str) ^ bool(isinstance(row.get("messages"), list) and row["messages"])
        ):
            raise UserError(f'{path}, line {number} must be an object with either a text "prompt" or "messages"')
        if fault := fault_beside(row):
            raise UserError(f"{path}, line {number}: {fault}")
        for message in row.get("messages", []):
            if not isinstance(message, dict):
                raise UserError(f'{path}, line {number}: each of "messages" must be an object')
            if unread := _UNREAD & {str(part.get("type")) for part in parts_of(message)}:
                raise UserError(f"{path}, line {number}: a message has {min(unread)!r}; text and images are read")
        names = row.get("images", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise UserError(f'{path}, line {number}: "images" must be a list of names of files')
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no prompts")
    return rows


def as_chat(row: dict[str, Any], system: list[dict[str, Any]]) -> dict[str, Any]:
    """A row with messages, the system message first where there is one."""
    if "messages" in row:
        return row | {"messages": [*system, *row["messages"]]}
    return {name: value for name, value in row.items() if name != "prompt"} | {
        "messages": [*system, {"role": "user", "content": row["prompt"]}]
    }
