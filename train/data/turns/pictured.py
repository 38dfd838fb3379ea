"""Where the images of a conversation stand in its messages."""

from typing import Any

from fnmodels.errors import UserError


def parts_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a message's content, where it is no text alone."""
    content = message.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


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
