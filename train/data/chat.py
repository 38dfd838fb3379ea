"""Chat data for supervised fine-tuning: renders a tokenizer's chat template, masks the loss to the assistant's turns.

    template = read_template("checkpoint")
    example = encode_chat(tokenizer, template, messages)  # [{"role": "user", "content": "2+2?"}, ...]
    packed = fnmodels.pack([example.tokens], length, weights=[example.loss_mask.float()])

The assistant's turns are located in the rendered text, which is tokenized in one piece, as the model will see it:
tokenizing turn by turn gives other tokens at the boundaries.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.files import read_text
from fnmodels.inputs.packing import IGNORE
from params.io.files import plain_file, read_json

from .chat_process import render_elsewhere
from .chat_renderer import MARK_BEGIN, MARK_END
from .encoder import RenderedChat, encode_chats
from .turns.calls import render_calls
from .turns.proof import check_context, check_target
from .turns.said import Message, is_trained
from .turns.stops import has_token, joined, marker_at, tail_of

TOKENIZER_CONFIG = "tokenizer_config.json"
SOURCE_LIMIT = 1_000_000  # bytes of a template; the longest published ones have 20,000


_OPENED = re.compile(r"<think>\s*$")  # a cue that opens the reasoning


class RewrittenError(UserError):
    """The template renders a turn of the assistant differently when further turns follow it."""


@dataclass(frozen=True)
class Template:
    """A chat template (Jinja source), the special tokens that it may name, and its date (ISO; None: today's).

    Fingerprints of runs contain the repr of this class: renaming it or a field would refuse to resume older runs.
    """

    source: str
    special: Mapping[str, str]
    day: str | None = None

    @property
    def uses_date(self) -> bool:
        return "strftime_now" in self.source


@dataclass(frozen=True)
class Example:
    """One conversation: int64 `tokens` [S] and bool `loss_mask` [S], true for the assistant's tokens."""

    tokens: Tensor
    loss_mask: Tensor

    @property
    def labels(self) -> Tensor:
        """int64 [S], already shifted: the next token where the loss mask includes it, else -100."""
        targets = torch.where(self.loss_mask, self.tokens, IGNORE)
        return torch.cat([targets[1:], torch.tensor([IGNORE])])


def read_template(folder: str | Path, *, images: bool = False) -> Template:
    """A checkpoint folder's template: chat_template.jinja or tokenizer_config.json. UserError where it has none.

    images: whether conversations have some: that of a processor, chat_template.json in older folders, comes before the
    tokenizer's.
    """
    folder = Path(folder)
    own = folder / "chat_template.jinja"
    source: Any
    if os.path.lexists(own):
        source = read_text(plain_file(folder, own.name), SOURCE_LIMIT, follow=True)
    else:
        source = _processor_template(folder) if images else None
        source = source or _tokenizer_config(folder).get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one for chat
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[0].get("template") if named else None
    if not isinstance(source, str):
        raise UserError(f"{folder} has no chat template: neither {own.name} nor 'chat_template' in {TOKENIZER_CONFIG}")
    if len(source) > SOURCE_LIMIT:
        raise UserError(
            f"{folder}: the chat template has {len(source):,} characters; none has more than {SOURCE_LIMIT:,}"
        )
    return Template(source, special_tokens(folder))


def _processor_template(folder: Path) -> Any:
    path = folder / "chat_template.json"
    found = read_json(path) if os.path.lexists(path) else {}
    return found.get("chat_template") if isinstance(found, dict) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that a chat template may name, {"bos_token": "<s>", ...}, from the folder's files."""
    tokens = {name: value for name, value in _tokenizer_config(folder).items() if name.endswith("_token")}
    tokens = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}  # "add_bos_token" is a bool


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, over special_tokens_map.json of older folders; empty where neither exists."""
    values: dict[str, Any] = {}
    for path in (folder / "special_tokens_map.json", folder / TOKENIZER_CONFIG):
        found = read_json(path) if os.path.lexists(path) else {}
        if not isinstance(found, dict):
            raise UserError(f"{path} holds no JSON object")
        values |= found
    return values


def render(template: Template, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
    """The rendered text; prompt: ends with the assistant's cue. UserError where the template raises an exception."""
    return _extract_marks(_rendered(template, messages, prompt=prompt, **extra))[0]


def render_prompt(template: Template, messages: Sequence[Message], **extra: Any) -> str:
    """`render` up to the assistant's cue; UserError where the template leaves out what a turn says, or a tool."""
    text = render(template, messages, prompt=True, **extra)
    check_prompt(template, messages, text, **extra)
    return text


