"""The valid base checkpoints of the corpus, and functions that modify one."""

import json
import os
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from fnmodels import cohere, deepseek, gemma, gpt2, llama, qwen_moe

FILE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NAME, NORM = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 8, "layer_kinds": ("full", "full_moe")}
_LATENT = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | _EXPERTS
_LATENT |= {"q_lora_rank": 6, "kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
_LATENT |= {"n_routed_experts": 4, "num_nextn_predict_layers": 1}
BASES: dict[str, tuple[Any, int]] = {  # {name: (config, bytes of the largest file)}
    "single": (llama.Config(**SIZES), 10**9),
    "sharded": (llama.Config(**SIZES), 4000),
    "tied": (llama.Config(**SIZES, tie_word_embeddings=True), 10**9),
    "qwen2": (llama.Config(**SIZES, qkv_bias=True, model_type="qwen2"), 10**9),
    "gemma": (gemma.Config(**SIZES), 10**9),
    "cohere2": (cohere.Config(**SIZES, sliding_window=8, layer_kinds=("sliding", "full_nope")), 10**9),
    "qwen3_moe": (qwen_moe.Config(**SIZES, **_EXPERTS, num_experts=4, model_type="qwen3_moe", qk_norm=True), 10**9),
    "deepseek_v3": (deepseek.Config(**_LATENT), 10**9),
    # transformers' own default for both tokens lies beyond this vocabulary
    "gpt2": (gpt2.Config(40, 16, 64, 2, 2, 32, extra=(("bos_token_id", "0"), ("eos_token_id", "0"))), 10**9),
}

Do = Callable[[Path], Path | None]  # changes the folder in place, or returns another one to be read


@dataclass(frozen=True)
class Damage:
    """A change to a copy of a valid checkpoint, the error that reading it must raise (None: none), and words in it."""

    name: str
    do: Do
    kind: type[Exception] | None = None
    words: tuple[str, ...] = ()
    base: str = "single"
    check_finite: bool = False

    def __str__(self) -> str:
        return self.name


def nothing(folder: Path) -> None:
    """Leave the folder unchanged."""


def in_turn(*steps: Do) -> Do:
    def do(folder: Path) -> Path | None:
        for step in steps:
            folder = step(folder) or folder
        return folder

    return do


def deleted(pattern: str) -> Do:
    def do(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return do


def moved(file: str, name: str) -> Do:
    def do(folder: Path) -> None:
        (folder / file).rename(folder / name)

    return do


def raw(data: bytes, file: str = FILE) -> Do:
    def do(folder: Path) -> None:
        (folder / file).write_bytes(data)

    return do


def in_bytes(change: Callable[[bytes], bytes], file: str = FILE) -> Do:
    def do(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return do


def opened(folder: Path) -> tuple[dict[str, Any], bytes]:
    data = (folder / FILE).read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def joined(header: Any, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def in_header(change: Callable[[dict[str, Any]], Any]) -> Do:
    """`change` edits the header, or returns a replacement: a value for JSON, or bytes."""

    def do(folder: Path) -> None:
        header, data = opened(folder)
        (folder / FILE).write_bytes(joined(change(header) or header, data))

    return do


def in_text(change: Callable[[bytes], bytes]) -> Do:
    return in_header(lambda header: change(json.dumps(header).encode()))


def swapped_text(old: bytes, new: bytes) -> Do:
    return in_text(lambda text: text.replace(old, new))


def in_entry(**values: Any) -> Do:
    """Replace fields of NORM in the header."""
    return in_header(lambda header: header[NORM].update(values))


def in_offsets(change: Callable[[int, int], list[Any]], name: str = NORM) -> Do:
    return in_header(lambda header: header[name].update(data_offsets=change(*header[name]["data_offsets"])))


def to_header(**values: Any) -> Do:
    """Add or replace keys of the header."""
    return in_header(lambda header: header.update(values))


def in_json(file: str, change: Callable[[dict[str, Any]], Any]) -> Do:
    """`change` edits the file's JSON."""

    def do(folder: Path) -> None:
        values = json.loads((folder / file).read_text())
        change(values)
        (folder / file).write_text(json.dumps(values))

    return do


def configured(**values: Any) -> Do:
    return in_json(CONFIG, lambda config: config.update(values))


def without(*names: str) -> Do:
    return in_json(CONFIG, lambda config: [config.pop(name) for name in names])


def with_rope(**values: Any) -> Do:
    return configured(rope_parameters={"rope_theta": 10000.0, **values})


def with_tensors(tensors: Mapping[str, Tensor | Callable[[Tensor], Tensor] | None]) -> Do:
    """Add, drop (None) or replace tensors; a function is applied to the old tensor."""

    def do(folder: Path) -> None:
        content: dict[str, Any] = load_file(folder / FILE)
        for name, value in tensors.items():
            content[name] = value(content[name]) if callable(value) else value
        kept = {name: tensor.clone().contiguous() for name, tensor in content.items() if tensor is not None}
        save_file(kept, folder / FILE, {"format": "pt"})

    return do


def each_tensor(change: Callable[[Tensor], Tensor]) -> Do:
    def do(folder: Path) -> None:
        content = load_file(folder / FILE)
        save_file({name: change(tensor) for name, tensor in content.items()}, folder / FILE, {"format": "pt"})

    return do


def with_head(change: Callable[[Tensor], Tensor]) -> Do:
    """Add a head computed from the embedding."""

    def do(folder: Path) -> None:
        with_tensors({HEAD: change(load_file(folder / FILE)[EMBED])})(folder)

    return do


def with_names(change: Callable[[str], str]) -> Do:
    def do(folder: Path) -> None:
        content = load_file(folder / FILE)
        save_file({change(name): tensor for name, tensor in content.items()}, folder / FILE, {"format": "pt"})

    return do


def shard(folder: Path) -> Path:
    """The file to which the index maps NAME."""
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][NAME]


def instead(make: Callable[[Path], Any], file: str | None = None) -> Do:
    """`make` replaces a file, by default the shard that holds NAME."""

    def do(folder: Path) -> None:
        path = folder / file if file else shard(folder)
        path.rename(folder.parent / "elsewhere.safetensors")
        make(path)

    return do


def linked_out(path: Path) -> None:
    path.symlink_to(path.parent.parent / "elsewhere.safetensors")


def link(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# Must not be opened: reading would block, or never end.
SPECIAL: dict[str, Callable[[Path], None]] = {
    "a pipe": os.mkfifo,
    "a device": link("/dev/zero"),
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
}


def sparse(size: int, begin: bytes = b"") -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, size)

    return make
