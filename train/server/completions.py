"""`/v1/completions`: prompts of text or token ids, continued."""

from collections.abc import Callable
from typing import Any

from fnmodels.errors import UserError
from train.data.turns.image_rows import check_causal

from .answers import Asked, Piece, TokenNats
from .body import Body
from .errors import ApiError, sentence
from .grammar import Grammars
from .model import Model, Prompt
from .sampled import HARMLESS, LIKELIEST, WITHOUT_EFFECT, drawn

PROMPTS = 1024  # of one request
MUST = f"a text, a list of token ids, or a list of at most {PROMPTS} of either"
NEW = 16  # tokens of an answer, unless the request says how many


def asked_of(body: Body, model: Model, grammars: Grammars, check_room: Callable[[int], None]) -> Asked:
    """Reads a request for completions. ApiError names the field that is wrong. check_room: of the worker."""
    how = drawn(body, model, grammars)
    given = _prompts(body)
    max_new = body.integer("max_tokens", NEW)
    nats, echo = body.integer("logprobs", high=LIKELIEST), body.flag("echo")
    scored = echo and nats is not None
    check_room(len(given) * how.n + (len(given) if scored else 0))  # before anything is made
    if scored:
        _check_scores(model)
    if not max_new and not echo:
        raise ApiError(400, "max_tokens is 0, which needs echo: nothing would be answered.", param="max_tokens")
    body.finish(WITHOUT_EFFECT, HARMLESS)
    prompts = [_prompt(one, body, model) for one in given]
    requests = how.requests(prompts, max_new, nats or 0) if max_new else []
    return Asked(prompts, requests, how.n, nats, echo, how.stream, how.usage)


def _check_scores(model: Model) -> None:
    try:
        check_causal(model.served.config, "echo with logprobs")
    except UserError as error:
        raise ApiError(400, sentence(str(error)), param="echo") from error


def _prompts(body: Body) -> list[Any]:
    given: Any = body.take("prompt")
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not 0 < len(given) <= PROMPTS:
        raise body.wrong("prompt", MUST)
    return given


def _prompt(given: Any, body: Body, model: Model) -> Prompt:
    if isinstance(given, str):
        return model.text_prompt(given)
    if not isinstance(given, list) or not given:
        raise body.wrong("prompt", MUST)
    if not all(type(one) is int and 0 <= one < model.vocab_size for one in given):
        raise body.wrong("prompt", f"of token ids from 0 to {model.vocab_size - 1}")
    return Prompt(given, model.tokenizer.decode(given, skip_special_tokens=False))


class CompletionForm:
    """The form of `/v1/completions`.

    Args:
        model: Whose tokens have texts.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: Model) -> None:
        self._model = model

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """A complete choice."""
        return self.chunk(piece, 0, asked, 0)

    def chunk(self, piece: Piece, choice: int, asked: Asked, offset: int) -> dict[str, Any]:
        """A part of a choice."""
        nats = None if asked.nats is None else self._nats(piece.tokens, offset)
        return {"text": piece.text, "logprobs": nats, "finish_reason": piece.reason}

    def _nats(self, tokens: list[TokenNats], offset: int) -> dict[str, Any]:
        texts, offsets = [self._text(one.token) for one in tokens], list[int]()
        for one in tokens:
            offsets.append(offset)
            offset += len(self._model.token_bytes.of(one.token).decode(errors="replace"))
        best = [None if one.logp is None else self._by_text(one.likeliest) for one in tokens]
        values = [one.logp for one in tokens]
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": best, "text_offset": offsets}

    def _text(self, token: int) -> str:
        """The text of a token; a part of a character as bytes:\\xe4, the form that OpenAI's servers write."""
        data = self._model.token_bytes.of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _by_text(self, likeliest: Any) -> dict[str, float]:
        """{text: log-probability}, of tokens with the same text that of the likeliest."""
        found: dict[str, float] = {}
        for token, logp in likeliest:
            found.setdefault(self._text(token), logp)
        return found