def check_prompt(template: Template, messages: Sequence[Message], text: str, **extra: Any) -> None:
    """UserError where the rendered text of these messages lacks something that they say, see `check_context`."""
    check_context(messages, text, partial(render, template, prompt=True, **extra), extra.get("tools"))


def _rendered(template: Template, messages: Sequence[Message], *, prompt: bool = False, **extra: Any) -> str:
    # as in transformers
    variables: dict[str, Any] = {"tools": None, "documents": None, **template.special, **extra}
    variables["add_generation_prompt"] = prompt

    def rendered(turns: Sequence[Message]) -> str:
        return render_elsewhere(template.source, template.day, {**variables, "messages": list(turns)})

    return render_calls(messages, rendered)


def _extract_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks, and the character ranges that they enclosed."""
    pieces, spans, size = re.split(f"([{MARK_BEGIN}{MARK_END}])", text), [], 0
    if pieces[1::2] != [MARK_BEGIN, MARK_END] * (len(pieces) // 4):
        raise UserError("the chat template nests {% generation %} blocks")
    for number, piece in enumerate(pieces[::2]):
        if number % 2:
            spans.append((size, size + len(piece)))
        size += len(piece)
    return "".join(pieces[::2]), spans


def assistant_spans(
    template: Template, messages: Sequence[Message], *, last: bool = False, **extra: Any
) -> tuple[str, list[tuple[int, int]]]:
    """(the rendered text, the character range of each turn of the assistant, its end-of-turn token included).

    {% generation %} blocks of the template are used where it has them, as in transformers. Else a turn is the
    difference between the text up to and including it and the text that ends with the assistant's cue; a <think> that
    opens the cue, but not the turn, is no part of it. A turn that ends where the next role's marker begins ends with
    that marker, at which a model stops. last: only the last message.

    RewrittenError where a template renders a turn differently when further turns follow it (without its reasoning, for
    example), so that it cannot be located; UserError where it cannot be for another reason, or where a text, a part, a
    reasoning or a tool call of a turn is not in what would be trained for it, or something of the turns before in the
    text. Turns of weight 0 are context.
    """
    text, found = _extract_marks(_rendered(template, messages, **extra))
    turns = [index for index, message in enumerate(messages) if is_trained(message)]
    read = messages[: turns[-1] + 1] if turns else messages
    if found:
        marked = joined(found)
        found = _marked(messages, turns, marked)
        check_target(messages, turns, "".join(text[start:stop] for start, stop in found))
        _check_stops(template, messages, text, marked, **extra)
        check_context(read, text, partial(render, template, **extra), extra.get("tools"))
        return text, found
    turns = turns[-1:] if last else turns
    whole = text
    for index in turns:
        before = render(template, messages[:index], prompt=True, **extra)
        if index == 0 and before == render(template, [], **extra):
            raise UserError(
                "the conversation begins with the assistant, and the chat template has no cue for it there: its text "
                "cannot be separated from its header"
            )
        until = render(template, messages[: index + 1], **extra)
        cue = before if until.startswith(before) else _OPENED.sub("", before)
        if not until.startswith(cue):
            raise UserError(
                f"the chat template does not begin turn {index + 1} of {len(messages)} with its cue for the assistant, "
                f"which ends with {before[-20:]!r}: the text after the cue cannot be located"
            )
        if not text.startswith(until):
            raise RewrittenError(
                f"the chat template renders turn {index + 1} of {len(messages)} differently when others follow it, so "
                "it cannot be located in the text: give each turn to train on as an example of its own"
            )
        check_target(messages, [index], until[len(cue) :])
        stop = _stop(template, messages[: index + 1], until, text, **extra)
        text = text if text.startswith(until + stop) else until + stop
        found.append((len(cue), len(until) + len(stop)))
    check_context(read, whole, partial(render, template, **extra), extra.get("tools"))
    return text, found


def _spoken(messages: Sequence[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.get("role") == "assistant"]


def _marked(messages: Sequence[Message], turns: Sequence[int], found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans that a template marks, without those of the assistant's turns that are context."""
    spoken = _spoken(messages)
    if len(spoken) == len(turns):
        return found
    if len(spoken) != len(found):
        raise UserError(
            f"the chat template marks {len(found)} spans for {len(spoken)} turns of the assistant, of which only "
            f"{len(turns)} are to be trained: it must mark one span for each turn"
        )
    return [span for index, span in zip(spoken, found, strict=True) if index in turns]


