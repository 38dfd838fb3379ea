"""Supervised fine-tuning on conversations: the tokenizer's own chat template, and loss on the assistant's turns alone.

    template = read_template("checkpoint")
    example = encode_chat(tokenizer, template, messages)  # [{"role": "user", "content": "2+2?"}, ...]
    packed = fnmodels.pack([example.tokens], length, weights=[example.learnt.float()])

What the assistant says is found in the rendered text, and the text is tokenized once and whole, as the model will see
it: a conversation tokenized turn by turn has other tokens at the seams.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import torch
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.inputs.packing import IGNORE
from params.io.files import read_json

from .encoder import Talk, encode_talks

Message = Mapping[str, Any]

TOKENIZER_CONFIG = "tokenizer_config.json"
BEGIN, STOP = "\ufdd0", "\ufdd1"  # around what a template marks; Unicode keeps them out of every text


class RewrittenError(UserError):
    """A template renders a turn of the assistant differently once others follow it."""


@dataclass(frozen=True)
class Template:
    """A chat template (Jinja source), the special tokens that it may name, and the day (ISO) that it may tell: today's
    where there is none.
    """

    source: str
    special: Mapping[str, str]
    day: str | None = None

    @property
    def tells_the_day(self) -> bool:
        return "strftime_now" in self.source


@dataclass(frozen=True)
class Example:
    """tokens [S] of a conversation, and which of them the assistant says: `learnt`, bool [S]."""

    tokens: Tensor
    learnt: Tensor

    @property
    def labels(self) -> Tensor:
        """[S], already shifted: the next token if it is learnt, else -100."""
        said = torch.where(self.learnt, self.tokens, IGNORE)
        return torch.cat([said[1:], torch.tensor([IGNORE])])


def read_template(folder: str | Path) -> Template:
    """The template of a checkpoint folder: chat_template.jinja, or `chat_template` in tokenizer_config.json."""
    folder = Path(folder)
    own = folder / "chat_template.jinja"
    try:
        source = own.read_text(encoding="utf-8") if own.exists() else _tokenizer_config(folder).get("chat_template")
    except UnicodeDecodeError as error:
        raise UserError(f"{own} is not UTF-8 text") from error
    if isinstance(source, list):  # several named ones; "default" is for conversation
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        raise UserError(f"{folder} has no chat template: neither {own.name} nor 'chat_template' in {TOKENIZER_CONFIG}")
    return Template(source, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """Those that a chat template may name, {"bos_token": "<s>", ...}, as the folder's files give them."""
    tokens = {name: value for name, value in _tokenizer_config(folder).items() if name.endswith("_token")}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}  # "add_bos_token" is a bool


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Empty where there is no such file. Older folders have special tokens in a file of their own."""
    values: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / TOKENIZER_CONFIG):
        found = read_json(path) if path.exists() else {}
        if not isinstance(found, dict):
            raise UserError(f"{path} holds no JSON object")
        values |= found
    return values


def render(template: Template, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
    """The text of a conversation; prompt: up to where the assistant begins. UserError where the template refuses."""
    return _unmarked(_rendered(template, messages, prompt=prompt, **extra))[0]


def _rendered(template: Template, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
    try:
        given: dict[str, Any] = {"tools": None, "documents": None, **template.special, **extra}  # as in transformers
        given["strftime_now"] = (datetime.fromisoformat(template.day) if template.day else datetime.now()).strftime
        return _compiled(template.source).render(messages=list(messages), add_generation_prompt=prompt, **given)
    except Exception as error:  # a template is a program of somebody else's, and may fail as any program can
        raise UserError(f"the chat template cannot render the conversation: {error}") from error


@lru_cache(maxsize=1)  # compiling takes longer than rendering, and one template renders a whole data set
def _compiled(source: str) -> jinja2.Template:
    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(source)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark what is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return BEGIN + caller() + STOP


def _unmarked(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and where what they enclose stands in it."""
    pieces, found, size = re.split(f"([{BEGIN}{STOP}])", text), [], 0
    if pieces[1::2] != [BEGIN, STOP] * (len(pieces) // 4):
        raise UserError("the chat template marks the assistant's part inside of the assistant's part")
    for number, piece in enumerate(pieces[::2]):
        if number % 2:
            found.append((size, size + len(piece)))
        size += len(piece)
    return "".join(pieces[::2]), found


def _json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in transformers; jinja2's own writes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def spans(
    template: Template, messages: Sequence[Message], *, last: bool = False, **extra: Any
) -> tuple[str, list[tuple[int, int]]]:
    """(the rendered text, where each of the assistant's turns stands in it, the end of the turn included).

    A template that marks them with {% generation %} is taken at its word, as transformers does. Else a turn is what the
    text up to it gains over the text that ends with the assistant's cue; with `last` the last message's only.
    RewrittenError where a template renders a turn differently once others follow it (dropping earlier thoughts, say):
    then nothing says what to learn.
    """
    whole, found = _unmarked(_rendered(template, messages, **extra))
    if found:
        return whole, found
    for index, message in enumerate(messages):
        if message.get("role") != "assistant" or (last and index + 1 < len(messages)):
            continue
        before = render(template, messages[:index], prompt=True, **extra)
        if index == 0 and before == render(template, [], **extra):
            raise UserError(
                "the conversation begins with the assistant, and the chat template has no cue for it there: what it "
                "says cannot be told from what announces it"
            )
        until = render(template, messages[: index + 1], **extra)
        if not until.startswith(before):
            raise UserError(
                f"the chat template does not begin turn {index + 1} of {len(messages)} with its cue for the assistant, "
                f"which ends with {before[-20:]!r}: what is said after the cue cannot be told"
            )
        if not whole.startswith(until):
            raise RewrittenError(
                f"the chat template renders turn {index + 1} of {len(messages)} differently when others follow it, so "
                "its place in the text cannot be told: give each turn that is to be learnt as an example of its own"
            )
        found.append((len(before), len(until)))
    return whole, found


