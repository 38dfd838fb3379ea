"""`/v1/chat/completions`: conversations, rendered by the checkpoint's chat template."""

from collections.abc import Callable
from typing import Any

from .answers import Asked, Piece, TokenNats
from .body import Body
from .calls import CallStream, parted, tools_of
from .errors import ApiError
from .grammar import Grammars
from .model import PICTURES, Model
from .sampled import HARMLESS, LIKELIEST, WITHOUT_EFFECT, drawn

# variables that a request does not set: the conversation's own, and the arguments of `render_prompt`
OWN = {"messages", "prompt", "add_generation_prompt", "tools", "documents", "template"}


def asked_of(body: Body, model: Model, grammars: Grammars, check_room: Callable[[int], None], capacity: int) -> Asked:
    """Reads a chat request. ApiError names the field that is wrong.

    check_room: of the worker. capacity: tokens of prompt and answer at most, which an answer may fill unless the
    request says otherwise.
    """
    how = drawn(body, model, grammars)
    check_room(how.n)
    messages, urls = _messages(body)
    extra: Any = body.take("chat_template_kwargs", {})
    if not isinstance(extra, dict) or extra.keys() & OWN:
        raise body.wrong("chat_template_kwargs", f"an object without {', '.join(sorted(OWN))}")
    likeliest = body.integer("top_logprobs", high=LIKELIEST)
    if not body.flag("logprobs"):
        if likeliest:
            raise body.wrong("top_logprobs", "left out where logprobs is not true")
        nats = None
    else:
        nats = likeliest or 0
    tools = tools_of(body, model)
    max_new = _limit(body)
    body.finish(WITHOUT_EFFECT, HARMLESS)
    prompt = model.chat_prompt(messages, urls, extra | {"tools": tools} if tools else extra)
    max_new = max(1, capacity - len(prompt.ids)) if max_new is None else max_new
    requests = how.requests([prompt], max_new, nats or 0)
    return Asked([prompt], requests, how.n, nats, False, how.stream, how.usage, bool(tools))


def _limit(body: Body) -> int | None:
    """The tokens of an answer, by its old name or its new one."""
    old, new = (body.integer(name, low=1) for name in ("max_tokens", "max_completion_tokens"))
    if None not in (old, new) and old != new:
        raise body.wrong("max_completion_tokens", f"left out, or max_tokens, which is {old}")
    return old if new is None else new


def _messages(body: Body) -> tuple[list[dict[str, Any]], list[str]]:
    """(the messages as templates read them, the URLs of their pictures in order)."""
    given: Any = body.take("messages")
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise body.wrong("messages", "a list of at least one object")
    urls: list[str] = []
    messages = [_message(i, one, urls) for i, one in enumerate(given)]
    if len(urls) > PICTURES:
        raise ApiError(400, f"messages has {len(urls)} images; there are at most {PICTURES}.", param="messages")
    if urls:  # templates that take parts take them for all messages
        for one in messages:
            if isinstance(one.get("content"), str):
                one["content"] = [{"type": "text", "text": one["content"]}]
    return messages, urls


def _message(number: int, given: dict[str, Any], urls: list[str]) -> dict[str, Any]:
    where = f"messages[{number}]"
    message = {name: value for name, value in given.items() if value is not None}
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where} has no role: it must be system, user or assistant.", param="messages")
    if message["role"] == "developer":  # OpenAI's later name
        message["role"] = "system"
    content = message.get("content", "")
    if isinstance(content, list):
        parts = [_part(f"{where}.content[{i}]", one, urls) for i, one in enumerate(content)]
        only_text = all(one["type"] == "text" for one in parts)
        message["content"] = "\n".join(one["text"] for one in parts) if only_text else parts
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}.content must be a text or a list of parts.", param="messages")
    return message


def _part(where: str, given: Any, urls: list[str]) -> dict[str, Any]:
    part = Body(given if isinstance(given, dict) else {}, f"{where}.")
    kind, found = part.take("type"), None
    if kind == "text" and isinstance(text := part.take("text"), str):
        found = {"type": "text", "text": text}
    if kind == "image_url" and isinstance(url := _url(part, where), str):
        urls.append(url)
        found = {"type": "image"}
    if found is None:
        must = "must be a part of type text or image_url, with a text or a URL"
        raise ApiError(400, f"{where} {must}.", param="messages")
    part.finish(harmless=("cache_control",))  # what other servers keep of a prompt, which changes no token
    return found


def _url(part: Body, where: str) -> Any:
    """The URL of a picture, which may stand in an object."""
    given = part.take("image_url")
    if not isinstance(given, dict):
        return given
    picture = Body(given, f"{where}.image_url.")
    url = picture.take("url")
    picture.finish(harmless=("detail",))
    return url


def _reason(piece: Piece, calls: list[dict[str, Any]]) -> str | None:
    return "tool_calls" if calls and piece.reason == "stop" else piece.reason


class ChatForm:
    """The form of `/v1/chat/completions`.

    Args:
        model: Whose tokens have texts.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, model: Model) -> None:
        self._model, self._streams = model, dict[int, CallStream]()

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """A complete choice."""
        content, calls = parted(piece.text) if asked.calls else (piece.text, [])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        reason = _reason(piece, calls)
        return {"message": message, "logprobs": self._nats(piece, asked), "finish_reason": reason}

    def chunk(self, piece: Piece, choice: int, asked: Asked, offset: int) -> dict[str, Any] | None:
        """A part of a choice; None where a call may have begun, which is sent when the choice has ended."""
        first = choice not in self._streams
        stream = self._streams.setdefault(choice, CallStream())
        text, calls = piece.text, list[dict[str, Any]]()
        if asked.calls:
            text, calls = stream.push(piece.text, ended=piece.reason is not None)
            if not (first or text or calls or piece.reason or piece.tokens):
                return None
        delta: dict[str, Any] = ({"role": "assistant"} if first else {}) | {"content": text}
        if calls:
            delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
        reason = _reason(piece, calls)
        return {"delta": delta, "logprobs": self._nats(piece, asked), "finish_reason": reason}

    def _nats(self, piece: Piece, asked: Asked) -> dict[str, Any] | None:
        if asked.nats is None:
            return None
        content = []
        for one in piece.tokens:
            best = [self._token(TokenNats(token, logp)) for token, logp in one.likeliest]
            content.append(self._token(one) | {"top_logprobs": best})
        return {"content": content, "refusal": None}

    def _token(self, one: TokenNats) -> dict[str, Any]:
        data = self._model.token_bytes.of(one.token)  # a part of a character has no text of its own
        return {"token": data.decode(errors="replace"), "logprob": one.logp, "bytes": list(data)}
