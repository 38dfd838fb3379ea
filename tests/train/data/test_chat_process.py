"""Templates of strangers: an attack is a sentence within bounded time and memory, and what comes next renders."""

import datetime
import decimal
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import pytest

from fnmodels.errors import UserError
from train.data import chat_process
from train.data.chat import Template, render

CHAT = [{"role": "user", "content": "Hi"}]
HUGE = "it needs more than 192 MiB of memory"
LATE = "it takes more than 0.3 seconds of processor time"
LONG = "its text would have more than 1,05"
DEEP = "maximum recursion depth exceeded"
DOUBLE = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
NESTED = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}"
ATTACKS = {
    # time
    "loops within loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LATE),
    "a power": ("{{ (9 ** 9999999) % 7 }}", LATE),
    "slices": ("{{ [1] | slice(10 ** 10) | list }}", LATE),
    "words": ("{{ lipsum(n=10 ** 9) }}", LATE),
    # memory
    "a product": ("{{ 'a' * 10 ** 10 }}", HUGE),
    "a product of lists": ("{{ [0] * 10 ** 10 }}", HUGE),
    "a joined range": ("{{ range(99999) | join('a' * 100000) | length }}", HUGE),
    "doubling": (DOUBLE + "{{ ns.x | length }}", HUGE),
    "a width of %": ("{{ '%9999999999d' % 1 }}", HUGE),
    "a width of format": ("{{ '{:9999999999}'.format(1) }}", HUGE),
    "centered": ("{{ 'a' | center(10 ** 10) }}", HUGE),
    "indented": ("{{ 'a\n' | indent(10 ** 10) }}", HUGE),
    "indented JSON": ("{{ [1] | tojson(indent=10 ** 10) }}", HUGE),
    "replaced": ("{{ ('a' * 10 ** 5) | replace('a', 'b' * 10 ** 5) | length }}", HUGE),
    "justified": ("{{ 'a'.ljust(10 ** 10) }}", HUGE),
    "tabs": ("{{ ('\t' * 1000).expandtabs(10 ** 8) }}", HUGE),
    # text
    "text in loops": ("{% for a in range(99999) %}{% for b in range(99999) %}aaaa{% endfor %}{% endfor %}", LONG),
    "one long text": ("{{ 'a' * 9 * 10 ** 6 }}", LONG),
    "a long error": ("{{ raise_exception('x' * 10 ** 7) }}", "x" * 1000),
    # depth
    "a macro of itself": ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", DEEP),
    "brackets": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", DEEP),
    "blocks": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, DEEP),
    "statements": ("{% for a in [1] %}" * 150 + "{% endfor %}" * 150, "too many"),
    "a sum": ("{{ " + "+".join(["1"] * 5000) + " }}", DEEP),
    "lists of lists": (NESTED + "{{ ns.x }}", DEEP),
    "lists of lists as JSON": (NESTED + "{{ ns.x | tojson }}", DEEP),
    "marks within marks": ("{% generation %}" * 2000, DEEP),
    # the sandbox
    "classes": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    "globals of a function": ("{{ lipsum.__globals__['os'].popen('touch OUT') }}", "unsafe"),
    "globals of a class": ("{{ cycler.__init__.__globals__.os.system('touch OUT') }}", "unsafe"),
    "globals by subscript": ("{{ lipsum['__globals__']['os'].system('touch OUT') }}", "unsafe"),
    "globals of our function": ("{{ raise_exception.__globals__['sys'].exit(0) }}", "unsafe"),
    "the class behind a method": ("{{ strftime_now.__self__.year() }}", "unsafe"),
    "the template": ("{{ self.__init__.__globals__ }}", "unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    "format by a filter": ("{{ ('{0.__class__.__mro__}' | attr('format'))(1) }}", "unsafe"),
    "format kept aside": ("{% set f = '{0.__class__.__mro__}'.format %}{{ f(1) }}", "unsafe"),
    "writing": ("{{ messages.append(1) }}", "unsafe"),
    "a module": ("{% import 'os' as os %}{{ os.getcwd() }}", "no loader"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    # characters
    "nothing that compiles": ("{% for", "unexpected end|Expected an expression|end of template"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(chat_process, "SECONDS", 1.0)  # jinja2 compiles the longest for 0.25 s on a fast CPU
    monkeypatch.setattr(chat_process, "MEMORY", 192 << 20)
    yield
    assert render(Template("{{ messages[0].content }}!", {}), CHAT) == "Hi!"  # the next one is as if nothing had been


@pytest.mark.parametrize("name", ATTACKS)
def test_render_of_a_strange_template_ends_with_a_sentence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, words = ATTACKS[name]
    if words == LATE:
        monkeypatch.setattr(chat_process, "SECONDS", 0.3)  # none of these ends by itself
    began = time.process_time()
    with pytest.raises(UserError, match=words) as error:
        render(Template(source.replace("OUT", str(tmp_path / "out")), {}), CHAT)
    assert str(error.value).startswith("the chat template cannot render the conversation: ")
    assert len(str(error.value)) < 1200 and time.process_time() - began < 2  # the time is the other process'
    assert not (tmp_path / "out").exists()


def test_render_of_a_long_conversation_may_take_more() -> None:
    chat = [{"role": "user", "content": "漢" * 3_000_000}]
    text = render(Template("{% for a in [1, 2] %}{{ messages[0].content }}{% endfor %}", {}), chat)
    assert text == "漢" * 6_000_000


def test_render_of_what_cannot_be_sent_is_a_sentence() -> None:
    deep: list[Any] = []
    for _ in range(99_999):
        deep = [deep]
    for content in (lambda: 1, threading.Lock(), b"bytes", {(1, 2): 3}, {1}, 10**5000, deep):
        with pytest.raises(UserError, match=r"the conversation cannot be sent to its chat template: .") as error:
            render(Template("a", {}), [{"role": "user", "content": content}])
        assert len(str(error.value)) < 300


@pytest.mark.parametrize(
    "value",
    [
        *("漢 \u2028\x00\x7f", "", "\ud800", 1.5, 1e300, float("inf"), float("nan"), -0.0, 1 << 4000, True, None),
        *([1, [2]], {"a": {"b": None}}, MappingProxyType({"a": 1}), decimal.Decimal("1.50"), datetime.time(3, 4)),
        *(datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)),
    ],
    ids=lambda value: f"{type(value).__name__} {value!r:.20}",
)
def test_render_shows_what_records_hold_as_jinja_does(value: Any) -> None:
    source = "{{ messages[0].content }} {{ messages[0].content is none }} {{ messages[0].content is true }}"
    like = dict(value) if isinstance(value, MappingProxyType) else value
    expected = jinja2.Template(source).render(messages=[{"content": like}])
    assert render(Template(source, {}), [{"content": value}]) == expected


def test_render_keeps_lone_surrogates_and_marks() -> None:
    assert render(Template("{{ '\\ud800' }}{% generation %}\0{% endgeneration %}", {}), []) == "\ud800\0"


def test_render_after_an_interrupt_gives_the_next_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render(Template("a", {}), CHAT) == "a"
    process = chat_process._renderer.process
    assert process and process.stdout

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    monkeypatch.setattr(chat_process, "SECONDS", 30.0)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            render(Template(ATTACKS["loops within loops"][0], {}), CHAT)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.returncode == -signal.SIGKILL
    assert render(Template("b", {}), CHAT) == "b"


def test_render_of_a_slow_template_ends_for_all_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_process, "ALL_SECONDS", 0.5)
    monkeypatch.setattr(chat_process, "SECONDS", 0.3)
    slow = Template("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", {})
    said = []
    for _ in range(200):
        with pytest.raises(UserError) as error:
            render(slow, CHAT)
        said.append(str(error.value))
    last = "the chat template is not rendered any more: it was too slow for earlier conversations"
    assert 0 < sum(LATE in one for one in said) < 10 and said[-1] == last
    for _ in range(50):  # another one has its own time, to which each conversation adds
        assert render(Template("{{ messages[0].content }}", {}), CHAT) == "Hi"


def test_render_after_its_process_was_killed_starts_another() -> None:
    assert render(Template("a", {}), CHAT) == "a"
    process = chat_process._renderer.process
    assert process
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert render(Template("b", {}), CHAT) == "b"


def test_render_while_its_process_is_killed_asks_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the machine had stood still, or another program had ended it; the second end is the template's doing."""
    running, killed = chat_process._Renderer._running, [signal.SIGKILL, signal.SIGKILL, signal.SIGKILL]

    def dying(self: Any) -> Any:
        process = running(self)
        if killed:
            os.kill(process.pid, killed.pop())
        return process

    monkeypatch.setattr(chat_process._Renderer, "_running", dying)
    with pytest.raises(UserError, match="the process in which it is rendered was ended by SIGKILL"):
        render(Template("a", {}), CHAT)
    assert render(Template("a", {}), CHAT) == "a" and not killed


def test_render_in_threads_and_in_a_fork_gives_each_its_own() -> None:
    found: dict[int, list[str]] = {}

    def work(number: int) -> None:
        found[number] = [render(Template(f"{number} {{{{ {i} }}}}", {}), CHAT) for i in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [f"{number} {i}" for i in range(20)] for number in range(4)}
    process = chat_process._renderer.process
    assert process
    child = os.fork()
    if not child:
        os._exit(0 if render(Template("c", {}), CHAT) == "c" and chat_process._renderer.process is not process else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render(Template("d", {}), CHAT) == "d" and chat_process._renderer.process is process


def test_close_ends_the_process() -> None:
    assert render(Template("a", {}), CHAT) == "a"
    process = chat_process._renderer.process
    assert process
    chat_process._renderer.close()
    assert process.returncode == 0
