"""Prompts of the sampler: lines of a file, and their messages, with images among them."""

from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.io.files import parse_line
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


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message's content, where it is no text alone."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def as_chat(row: dict[str, Any], system: list[dict[str, Any]]) -> dict[str, Any]:
    """A row with messages, the system message first where there is one."""
    if "messages" in row:
        return row | {"messages": [*system, *row["messages"]]}
    return {name: value for name, value in row.items() if name != "prompt"} | {
        "messages": [*system, {"role": "user", "content": row["prompt"]}]
    }


def with_images(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The conversation with so many images before the text of its first message of the user, unless messages say where
    they are. UserError where there is no such message."""
    if not count or any(isinstance(message.get("content"), list) for message in messages):
        return messages
    at = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None:
        raise UserError("the conversation has no message of the user, before whose text its images would be")
    parts = [*[{"type": "image"}] * count, {"type": "text", "text": messages[at].get("content")}]
    # templates that take parts take them for all messages
    own = [{**m, "content": [{"type": "text", "text": m["content"]}]} if m.get("content") else m for m in messages]
    return [*own[:at], {**messages[at], "content": parts}, *own[at + 1 :]]