def talks(template: Template, messages: Sequence[Message], **extra: Any) -> list[Talk]:
    """A conversation as one rendered text with the places of what is learnt; or where the template renders a turn
    differently once others follow it, as one for each of the assistant's turns, each as it looks when it is the last.

    UserError where the assistant says nothing.
    """
    _check_roles(messages)
    try:
        return [spans(template, messages, **extra)]
    except RewrittenError:
        ends = [index + 1 for index, message in enumerate(messages) if message.get("role") == "assistant"]
        return [spans(template, messages[:end], last=True, **extra) for end in ends]


def encode_chat(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], *, length: int | None = None, **extra: Any
) -> Example:
    """A conversation as tokens, with `length` the first so many, of which the assistant's turns are learnt.

    UserError where the assistant says nothing, nothing of what it says is left, or a turn has no place in the text.
    """
    _check_roles(messages)
    return _examples(tokenizer, [spans(template, messages, **extra)], length)[0]


def encode_turns(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], *, length: int | None = None, **extra: Any
) -> list[Example]:
    """A conversation as one example, or as `talks` says as one of each turn that something is left of."""
    return _examples(tokenizer, talks(template, messages, **extra), length)


def _examples(tokenizer: Tokenizer, rendered: list[Talk], length: int | None) -> list[Example]:
    found, sizes = [], []
    for talk in rendered:
        ids, _, learnt = encode_talks(tokenizer, [talk])
        sizes.append(len(ids))
        example = Example(torch.from_numpy(ids[:length]).long(), torch.from_numpy(learnt[:length]))
        if example.learnt[1:].any():
            found.append(example)
    if not found:
        raise UserError(nothing_left(min(length or sizes[0], sizes[0]), sizes[0]))
    return found


def nothing_left(kept: int, total: int) -> str:
    return f"the first {kept} of {total} tokens hold nothing that the assistant says"


def _check_roles(messages: Sequence[Message]) -> None:
    roles = [str(message.get("role")) for message in messages]
    if "assistant" not in roles:
        raise UserError(f"the conversation has no turn of the assistant; its roles are {', '.join(roles) or 'none'}")
