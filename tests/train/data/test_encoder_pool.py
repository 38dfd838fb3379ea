"""Tests of tokenization in worker processes: the same bytes for any number of them, and no partial file left behind."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest

import train
from train.data import cache, encoder, encoder_pool, tokenized, tokenizer
from train.data.corpus import Corpus, CorpusDocument
from train.data.encoder import encode as here
from train.data.encoder import encode_chats
from train.job import progress

TEXTS = [f"def f{i}(x):\n    return x * {i} # é 漢字 <|endoftext|>\n" * (i % 5) for i in range(60)]
ROOT = Path(train.__file__).parents[1]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(encoder_pool, "GROUP_CHARACTERS", 500)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_processes_gives_the_same_tokens(count: int) -> None:
    made, shown = tokenizer.train_tokenizer(TEXTS, 300), []
    expected = here(made, TEXTS, 0)
    found = encoder_pool.encode(made, TEXTS, 0, workers=count, show=lambda *now: shown.append(now))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    total = sum(map(len, TEXTS))
    assert len(shown) > 5 and shown[-1] == (total, total) and shown == sorted(shown)


@pytest.mark.parametrize("count", [1, 2])
def test_the_cache_has_the_same_bytes(count: int) -> None:
    documents = tuple(CorpusDocument(str(i), text) for i, text in enumerate(TEXTS))
    made, files = tokenizer.train_tokenizer(TEXTS, 300), []
    for number in (1, count):
        tokenized.tokenize_texts(Corpus(documents[:50], documents[50:]), made, 0, workers=number)
        (path,) = cache.cache_folder().glob("tokens-*")
        files.append(path.read_bytes())
        path.unlink()
    assert files[0] == files[1]


@pytest.mark.parametrize("count", [1, 2])
def test_conversations_are_the_same_tokens_too(count: int) -> None:
    talks = [(text, [(2, 9), (20, len(text))]) for text in TEXTS]
    made = tokenizer.train_tokenizer(TEXTS, 300)
    found = encoder_pool.encode_chats(made, talks, workers=count)
    for one, other in zip(found, encode_chats(made, talks), strict=True):
        assert one.dtype == other.dtype and np.array_equal(one, other)
    line = iter(found[2].tolist())
    for text, turns in talks:
        for begin, _ in made.encode(text, add_special_tokens=False).offsets:
            assert next(line) == any(start <= begin < stop for start, stop in turns)
    assert [len(array) for array in encoder_pool.encode_chats(made, [], workers=count)] == [0, 0, 0]


def test_no_text_is_no_tokens() -> None:
    ids, lengths = encoder_pool.encode(tokenizer.train_tokenizer(TEXTS, 300), [], 0, workers=2)
    assert (ids.dtype, len(ids), lengths.dtype, len(lengths)) == (np.int32, 0, np.int64, 0)
    with pytest.raises(ValueError, match="workers is 0"):
        encoder_pool.encode(tokenizer.train_tokenizer(TEXTS, 300), TEXTS, 0, workers=0)


def test_little_text_is_not_worth_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_pool, "_start", lambda *_: pytest.fail("a process"))
    encoder_pool.encode(tokenizer.train_tokenizer(TEXTS, 300), TEXTS, 0)


def test_a_process_that_dies_is_reported_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start, sent_to, send = [], encoder_pool._start, [], encoder.send

    def watched(*arguments) -> subprocess.Popen:
        started.append(start(*arguments))
        return started[-1]

    def killing(pipe: IO[bytes], message: object) -> None:
        sent_to.append(pipe)
        if sent_to.count(pipe) == 2 and pipe is started[0].stdin:  # its first group, which it always gets
            started[0].kill()
        send(pipe, message)

    monkeypatch.setattr(encoder_pool, "_start", watched)
    monkeypatch.setattr(encoder, "send", killing)
    with pytest.raises(RuntimeError, match="ended with exit code -9 before its work was done"):
        encoder_pool.encode(tokenizer.train_tokenizer(TEXTS, 300), TEXTS * 20, 0, workers=2)
    assert [process.poll() for process in started] == [-9, -9]


PROGRAM = """
import sys
from train.data import encoder_pool, tokenized, tokenizer
from train.data.corpus import Corpus, CorpusDocument
encoder_pool.GROUP_CHARACTERS = 2000
texts = tuple(CorpusDocument(str(i), f"def f{i}(x):\\n    return {i}\\n" * 90) for i in range(3000))
def show(done, total):
    print(done, flush=True)
made = tokenizer.train_tokenizer(["def f(x): return 0123456789\\n"] * 9, 300)
tokenized.tokenize_texts(Corpus(texts[:2900], texts[2900:]), made, 0, workers=2, show=show)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["Ctrl-C", "kill"])
def test_a_stop_leaves_no_half_cache_and_no_process(number: signal.Signals) -> None:
    running = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.signal(2, signal.default_int_handler)\n" + PROGRAM],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    assert running.stdout is not None and int(running.stdout.readline()) > 0
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) == 2
    running.send_signal(number)
    assert running.wait() != 0
    running.stdout.close()
    left = list(cache.cache_folder().glob("**/*"))
    assert not [path for path in left if path.name.startswith("tokens-") and path.parent == cache.cache_folder()]
    if number == signal.SIGINT:
        assert left == []
    until = time.monotonic() + 20
    while any(map(_runs, children)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not [child for child in children if _runs(child)]


def _runs(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_once_there_is_some(terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0)
    with progress.tokenizing():
        pass
    assert capsys.readouterr().out == ""
    with progress.tokenizing() as show:
        show(1, 4)
        show(4, 4)
    out = capsys.readouterr().out
    assert ("tokenizing" in out and "100%" in out) if terminal else ("tokenized 25% of 0 million characters" in out)