def _check_stops(
    template: Template, messages: Sequence[Message], text: str, marked: list[tuple[int, int]], **extra: Any
) -> None:
    """UserError where a span that the template marks ends before the token at which its turn ends.

    The last token of a tool call, such as <tool_call|>, is no stop: more calls may follow. So nothing like a token may
    stand behind the marks of a turn with calls, when it is the last one of the text.

    Args:
        template: the chat template.
        messages: the turns.
        text: their rendered text.
        marked: its spans that the template marks, `joined`.
        **extra: what the template was told of.
    """
    spoken = _spoken(messages)
    if len(marked) < len(spoken):
        raise UserError(
            f"the chat template marks {len(marked)} spans for {len(spoken)} turns of the assistant: where one follows "
            "another without a text between them, no token says that the first has ended"
        )
    for number, index in enumerate(spoken):
        if not is_trained(messages[index]):
            continue
        tail, rest = "", ""
        if own := len(marked) == len(spoken):
            tail = tail_of(messages[index], text[slice(*marked[number])])[1]
        if not own or messages[index].get("tool_calls") or not has_token(tail, template.special.values()):
            until, spans = _extract_marks(_rendered(template, messages[: index + 1], **extra))
            begin, end = (joined(spans) or [(len(until), len(until))])[-1]
            tail, rest = tail if own else tail_of(messages[index], until[begin:end])[1], until[end:]
        token = (marker_at(rest, 0, template.special.values()) or "").strip()
        if token or not (has_token(tail, template.special.values()) or tail[-1:].isspace()):
            there = f"{token} stands behind" if token else "there is none within"
            raise UserError(
                f"the chat template marks turn {index + 1} of {len(messages)} without the token that ends it, and a "
                f"model would not learn to stop: {there} its {{% generation %}} block, and has to be within"
            )


def _stop(template: Template, messages: Sequence[Message], until: str, text: str, **extra: Any) -> str:
    """The next role's marker where the last turn ends without a token of its own to stop at, as in GLM's templates.

    until: the text of `messages`, with which `text` begins.
    """
    last, tail = tail_of(messages[-1], until)
    if not last or has_token(tail, template.special.values()) or tail[-1:].isspace():  # a line may end a turn
        return ""
    start = len(until)
    if len(text) == len(until):
        role = "tool" if messages[-1].get("tool_calls") else "user"
        text = render(template, [*messages, {"role": role, "content": "."}], **extra)
        start = text.rfind(last + tail) + len(last + tail)  # what is before may be rendered differently
    marker = marker_at(text, start)
    if marker is None and not tail:
        raise UserError(
            f"the chat template ends turn {len(messages)} with its text, and no token says that it has ended: a model "
            "would not learn to stop"
        )
    return marker or ""


def render_examples(template: Template, messages: Sequence[Message], **extra: Any) -> list[RenderedChat]:
    """A conversation as one rendered text with its target ranges, or, on RewrittenError, as one per assistant turn.

    Each of the latter ends with its turn, rendered as the last one. UserError where the assistant has no turn.
    """
    _check_roles(messages)
    try:
        return [assistant_spans(template, messages, **extra)]
    except RewrittenError:
        ends = [index + 1 for index, message in enumerate(messages) if is_trained(message)]
        return [assistant_spans(template, messages[:end], last=True, **extra) for end in ends]


def encode_chat(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], *, length: int | None = None, **extra: Any
) -> Example:
    """A conversation as one example, truncated to `length` tokens; only the assistant's turns are targets.

    UserError where there is no turn of the assistant, none is left within `length`, or a turn cannot be located.
    """
    _check_roles(messages)
    return _encode_examples(tokenizer, [assistant_spans(template, messages, **extra)], length)[0]


def encode_turns(
    tokenizer: Tokenizer, template: Template, messages: Sequence[Message], *, length: int | None = None, **extra: Any
) -> list[Example]:
    """A conversation as one example, or as one per turn (`render_examples`), without those left without a target."""
    return _encode_examples(tokenizer, render_examples(template, messages, **extra), length)


def _encode_examples(tokenizer: Tokenizer, rendered: list[RenderedChat], length: int | None) -> list[Example]:
    found, sizes = [], []
    for chat in rendered:
        ids, _, loss_mask = encode_chats(tokenizer, [chat])
        sizes.append(len(ids))
        example = Example(torch.from_numpy(ids[:length]).long(), torch.from_numpy(loss_mask[:length]))
        if example.loss_mask[1:].any():
            found.append(example)
    if not found:
        raise UserError(no_targets_message(min(length or sizes[0], sizes[0]), sizes[0]))
    return found


def no_targets_message(kept: int, total: int) -> str:
    return f"the first {kept} of {total} tokens hold nothing that the assistant says"


def _check_roles(messages: Sequence[Message]) -> None:
    roles = [str(message.get("role")) for message in messages]
    if "assistant" not in roles:
        raise UserError(f"the conversation has no turn of the assistant; its roles are {', '.join(roles) or 'none'}")
    if not any(map(is_trained, messages)):
        raise UserError("the conversation has no turn of the assistant to train on: all have weight 0")
