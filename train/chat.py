"""Supervised fine-tuning on conversations: the tokenizer's own chat template, and loss on the assistant's turns alone.

    template = read_template("checkpoint")
    example = encode_chat(tokenizer, template, messages)  # [{"role": "user", "content": "2+2?"}, ...]
    packed = fnmodels.pack([example.tokens], length, weights=[example.learnt.float()])

What the assistant says is found in the rendered text, and the text is tokenized once and whole, as the model will see
it: a conversation tokenized turn by turn has other tokens at the seams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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

from params.files import read_json
from train.encoder import Talk, encode_talks
from train.errors import UserError
from train.token_loss import IGNORE

Message = Mapping[str, Any]

TOKENIZER_CONFIG = "tokenizer_config.json"


class RewrittenError(UserError):
    """A template renders a turn of the assistant differently once others follow it."""


@dataclass(frozen=True)
class Template:
    """A chat template (Jinja source) and the special tokens that it may name."""

    source: str
    special: Mapping[str, str]


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
    source = own.read_text(encoding="utf-8") if own.exists() else _tokenizer_config(folder).get("chat_template")
    if isinstance(source, list):  # several named ones; "default" is for conversation
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        raise UserError(f"{folder} has no chat template: neither {own.name} nor 'chat_template' in {TOKENIZER_CONFIG}")
    return Template(source, special_tokens(folder))


def special_tokens(folder: Path) -> dict[str, str]:
    """Those that a chat template may name, {"bos_token": "<s>", ...}, as tokenizer_config.json gives them."""
    values = _tokenizer_config(folder)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    given = {name: values.get(name) for name in names}
    return {name: v["content"] if isinstance(v, dict) else v for name, v in given.items() if v is not None}


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """Empty where there is no such file."""
    file = folder / TOKENIZER_CONFIG
    values: dict[str, Any] = read_json(file) if file.exists() else {}
    return values


def render(template: Template, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
    """The text of a conversation; prompt: up to where the assistant begins. UserError where the template refuses."""
    try:
        compiled = _compiled(template.source)
        return compiled.render(messages=messages, add_generation_prompt=prompt, **template.special, **extra)
    except Exception as error:  # a template is a program of somebody else's, and may fail as any program can
        raise UserError(f"the chat template cannot render the conversation: {error}") from error


@lru_cache(maxsize=1)  # compiling takes longer than rendering, and one template renders a whole data set
def _compiled(source: str) -> jinja2.Template:
    extensions = [loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
    return environment.from_string(source)


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}, by which templates mark the assistant's part: its text as it is."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def spans(
    template: Template, messages: Sequence[Message], *, last: bool = False, **extra: Any
) -> tuple[str, list[tuple[int, int]]]:
    """(the rendered text, where each of the assistant's turns stands in it, the end of the turn included).

    With `last` only the last message's. A turn is what the text up to it gains over the text that ends with the
    assistant's cue. RewrittenError where a template renders a turn differently once others follow it (dropping earlier
    thoughts, say): then nothing says what to learn.
    """
    whole, found = render(template, messages, **extra), []
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
        if not (whole.startswith(until) and until.startswith(before)):
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
