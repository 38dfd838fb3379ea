"""The process in which chat templates are rendered (`train.data.chat_renderer`), one for all conversations."""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import date
from datetime import time as clock
from decimal import Decimal
from typing import Any

from fnmodels.errors import UserError

from . import chat_renderer
from .chat_renderer import ANSWER, ENCODING, HEADER

SECONDS = 5.0  # of processor time for a conversation, which needs a thousandth of a second
MEMORY, MEMORY_FACTOR = 512 << 20, 64  # bytes, and bytes for each byte of the conversation
CHARACTERS, CHARACTERS_FACTOR = 1 << 20, 16  # of the rendered text, and those for each byte of the conversation
ALL_SECONDS, SECONDS_EACH, SECONDS_FACTOR = 60.0, 0.05, 1e-6  # of one template, for each rendering and each byte of it


def render_elsewhere(source: str, day: str | None, variables: Mapping[str, Any]) -> str:
    """The text that a template renders, the assistant's parts between marks.

    Args:
        source: the template, which may be a stranger's.
        day: the date that it is told (ISO), or None for today's.
        variables: what it may name: values of JSON; dates and decimals, which tables have, are texts there.

    Raises:
        UserError: it fails, or takes more time, memory or text than the conversation can need, or has taken so much
            time for those before that a data set would never end.
    """
    try:
        data = json.dumps((source, day, variables), ensure_ascii=False, default=_as_json).encode(*ENCODING)
    except (TypeError, ValueError, RecursionError) as error:  # objects of any class may be among the variables
        raise UserError(f"the conversation cannot be sent to its chat template: {error}") from error
    memory, characters = MEMORY + MEMORY_FACTOR * len(data), CHARACTERS + CHARACTERS_FACTOR * len(data)
    with _renderer.lock, _renderer.on_account(source, SECONDS_EACH + SECONDS_FACTOR * len(data)):
        good, text = _renderer.answer(HEADER.pack(len(data), SECONDS, memory, characters) + data)
    if not good:
        raise UserError(f"the chat template cannot render the conversation: {text}")
    return text


def _as_json(value: object) -> object:
    """A value that JSON does not have. TypeError where a template has no use for it."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (date, clock, Decimal)):
        return str(value)  # as a template shows it
    raise TypeError(f"it holds a {type(value).__name__}, which is no value of JSON, date or decimal number")


class _Renderer:
    """Starts the process when it is first needed, and again after its end. A process that is forked starts its own."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.source, self.left = "", 0.0  # the template, and the seconds that it has left for all conversations
        atexit.register(self.close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    @contextmanager
    def on_account(self, source: str, added: float) -> Iterator[None]:
        """Takes the time of the block from what the template has left, to which `added` seconds come. UserError."""
        if source != self.source:
            self.source, self.left = source, ALL_SECONDS
        if self.left < 0:
            raise UserError("the chat template is not rendered any more: it was too slow for earlier conversations")
        began = time.monotonic()
        try:
            yield
        finally:
            took = min(time.monotonic() - began, 2 * SECONDS)  # the job may have been suspended
            self.left = min(ALL_SECONDS, self.left + added - took)

    def answer(self, request: bytes) -> tuple[bool, str]:
        """(whether the template was rendered, the text or else the error).

        A process that ends is no answer yet: the machine may have stood still meanwhile, which counts as processor
        time, or another program has ended it. It is the template's doing if the next process ends, too.
        """
        answer = self._ask(request)
        answer = self._ask(request) if isinstance(answer, int) else answer
        return (False, _end_of(answer)) if isinstance(answer, int) else answer

    def _ask(self, request: bytes) -> tuple[bool, str] | int:
        """The answer of the process, or its exit code if it ends."""
        process = self._running()
        assert process.stdin and process.stdout
        try:
            with suppress(BrokenPipeError):  # the process has ended: so says the empty answer
                process.stdin.write(request)
                process.stdin.flush()
            head = process.stdout.read(ANSWER.size)
            if len(head) == ANSWER.size:
                good, size = ANSWER.unpack(head)
                text = process.stdout.read(size)
                if len(text) == size:
                    return good, text.decode(*ENCODING)
            return process.wait()
        except BaseException:  # Ctrl-C: the answer that is still to come would be taken for that to the next request
            process.kill()
            process.wait()  # else it would seem to run, and be asked next
            raise
        finally:
            if process.poll() is not None:
                self.close()

    def close(self) -> None:
        """Ends the process, which ends by itself when its input does."""
        if self.process is None:
            return
        process, self.process = self.process, None
        assert process.stdin and process.stdout
        with suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            self.process = subprocess.Popen(
                [sys.executable, "-P", chat_renderer.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches the caller alone
            )
        return self.process

    def _forked(self) -> None:
        # The renderer is the other process', and ends only when all let go of its pipes.
        self.lock = threading.Lock()
        if self.process is not None:
            nothing = os.open(os.devnull, os.O_RDWR)
            for pipe in (self.process.stdin, self.process.stdout):
                assert pipe
                os.dup2(nothing, pipe.fileno(), inheritable=False)
            os.close(nothing)
            self.process = None


def _end_of(code: int) -> str:
    if os.name == "posix" and code == -signal.SIGPROF:
        return f"it takes more than {SECONDS:g} seconds of processor time"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process in which it is rendered was ended by {name}"


_renderer = _Renderer()
