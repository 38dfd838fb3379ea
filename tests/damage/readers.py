"""The table of everything that reads files: a valid folder, the files that are read there, and how."""

import functools
import json
import shutil
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import torch
from PIL import Image
from pyarrow import parquet
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import params as P
import params.inspect
from fnmodels.cache import saved
from fnmodels.embedding import DenseLayer, Embedder
from fnmodels.errors import UserError
from fnmodels.ops.cpu import product_table
from fnmodels.ops.torch_compilation import compile_to_file
from params import lora
from params.quantized.methods import HF_QUANT
from tests.fnmodels.models import test_gemma3
from tests.support.gguf_files import tensors_of, write_gguf
from tests.support.gguf_models import MODELS
from train import checkpoint
from train.commands.prompt_rows import read_prompts
from train.data import corpus, token_shards
from train.data.chat import read_template
from train.data.examples import read_examples
from train.data.image_prompts import ImagePrompts
from train.data.latents import read_latents
from train.data.pictures import Pixels, read_picture
from train.data.stream.files import stream_files
from train.data.stream.readers import read_from
from train.eval import pretrained
from train.job import chosen_settings, metrics_log, run_folder, settings
from train.job.tasks import initial_model
from train.job.tasks.captions import with_files
from train.recipe.stages import read_recipe
from train.rl import prompts as reward_prompts

from .writers import PARAMS, SMALL, cache_in

WORDS = ("one", "two", "three", "four", "five", "six")
RECORDED = {"settings": settings.fixed_settings(settings.DEFAULT)}
LEFTOVER = ".saving-00000001-0123456789abcdef"


@dataclass(frozen=True)
class Reader:
    """Something that reads files of a folder.

    Attributes:
        name: of the case.
        make: writes a valid folder.
        files: the names of the files that are read there.
        read: what the reader makes of the folder; None: it says that it refuses it.
        named: the caller names the file itself, so that a link is followed.
        whole: the reader takes the file as it is, however long.
        walks: the reader looks into folders inside of the folder too.
    """

    name: str
    make: Callable[[Path], object]
    files: tuple[str, ...]
    read: Callable[[Path], Any]
    named: bool = False
    whole: bool = False
    walks: bool = False

    def __str__(self) -> str:
        return self.name


def _model(shards: str = "5GB") -> Callable[[Path], None]:
    return lambda folder: P.save_pretrained(folder, SMALL, PARAMS, max_shard_size=shards)


def _quantized(folder: Path) -> None:
    P.save_pretrained(folder, SMALL, PARAMS)
    _json(HF_QUANT, {"quantization": {"quant_algo": "FP8"}})(folder)


def _leftover(folder: Path) -> None:
    P.save_pretrained(folder / LEFTOVER, SMALL, PARAMS)


def _recovered(folder: Path) -> Any:
    return P.load_pretrained(folder) if P.recover(folder) else None


def _adapters(folder: Path) -> None:
    lora.save_adapters(folder, SMALL, lora.add(SMALL, PARAMS, rank=2))


def _embedder(folder: Path) -> None:
    dense = [{"weight": torch.ones(4, 16)}]
    made = Embedder(("mean",), (DenseLayer(16, 4, False, "Tanh"),), True, 100)
    P.save_embedder(folder, SMALL, {**PARAMS, "dense": dense}, made)
    _tokenizer(folder)
    (folder / "tokenizer_config.json").write_text('{"pad_token": "one"}')


