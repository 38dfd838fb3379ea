"""What strangers would write on purpose: refused in a sentence, soon, in little memory; no program, port or code."""

import ast
import json
import os
import re
import resource
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet
from tokenizers import Tokenizer, decoders, models, normalizers

import params as P
from fnmodels.errors import UserError
from train.data import chat_process, records
from train.data.chat import read_template, render
from train.data.sources import parse_sources

from .readers import READERS

READER = {reader.name: reader for reader in READERS}
SECONDS, MEMORY = 5.0, 600 << 20  # of processor time and of memory that one attack may take


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def _png(width: int, height: int) -> Callable[[Path], object]:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")
    return lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def _blank(path: Path) -> None:
    Image.new("1", (7000, 7000)).save(path)


def _config(**values: Any) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | values))


def _header(entries: dict[str, Any]) -> Callable[[Path], object]:
    text = json.dumps(entries).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text)


def _tokenizer(**parts: Any) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        tokenizer = Tokenizer(models.WordLevel({"one": 0}, unk_token="one"))
        for name, part in parts.items():
            setattr(tokenizer, name, part)
        tokenizer.save(str(path))

    return write


def _table_of_one_text(path: Path) -> None:
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 30_000, pyarrow.int32()), ["a" * 100_000])
    parquet.write_table(pyarrow.table({"text": column}), path)


def _npy(shape: tuple[int, ...]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})

    return write


@dataclass(frozen=True)
class Attack:
    """name; the reader's name in the table; the file; how it is written; what is done after reading, if anything."""

    name: str
    reader: str
    file: str
    write: Callable[[Path], object]
    then: Callable[[Path], object] | None = None

    def __str__(self) -> str:
        return f"{self.reader}: {self.name}"


def _rendered(folder: Path) -> str:
    return render(read_template(folder), [{"role": "user", "content": "Hi"}])


def _template(name: str, source: str) -> Attack:
    return Attack(name, "a chat template", "chat_template.jinja", _text(source), _rendered)


