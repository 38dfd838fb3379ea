"""Tests of --data: text, records, shards and mixtures of them, up to full runs."""

import datetime
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from fnmodels.errors import UserError
from tests.train.job.test_run import TINY, rows, same, stop_after, train
from train.data import cache, sources, tokenized, tokenizer
from train.data.chat import Template
from train.data.rows import all_rows
from train.job.tasks import initial_model
from train.job.tasks.text_data import in_memory


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def _words(path: Path, word: str, number: int = 150) -> Path:
    path.write_text("".join(f"{word} {i} is {i * i}\n" for i in range(number)))
    return path


def _jsonl(path: Path, number: int = 150) -> Path:
    path.write_text("".join(json.dumps({"text": f"record {i}, {i % 7}\n" * 3}) + "\n" for i in range(number)))
    return path


def _shards(folder: Path, made: Tokenizer, text: str) -> Path:
    folder.mkdir()
    for n, piece in enumerate((text[: len(text) // 2], text[len(text) // 2 :])):
        np.save(folder / f"{n:03}.npy", np.array(made.encode(piece).ids, np.uint16))
    return folder


PARSED: dict[str, list[tuple[str, str]]] = {
    "a": [("a", "1")],
    "a:3": [("a", "3")],
    "a.jsonl:3,b/:1": [("a.jsonl", "3"), ("b", "1")],
    "a:0.5,b,c:1e-2": [("a", "1/2"), ("b", "1"), ("c", "1/100")],
    "a-b:b:2,c-d:d": [("a-b:b", "2"), ("c-d:d", "1")],
}


@pytest.mark.parametrize("text", PARSED)
def test_sources_and_weights_are_read(text: str) -> None:
    assert sources.parse_sources(text) == [(Path(path), Fraction(weight)) for path, weight in PARSED[text]]


def test_a_name_that_exists_is_no_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _words(tmp_path / "a:3,b", "word")
    assert sources.parse_sources("a:3,b") == [(Path("a:3,b"), Fraction(1))]
    assert sources.absolute_paths("a:3,b") == str(tmp_path / "a:3,b")


def test_what_is_recorded_does_not_depend_on_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    there = sources.absolute_paths("a.jsonl:3,../b:1/3,c", tmp_path / "sub")
    assert there == f"{tmp_path}/sub/a.jsonl:3,{tmp_path}/b:1/3,{tmp_path}/sub/c"
    assert sources.absolute_paths(there) == there


def test_a_list_may_be_longer_than_a_name(tmp_path: Path) -> None:
    assert len(sources.parse_sources(",".join(f"file-number-{i}.jsonl:{i}" for i in range(1, 40)))) == 39


@pytest.mark.parametrize("text", ["a:0", "a:-1,b", "a,,b", ",", "a:1,:2"])
def test_what_is_no_list_of_sources_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"is not PATH or PATH:WEIGHT|no such file"):
        sources.read_sources(text)


def test_weights_become_the_smallest_whole_numbers(tmp_path: Path) -> None:
    one, two = _words(tmp_path / "a", "one"), _words(tmp_path / "b", "two")
    assert sources.read_sources(f"{one}:0.5,{two}:1/3").weights == (3, 2)
    assert sources.read_sources(f"{one}:4,{two}:2").weights == (2, 1)
    assert sources.read_sources(str(one)).weights == (1,)


def test_skipped_records_are_reported_with_their_source(tmp_path: Path) -> None:
    one, two = _words(tmp_path / "a", "one"), _jsonl(tmp_path / "b.jsonl")
    with open(two, "a") as file:
        file.write("broken\n")
    (skipped,) = sources.read_sources(f"{one},{two}").skipped
    assert skipped.startswith(f"{two}: b.jsonl, line 151 (not JSON")
    with pytest.raises(UserError, match="line 151"):
        sources.read_sources(f"{one},{two}", strict=True)


def test_all_kinds_of_sources_become_one_mixture(tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(["some words 0123456789 of text\n"] * 9, 300)
    text = "".join(f"{i} words\n" for i in range(300))
    mix = f"{_words(tmp_path / 'a.txt', 'one')}:2,{_jsonl(tmp_path / 'b.jsonl')},{_shards(tmp_path / 'c', made, text)}"
    dataset = tokenized.tokenize(sources.read_sources(mix), made, 0, 300)
    mixture = tokenized.make_mixture(dataset, 16)
    assert mixture.weights == (2, 1, 1) and [Path(name).name for name in mixture.names] == ["a.txt", "b.jsonl", "c"]
    assert dataset.heldout.bytes < dataset.train.bytes
    labels = tokenized.heldout_batch(dataset, 16)["labels"]
    assert int((labels >= 0).sum()) <= dataset.heldout.total
    of_ids = dataset.train.sources[2], dataset.heldout.sources[2]
    texts = [[part.read(n, 0, int(size)) for n, size in enumerate(part.lengths)] for part in of_ids]
    assert "".join(made.decode(ids) for pair in zip(*texts, strict=True) for ids in pair) == text
    shards, tails = (
        tokenized.read_shards(sources.read_sources(mix).sources[2], made, 0, 300),
        "".join(map(made.decode, texts[1])).encode(),
    )
    assert shards.sizes[1:] == (len(tails), len(zlib.compress(tails, 9)))
    assert shards.sizes[0] == pytest.approx(len(text) - len(tails), rel=0.1)  # estimated


def test_what_one_source_holds_out_no_other_learns(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"record {i}, {i % 7}\n" * 3}) + "\n" for i in range(300)]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    (tmp_path / "some.jsonl").write_text("".join(lines[100:220]))
    texts = sources.read_sources(f"{tmp_path / 'all.jsonl'},{tmp_path / 'some.jsonl'}:3")
    parts = [source.text for source in texts.sources if source.text]
    heldout = {document.text for part in parts for document in part.heldout}
    learnt = {document.text for part in parts for document in part.train}
    assert [len(part.heldout) for part in parts] == [15, 6] and len(heldout) == 18
    assert not heldout & learnt and len(heldout | learnt) == 300
    assert texts.duplicates == 300 + 120 - 15 - 6 - sum(len(part.train) for part in parts) > 0
    alone = sources.read_sources(str(tmp_path / "all.jsonl"))
    assert alone.duplicates == 0 and len(alone.train) == 285
    part = parts[0]
    other = replace(part, train=part.heldout)
    with pytest.raises(UserError, match="b: another source holds out all of its train documents"):
        sources.exclude_heldout([sources.Source("a", Fraction(1), part), sources.Source("b", Fraction(1), other)])


def test_a_tokenizer_is_made_of_all_sources(tmp_path: Path) -> None:
    """Regression: the cache key once covered the first source only, and so mixtures shared a tokenizer."""
    names = [_words(tmp_path / word, word) for word in ("alpha", "bravo", "charlie")]
    for other in names[1:]:
        texts = sources.read_sources(f"{names[0]},{other}")
        for _ in range(2):
            made = initial_model.new_tokenizer(texts, 300)
            assert made.to_str() == tokenizer.train_tokenizer((d.text for d in texts.train), 300).to_str()
    assert initial_model.new_tokenizer(texts, 280).get_vocab_size() == 280


def test_the_hash_is_of_the_contents(tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(["words 0123456789\n"] * 9, 300)
    found = set()
    for name, text in (("here", "0 words\n" * 90), ("there", "0 words\n" * 90), ("other", "1 words\n" * 90)):
        (tmp_path / name).mkdir()
        mix = f"{_words(tmp_path / name / 'a', 'one')},{_shards(tmp_path / name / 'c', made, text)}"
        found.add(tokenized.tokenize(sources.read_sources(mix), made, 0, 300).fingerprint)
    assert len(found) == 2


def test_a_run_learns_from_a_mixture_and_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = f"{_words(tmp_path / 'a.txt', 'one')}:3,{_jsonl(tmp_path / 'b.jsonl')}:1"
    assert train(tmp_path / "whole", mix) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", mix) == 130
    monkeypatch.chdir("/")
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []
    assert train(tmp_path / "other", mix.replace(":3", ":1")) == 0
    assert rows(tmp_path / "other") != rows(tmp_path / "whole")


def test_a_run_learns_from_shards_of_its_checkpoints_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    text = _words(tmp_path / "a.txt", "one")
    assert train(tmp_path / "first", text) == 0
    made = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    folder = _shards(tmp_path / "shards", made, text.read_text())
    assert train(tmp_path / "second", folder, "--init", tmp_path / "first") == 0
    assert train(tmp_path / "second", None, "--resume") == 0
    capsys.readouterr()
    assert train(tmp_path / "third", folder) == 2
    assert "holds token ids: name with --init the checkpoint whose tokenizer made them" in capsys.readouterr().err
    np.save(folder / "000.npy", np.array([1, 2, 60_000], np.uint16))
    assert train(tmp_path / "third", folder, "--init", tmp_path / "first") == 2
    assert "000.npy: id number 2 is 60000" in capsys.readouterr().err


def _talks(path: Path, number: int = 120) -> Path:
    talks = [
        [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": f"{2 * i}."}]
        for i in range(number)
    ]
    talks.append([{"role": "user", "content": "nobody answers"}])
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def test_samples_continue_the_first_conversation_that_is_trained(tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(["<user><assistant> 0123456789?+.\n"] * 9, 300)
    path = _talks(tmp_path / "a.jsonl")
    refused = json.dumps({"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "4"}]})
    path.write_text(f"{refused}\n{path.read_text()}")
    settings: Any = SimpleNamespace(broken="skip", data=str(path), batch_rows=2, seed=0)
    data = in_memory(sources.read_sources(str(path)), made, 0, 300, Template(TEMPLATE, {}), settings, 16)
    assert "line 1 (the chat template cannot render" in " ".join(data.skipped)
    assert data.first is not None and data.first.messages is not None and data.first.name.endswith("line 2")


def test_conversations_are_packed_whole_and_learnt_where_the_assistant_speaks(tmp_path: Path) -> None:
    made = tokenizer.train_tokenizer(["<user><assistant> 0123456789?+.\n"] * 9, 300)
    texts, template = sources.read_sources(str(_talks(tmp_path / "a.jsonl"))), Template(TEMPLATE, {})
    dataset = tokenized.tokenize(texts, made, 0, 300, template=template, length=64)
    again = tokenized.tokenize(texts, made, 0, 300, template=template, length=64)  # from the cache
    assert dataset.skipped == again.skipped and "line 121 (the conversation has no turn of the" in dataset.skipped[0]
    mixture = tokenized.make_mixture(again, 64)
    batch = all_rows(mixture.rows[0])
    said = made.decode(batch["labels"][batch["labels"] >= 0].tolist())
    train_documents = texts.train
    answers = [document.messages[1]["content"] for document in train_documents if len(document.messages or ()) == 2]
    assert sorted(said.split("\n")[:-1]) == sorted(answers)
    assert 0.5 < mixture.fill <= 1
    starts = batch["segment_ids"].unique(dim=1).amax(1).sum()
    assert int(starts) == len(answers)  # none is cut in two
    assert dataset.train.bytes == len(said)
    assert dataset.train.target_count == int((batch["labels"] >= 0).sum()) < dataset.train.total
    assert dataset.heldout.target_count == int((tokenized.heldout_batch(again, 64)["labels"] >= 0).sum())
    questions = [f"<user>{i} + {i}?\n<assistant>" for i in range(120)]
    sizes = sorted(len(made.encode(question, add_special_tokens=False).ids) for question in questions)
    short = tokenized.tokenize(
        texts, made, 0, 300, template=template, length=sizes[-1]
    )  # no place for longer ones' answers
    cut = [what for what in short.skipped if "hold nothing that the assistant says)" in what]
    kept = sum(len(part.sources[0].lengths) for part in (short.train, short.heldout))
    assert max(int(part.sources[0].lengths.max()) for part in (short.train, short.heldout)) == sizes[-1]
    assert len(cut) == len(short.skipped) - 1 == 120 - kept == sum(size >= sizes[-1] for size in sizes) > 0
    with pytest.raises(UserError, match="1 conversations cannot be trained on"):
        tokenized.tokenize(texts, made, 0, 300, template=template, length=64, strict=True)
    with pytest.raises(UserError, match="need a chat template and the length of a row"):
        tokenized.tokenize(texts, made, 0, 300)


def test_the_cache_answers_no_other_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache has one entry per tokenizer, end, template and length; a shared folder gives what separate ones do."""
    words = ["<user><assistant> 0123456789?+.\n" * 3, "one is answer <user> 1212 3434\n" * 3]
    one, other = (tokenizer.train_tokenizer([text] * 9, 270) for text in words)
    assert one.get_vocab_size() == other.get_vocab_size()
    talks, texts = (
        sources.read_sources(str(path)).sources[0].text
        for path in (_talks(tmp_path / "a.jsonl"), _words(tmp_path / "b.txt", "one is 1212"))
    )
    assert talks is not None and texts is not None
    template = Template(TEMPLATE, {})
    asked = [
        lambda: tokenized.tokenize_texts(texts, one, 0),
        lambda: tokenized.tokenize_texts(texts, other, 0),
        lambda: tokenized.tokenize_texts(texts, one, None),
        lambda: tokenized.tokenize_texts(texts, one, 5),
        lambda: tokenized.tokenize_chats(talks, one, template, 64),
        lambda: tokenized.tokenize_chats(talks, other, template, 64),
        lambda: tokenized.tokenize_chats(talks, one, template, 24),
        lambda: tokenized.tokenize_chats(talks, one, Template("# " + TEMPLATE, {}), 64),
        lambda: tokenized.tokenize_chats(talks, one, Template("{{ bos_token }}" + TEMPLATE, {"bos_token": "?"}), 64),
        lambda: tokenized.tokenize_chats(talks, one, Template("{{ bos_token }}" + TEMPLATE, {"bos_token": "+"}), 64),
    ]

    def answer(ask: Callable[[], tokenized.TokenizedSource]) -> tuple:
        half = ask()
        tokens = half.train
        numbers = [tokens.targets(n, 0, int(size)).tolist() for n, size in enumerate(tokens.lengths)]
        return numbers, tokens.arrays[0].tolist(), half.sizes, half.skipped, half.fingerprint

    together = [answer(ask) for _ in range(2) for ask in asked]
    alone = []
    for number, ask in enumerate(asked):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache {number}"))
        alone.append(answer(ask))
    assert together == alone * 2
    assert len({str(found) for found in alone}) == len(asked)
    assert len({found[-1] for found in alone[:4]}) == 1 and len({found[-1] for found in alone[4:]}) == 4


def test_a_conversation_is_rendered_with_its_tools(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2."}]
    lines = [json.dumps({"messages": talk, "tools": [{"name": f"tool {i}"}]}) + "\n" for i in range(5)]
    (tmp_path / "a.jsonl").write_text("".join(lines) + json.dumps({"messages": talk}))
    made = tokenizer.train_tokenizer(["<user><assistant> 0123456789?+.\n"] * 9, 300)
    template = Template("{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}" + TEMPLATE, {})
    texts = sources.read_sources(str(tmp_path / "a.jsonl"))
    dataset = tokenized.tokenize(texts, made, 0, 300, template=template, length=64)
    halves = dataset.train.sources[0], dataset.heldout.sources[0]
    texts_of = {made.decode(half.read(n, 0, 64)) for half in halves for n in range(len(half.lengths))}
    assert texts_of == {f"{named}<user>2?\n<assistant>2.\n" for named in ["", *(f"[tool {i}]" for i in range(5))]}


def test_a_run_learns_from_conversations(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    assert train(tmp_path / "first", _words(tmp_path / "a.txt", "one")) == 0
    talks = _talks(tmp_path / "talks.jsonl")
    capsys.readouterr()
    assert train(tmp_path / "run", talks) == 2
    assert "holds conversations: name with --init a checkpoint with a chat template" in capsys.readouterr().err
    settings = tmp_path / "first" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("chat_template", "another_template"))
    assert train(tmp_path / "run", talks, "--init", tmp_path / "first") == 2
    assert "has no chat template" in capsys.readouterr().err
    (tmp_path / "first" / "chat_template.jinja").write_text(TEMPLATE)
    assert train(tmp_path / "whole", talks, "--init", tmp_path / "first") == 0
    out = capsys.readouterr().out
    assert "skipped 1 files or records: talks.jsonl, line 121" in out and "% of them text" in out
    made = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    answers = [f"{2 * i}.\n" for i in range(120)]  # one in twenty is held out: not enough to matter here
    targets, size = (
        sum(len(made.encode(answer, add_special_tokens=False).ids) for answer in answers),
        sum(map(len, answers)),
    )
    row = rows(tmp_path / "whole")[0]
    assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) * targets / size, rel=0.05)
    cost = json.loads((tmp_path / "whole" / "speed.jsonl").read_text().splitlines()[0])
    met = cost["seconds"] * cost["tokens_per_second"]  # the questions too, which nothing is learned from
    assert 2 * row["tokens"] < met <= 1.001 * TINY.batch_rows * TINY.row_length
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", talks, "--init", tmp_path / "first") == 130
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []


def test_a_template_that_tells_the_day_tells_the_day_that_the_run_began(tmp_path: Path, monkeypatch) -> None:
    """As Llama 3.2's: without the cache, a run resumed on another day would otherwise train on another text."""

    class Day(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return days[-1]

    days = [datetime.date(2026, 2, 28)]
    monkeypatch.setattr(tokenized, "date", Day)
    assert train(tmp_path / "first", _words(tmp_path / "a.txt", "one")) == 0
    (tmp_path / "first" / "chat_template.jinja").write_text("{{ strftime_now('%d %b') }}" + TEMPLATE)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        assert train(tmp_path / "run", _talks(tmp_path / "talks.jsonl"), "--init", tmp_path / "first") == 130
    (file,) = cache.cache_folder().glob("chats-*")
    before = file.read_bytes()
    file.unlink()
    days.append(datetime.date(2026, 3, 1))
    assert train(tmp_path / "run", None, "--resume", "--keep", 1) == 0
    assert file.read_bytes() == before
    texts = sources.read_sources(str(tmp_path / "talks.jsonl"))
    template = tokenized.template_for(texts, tmp_path / "run")
    assert template is not None and template.day == "2026-03-01"


def test_what_is_broken_may_stop_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train(tmp_path / "first", _words(tmp_path / "a.txt", "one"), "--broken", "stop") == 0
    (tmp_path / "first" / "chat_template.jinja").write_text(TEMPLATE)
    talks, broken = _talks(tmp_path / "talks.jsonl"), _jsonl(tmp_path / "b.jsonl")
    with open(broken, "a") as file:
        file.write("{")
    for path, message in (
        (broken, "b.jsonl, line 151 (not JSON"),
        (talks, "talks.jsonl, line 121 (the conversation has"),
    ):
        capsys.readouterr()
        assert train(tmp_path / "run", path, "--init", tmp_path / "first", "--broken", "stop") == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert train(tmp_path / "run", broken) == 0
    assert (tmp_path / "run" / "skipped.txt").read_text().startswith("b.jsonl, line 151 (not JSON")


def test_a_dataset_is_a_source_among_others(tmp_path: Path) -> None:
    records = [{"text": f"record {i}\n" * 9} for i in range(150)]
    mixed = sources.read_sources(str(_words(tmp_path / "a", "one"))).sources
    texts = sources.DataSources((*mixed, sources.of_dataset(records, "records", weight=Fraction(1, 2))))
    learned = tokenizer.train_tokenizer(["record 0123456789\n"] * 9, 300)
    mixture = tokenized.make_mixture(tokenized.tokenize(texts, learned, 0, 300), 16)
    assert mixture.names[1] == "records" and mixture.weights == (2, 1)


def _link(path: Path) -> Path:
    path.symlink_to(path)
    return path


MISTAKES: dict[str, tuple[Callable[[Path], str], str]] = {
    "absent": (lambda path: f"{_words(path / 'a', 'one')}:3,{path / 'no'}", "there is no such file or folder"),
    "link to itself": (lambda path: f"{_link(path / 'a')}", "a: there is no such file or folder"),
    "links to themselves": (lambda path: f"{_link(path / 'a')}:2,{path / 'a'}", "a: there is no such file or folder"),
    "weight": (lambda path: f"{_words(path / 'a', 'one')}:0,{path / 'a'}", "a weight above 0"),
    "empty": (lambda path: f"{_words(path / 'a', 'one')},{_words(path / 'b', '', 0)}", "no text in"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_mixture_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    make, message = MISTAKES[name]
    assert train(tmp_path / "run", make(tmp_path)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