def _tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel(dict(zip(WORDS, range(6), strict=True)), unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def _json(name: str, value: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(json.dumps(value))


def _lines(*values: Any) -> Callable[[Path], None]:
    return lambda folder: (folder / "it.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))


def _table(folder: Path) -> None:
    texts = [f"{word} {number} " * 9 for number in range(4) for word in WORDS]
    parquet.write_table(pyarrow.table({"text": texts}), folder / "it.parquet")


def _template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')


def _picture(folder: Path) -> None:
    Image.new("RGB", (4, 4)).save(folder / "it.png")


def _captions(folder: Path) -> None:
    (folder / "images").mkdir()
    _picture(folder / "images")
    _lines({"image": "./images/it.png", "text": "one"})(folder)


def _read_captions(folder: Path) -> Any:
    examples = with_files(folder / "it.jsonl", read_examples(folder / "it.jsonl", "captions"))
    return [read_picture(one["file"], Pixels(2)) for one in examples]


def _pictured(folder: Path) -> None:
    _picture(folder)
    talk = ({"messages": [{"role": "user", "content": word}], "answer": word} for word in WORDS)
    _lines(*(record | {"images": ["it.png"]} for record in talk))(folder)


def _read_pictured(folder: Path) -> Any:
    found = reward_prompts.read_prompts(folder / "it.jsonl", "equal")
    return found, [read_picture(Path(name), Pixels(2)) for record in found.train for name in record["images"]]


def _steps(folder: Path) -> None:
    checkpoint.save(folder, 1, {"w": torch.ones(300)}, {"seen": 1})


def _read_steps(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = checkpoint.latest(folder)
    return None if found is None else checkpoint.load(found, {"w": torch.ones(300)})


def _shards(folder: Path) -> None:
    np.save(folder / "a.npy", np.arange(20, dtype=np.uint16))
    np.save(folder / "a.lengths.npy", np.array([5, 15]))


def _read_shards(folder: Path, name: str = "") -> Any:
    with cache_in(folder.parent / "cache"):
        return token_shards.open_shards(folder / name, vocab_size=100, end=None)


def _texts(folder: Path) -> None:
    for number in range(12):
        (folder / f"{number}.txt").write_text(f"{WORDS[number % 6]} {number} " * 30)


def _read_texts(folder: Path) -> Any:
    return corpus.read_corpus(folder, strict=True)


def _latents(folder: Path) -> None:
    tensors = {"latents": torch.ones(2, 4, 2, 2), "text": torch.ones(2, 3, 4), "pooled": torch.ones(2, 4)}
    save_file(tensors, folder / "it.safetensors")


def _companions(folder: Path) -> None:
    _template(folder)
    _json("generation_config.json", {"eos_token_id": 1})(folder)


def _copied(folder: Path) -> Any:
    to = folder.parent / "to"
    to.mkdir(exist_ok=True)
    pretrained.copy_companions(folder, to)
    return [path.read_bytes() for path in to.iterdir()]


def _rates(folder: Path) -> None:
    with cache_in(folder):
        table = product_table.Table(dict.fromkeys(product_table.rate_names(), 100.0), True)
        product_table.write(product_table.table_file({}), {}, table)


def _read_rates(folder: Path) -> Any:
    with cache_in(folder):
        return product_table.read(product_table.table_file({}))


@functools.cache
def _package() -> bytes:
    """Code that adds one."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "it.pt2"
        compile_to_file(lambda x: (x + 1,), [torch.zeros(3)], path, sizes_of_last=None)
        return path.read_bytes()


def _write_package(folder: Path) -> None:
    (folder / "step-0.pt2").write_bytes(_package())


def _gguf(folder: Path) -> None:
    values = MODELS["llama"]
    write_gguf(folder / "it.gguf", "llama", values, tensors_of(values))


def _code(folder: Path) -> Any:
    code = saved._loaded(folder / "step-0.pt2")
    return None if code is None else code([torch.zeros(3)])[0].tolist() == [1, 1, 1]


def _inspected(folder: Path) -> Any:
    return params.inspect.main([str(folder), "--verify"]) == 0 or None


def _read_stream(folder: Path) -> list[str | None]:
    (file,) = stream_files(str(folder / "it.jsonl"))
    records = [record for _, record in read_from(file)]
    if faults := [f"it.jsonl, {record.place} ({record.fault})" for record in records if record.fault]:
        raise UserError(faults[0])
    return [record.text for record in records]


_STEP = "step-00000001"
_WEIGHTS = ("config.json", "model.safetensors")
_INDEX = "model.safetensors.index.json"
READERS = (
    Reader("a model", _model(), _WEIGHTS, P.load_pretrained),
    Reader("a GGUF file", _gguf, ("it.gguf",), lambda folder: P.load_pretrained(folder / "it.gguf"), named=True),
    Reader("a model in shards", _model("8KB"), (_INDEX, "model-00001-of-00002.safetensors"), P.load_pretrained),
    Reader(
        "a model that another file calls quantized", _quantized, ("hf_quant_config.json", *_WEIGHTS), P.load_pretrained
    ),
    Reader("its manifest", _model(), ("fnmodels_manifest.json", *_WEIGHTS), lambda folder: P.verify(folder) or True),
    Reader("a model to inspect", _model(), (*_WEIGHTS, "fnmodels_manifest.json"), _inspected),
    Reader("adapters to inspect", _adapters, (lora.CONFIG, lora.WEIGHTS, "fnmodels_adapter_manifest.json"), _inspected),
    Reader(
        "a save that was cut short",
        _leftover,
        tuple(f"{LEFTOVER}/{name}" for name in ("fnmodels_manifest.json", *_WEIGHTS)),
        _recovered,
    ),
    Reader("adapters", _adapters, (lora.CONFIG, lora.WEIGHTS), lambda at: lora.load_adapters(at, SMALL, PARAMS)),
    Reader("manifest of adapters", _adapters, ("fnmodels_adapter_manifest.json",), lambda at: P.verify(at) or True),
    Reader(
        "an embedder",
        _embedder,
        ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
        + ("tokenizer.json", "tokenizer_config.json")
        + ("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
        P.load_embedder,
    ),
    Reader("a tokenizer", _tokenizer, ("tokenizer.json",), pretrained.load_tokenizer),
    Reader(
        "a chat template",
        _template,
        ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"),
        read_template,
    ),
    Reader(
        "a processor's template",
        _json("chat_template.json", {"chat_template": "{{ messages }}"}),
        ("chat_template.json",),
        lambda folder: read_template(folder, images=True),
    ),
    Reader(
        "settings of images",
        _json("processor_config.json", {"image_processor": {"do_resize": True}}),
        ("processor_config.json",),
        lambda folder: ImagePrompts.of(folder, test_gemma3.CONFIG, None).settings,
    ),
    Reader(
        "defaults of generation",
        _json("generation_config.json", {"do_sample": True, "eos_token_id": [1, 2]}),
        ("generation_config.json",),
        lambda folder: (pretrained.generation_defaults(folder), pretrained.end_ids(folder)),
    ),
    Reader("companions of a model", _companions, ("generation_config.json", "chat_template.jinja"), _copied),
    Reader(
        "normalization of pictures",
        _json("preprocessor_config.json", {"image_mean": [0.5, 0.5, 0.5]}),
        ("preprocessor_config.json",),
        lambda folder: Pixels.of(folder, 4),
    ),
    Reader("a picture", _picture, ("it.png",), lambda folder: read_picture(folder / "it.png", Pixels(2)), named=True),
    Reader("captions", _captions, ("images/it.png",), _read_captions),
    Reader(
        "saved steps",
        _steps,
        tuple(f"{_STEP}/{name}" for name in ("state.safetensors", "progress.json", "fnmodels_manifest.json")),
        _read_steps,
    ),
    Reader(
        "JSON of a run", _json("run.json", {"a": 1}), ("run.json",), lambda at: run_folder.read_json(at / "run.json")
    ),
    Reader(
        "rows of metrics",
        lambda folder: (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n' * 3),
        ("metrics.jsonl",),
        lambda folder: metrics_log.read_rows(folder / "metrics.jsonl") or None,
        whole=True,
    ),
    Reader(
        "the lock of a run",
        lambda folder: (folder / ".lock").write_text("start"),
        (".lock",),
        lambda folder: run_folder.acquired_by(folder, "start") or None,
        whole=True,
    ),
    Reader(
        "settings",
        lambda folder: (folder / "it.toml").write_text("steps = 3\n"),
        ("it.toml",),
        lambda folder: settings.read_toml(folder / "it.toml"),
        named=True,
    ),
    Reader(
        "settings of a run",
        lambda folder: (folder / "settings.toml").write_text("steps = 3\n"),
        ("settings.toml",),
        lambda folder: chosen_settings.choose_settings(folder, {}, RECORDED, settings.DEFAULT, step=None),
    ),
    Reader("shards of tokens", _shards, ("a.npy", "a.lengths.npy"), _read_shards),
    Reader("a shard of tokens", _shards, ("a.npy",), lambda folder: _read_shards(folder, "a.npy"), named=True),
    Reader("texts", _texts, ("3.txt",), _read_texts, named=True, whole=True, walks=True),
    Reader(
        "records",
        _lines(*({"text": f"{word} {number} " * 9} for number in range(4) for word in WORDS)),
        ("it.jsonl",),
        lambda folder: corpus.read_corpus(folder / "it.jsonl", strict=True),
        named=True,
        whole=True,
    ),
    Reader(
        "records of a table",
        _table,
        ("it.parquet",),
        lambda folder: corpus.read_corpus(folder / "it.parquet", strict=True),
        named=True,
    ),
    Reader(
        "examples",
        _lines({"text": "one"}, {"text": "two"}),
        ("it.jsonl",),
        lambda folder: read_examples(folder / "it.jsonl", "masked"),
        named=True,
        whole=True,
    ),
    Reader(
        "a stream",
        _lines(*({"text": f"{word} {number} " * 9} for number in range(4) for word in WORDS)),
        ("it.jsonl",),
        _read_stream,
        named=True,
        whole=True,
    ),
    Reader(
        "prompts of rewards",
        _lines(*({"messages": [{"role": "user", "content": word}], "answer": word} for word in WORDS)),
        ("it.jsonl",),
        lambda folder: reward_prompts.read_prompts(folder / "it.jsonl", "equal"),
        named=True,
        whole=True,
    ),
    Reader("pictures of prompts of rewards", _pictured, ("it.png",), _read_pictured, named=True),
    Reader(
        "a recipe",
        lambda folder: (folder / "it.toml").write_text("folder = 'made'\n[first]\ncommand = 'train'\nsteps = 3\n"),
        ("it.toml",),
        lambda folder: read_recipe(folder / "it.toml"),
        named=True,
    ),
    Reader(
        "prompts",
        _lines({"prompt": "one"}, {"prompt": "two"}),
        ("it.jsonl",),
        lambda folder: read_prompts(folder / "it.jsonl"),
        named=True,
        whole=True,
    ),
    Reader("latents", _latents, ("it.safetensors",), lambda at: read_latents(at / "it.safetensors"), named=True),
    *(
        [
            Reader(
                "compiled steps",
                lambda at: (at / "step-0.pt2").write_bytes(_package()),
                ("step-0.pt2",),
                _code,
                whole=True,
            )
        ]
        if shutil.which("g++")
        else []
    ),
    Reader("rates of products", _rates, (f"fnmodels/{product_table.table_file({}).name}",), _read_rates),
    Reader(
        "the manifest of a checkpoint that a run starts from",
        _model(),
        ("fnmodels_manifest.json",),
        lambda folder: initial_model.check_unchanged(folder) or True,
    ),
)