_ENTRY = {"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 1 << 62]}
_PICKLE = b"cos\nsystem\n(S'touch PWNED'\ntR."
_DOUBLING = [normalizers.Replace("a", "aa")] * 60
_HOSTILE = "\x1b[2J\x1b]0;title\x07"
ATTACKS = (
    Attack("PostScript", "a picture", "it.png", _text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\nshowpage\n")),
    Attack(
        "SVG", "a picture", "it.png", _text("<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///'/></svg>")
    ),
    Attack("pixels beyond any memory", "a picture", "it.png", _png(60_000, 60_000)),
    Attack("pixels beyond the limit", "a picture", "it.png", _png(9_000, 9_000)),
    Attack("49 megapixels in 6 KB", "a picture", "it.png", _blank),
    Attack("pixels that are not there", "a picture", "it.png", _png(4_000, 4_000)),
    Attack("PostScript", "captions", "images/it.png", _text("%!PS-Adobe-3.0 EPSF-3.0\nshowpage\n")),
    _template("loops", "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
    _template("a product", "{{ 'a' * 10 ** 11 }}"),
    _template("text", "{% for a in range(99999) %}{% for b in range(99999) %}aaaa{% endfor %}{% endfor %}"),
    _template("depth", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
    _template("a program", "{{ cycler.__init__.__globals__.os.system('touch PWNED') }}"),
    _template("control codes", "{{ raise_exception('" + _HOSTILE + "') }}"),
    Attack("doubling", "a tokenizer", "tokenizer.json", _tokenizer(normalizer=normalizers.Sequence(_DOUBLING))),
    Attack(
        "doubled decoding",
        "a tokenizer",
        "tokenizer.json",
        _tokenizer(decoder=decoders.Sequence([decoders.Replace("a", "aa")] * 60)),
    ),
    *(
        Attack(f"{field} of {value}", "a model", "config.json", _config(**{field: value}))
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        for value in (2**31 - 1, 10**30, -1, True, "9" * 9000, [[]], _HOSTILE)
    ),
    Attack("a model type with codes", "a model", "config.json", _config(model_type=_HOSTILE)),
    Attack("a module as model type", "a model", "config.json", _config(model_type="../os")),
    Attack("a tensor of 2^62 bytes", "a model", "model.safetensors", _header({"a": _ENTRY})),
    Attack("a pickle", "a model", "model.safetensors", lambda path: path.write_bytes(_PICKLE)),
    Attack("a tensor of 2^62 bytes", "adapters", "adapter_model.safetensors", _header({"a": _ENTRY})),
    Attack("a rank of 10^30", "adapters", "adapter_config.json", _config(r=10**30)),
    Attack("a tensor of 2^62 bytes", "latents", "it.safetensors", _header({"latents": _ENTRY})),
    Attack("a pickle", "shards of tokens", "a.npy", lambda path: path.write_bytes(_PICKLE)),
    Attack("2^60 ids", "shards of tokens", "a.npy", _npy((1 << 60,))),
    Attack("2^60 lengths", "shards of tokens", "a.lengths.npy", _npy((1 << 60,))),
    Attack("one text for many rows", "records of a table", "it.parquet", _table_of_one_text),
    *(
        Attack(f"{value!r:.30}", "settings", "it.toml", _text(value))
        for value in (
            'data = "x:1e99999999"',
            'data = "x:1e-99999999"',
            "steps = " + "[" * 9000,
            "a." * 9000 + "a = 1",
            "steps = 1e99999999",
            'track = "wandb"',
            f'optimizer = "{json.dumps(_HOSTILE)[1:-1]}"',
        )
    ),
    *(
        Attack(f"{name} of {value!r:.30}", "defaults of generation", "generation_config.json", _config(**{name: value}))
        for name in ("eos_token_id", "max_new_tokens", "temperature", "top_k")
        for value in (10**400, True, "1", [[]], {"a": 1}, -5)
    ),
    Attack(
        "a mean of 10^400", "normalization of pictures", "preprocessor_config.json", _config(image_mean=[10**400] * 3)
    ),
    Attack("a pickle", "saved steps", "step-00000001/state.safetensors", lambda path: path.write_bytes(_PICKLE)),
)


@pytest.fixture
def nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of programs that leave a trace; none is called, no file PWNED appears, and no port is opened."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("gs", "sh", "python", "inkscape", "convert", "ffmpeg"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path / 'STARTED'}\n")
        (programs / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    opened: list[Any] = []
    monkeypatch.setattr("socket.socket.bind", lambda self, place: opened.append(place))
    yield tmp_path
    assert not opened and not (tmp_path / "STARTED").exists() and not (tmp_path / "PWNED").exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_an_attack_is_a_sentence_soon_and_in_little_memory(
    attack: Attack, nothing_starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_process, "SECONDS", 0.3)
    monkeypatch.setattr(records, "PARQUET_TEXT", 1 << 24)
    monkeypatch.setattr(records, "PARQUET_FACTOR", 10)
    reader, folder = READER[attack.reader], nothing_starts / "it"
    folder.mkdir()
    reader.make(folder)
    attack.write(folder / attack.file)
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        found = reader.read(folder)
        if attack.then is not None:
            found = attack.then(folder)
    except (P.CheckpointError, UserError, OSError) as error:
        found, message = None, str(error)
        assert message.isprintable() or "\n" in message
        assert not {"\x1b", "\x07"} & set(message) and len(message) < 5000
    assert found is None
    assert time.process_time() - began < SECONDS
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < MEMORY
    shutil.rmtree(folder)


def test_every_attack_is_on_a_reader_of_the_table_and_a_file_of_it() -> None:
    assert all(attack.file in READER[attack.reader].files for attack in ATTACKS)


def test_no_module_pickles_or_evaluates() -> None:
    """torch alone pickles: commands between the ranks of a run, which are its own objects."""
    found = set()
    for package in ("fnmodels", "params", "train"):
        for path in (Path(__file__).parents[2] / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                text = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if re.fullmatch(r"pickle\.\w+|torch\.load|eval|exec|os\.system|yaml\.load|marshal\.loads?", text):
                    found.add((path.stem, text))
    assert found == set()


def test_weights_of_sources_are_computed_at_once() -> None:
    with pytest.raises(UserError, match="at most 9 digits"):
        parse_sources("a:1e99999999,b:1")
