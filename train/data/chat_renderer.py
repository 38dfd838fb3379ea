"""Renders chat templates; run as a script, the process of its own in which `train.data.chat` renders those of others.

A template is a program: it can loop for ever, fill any memory, or crash the interpreter. So it has a process, whose
time, memory and output are bounded by the system and in proportion to what the caller sent. This file imports nothing
of its package, and so not torch: the process starts in a fraction of a second.
"""

import json
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MARK_BEGIN, MARK_END = "\ufdd0", "\ufdd1"  # mark the assistant's text; Unicode noncharacters occur in no text
HEADER = struct.Struct(">QdQQ")  # of a request: its bytes, seconds, bytes of memory, characters of the text
ANSWER = struct.Struct(">?Q")  # whether it is the text, and not an error; its bytes
ENCODING = ("utf-8", "surrogatepass")  # of requests and answers, which may have lone surrogates
MESSAGE = 1000  # characters of a template's error that are shown


def render(source: str, day: str | None, variables: Mapping[str, Any], limit: int) -> str:
    """The rendered text. Whatever a template raises, and ValueError for a text of more than `limit` characters."""
    now = (datetime.fromisoformat(day) if day else datetime.now()).strftime
    pieces, size = [], 0
    for piece in compiled(source).generate(variables, strftime_now=now):
        pieces.append(piece)
        size += len(piece)
        if size > limit:
            raise ValueError(f"its text would have more than {limit:,} characters")
    return "".join(pieces)


@lru_cache(maxsize=1)  # compiling is slower than rendering, and a data set has one template
def compiled(source: str) -> jinja2.Template:
    """The template with the filters, tags and functions that transformers gives one."""
    extensions = [loopcontrols, GenerationExtension]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


class GenerationExtension(Extension):
    """The Jinja tag {% generation %} ... {% endgeneration %}, with which templates mark the assistant's text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return MARK_BEGIN + caller() + MARK_END


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The tojson filter as in transformers; jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _addresses() -> int:
    """The bytes of addresses of this process, on Linux: what site-packages load at its start is not the template's."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


_BEGAN_WITH = _addresses()


@contextmanager
def bounded(seconds: float, memory: int) -> Iterator[None]:
    """Bounds this process: the system ends it after `seconds` of processor time, whatever it does then.

    memory: bytes beside those of its start; for more, Python raises MemoryError. Linux alone bounds them.
    """
    if os.name != "posix":
        yield
        return
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        soft = _BEGAN_WITH + memory
        resource.setrlimit(resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Reads requests until they end: a HEADER and JSON, [template, its date or null for today's, the variables].

    Writes an ANSWER and text for each.
    """
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        size, seconds, memory, characters = HEADER.unpack(header)
        data = requests.read(size)
        try:
            with bounded(seconds, memory):
                source, day, variables = json.loads(data.decode(*ENCODING))
                good, text = True, render(source, day, variables, characters)
        except MemoryError:
            good, text = False, f"it needs more than {memory >> 20:,} MiB of memory"
        except Exception as error:  # a template is a foreign program, which can fail in any way
            good, text = False, (str(error) or repr(error))[:MESSAGE]
        answer = text.encode(*ENCODING)
        answers.write(ANSWER.pack(good, len(answer)) + answer)
        answers.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
