"""Loading checkpoints: strictness, laziness and memory."""

import gc
import itertools
import json
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree
from tests.support.cases import Case, family_modules, generic_params, namings, structures, tokens_of, variants_of

SMALL = llama.Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
NAME = "model.layers.1.mlp.up_proj.weight"
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NAMINGS = namings()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A valid checkpoint in a single file."""
    P.save_pretrained(tmp_path / "model", SMALL, generic_params(SMALL))
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A valid checkpoint in three or more files."""
    P.save_pretrained(tmp_path / "sharded", SMALL, generic_params(SMALL), max_shard_size=4000)
    assert len(list((tmp_path / "sharded").glob("model-*.safetensors"))) >= 3
    return tmp_path / "sharded"


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Rewrite the single file with some tensors replaced, added, or dropped (None); dots are written as __."""
    content = load_file(folder / FILE) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: tensor.clone() for name, tensor in content.items() if tensor is not None}, folder / FILE)


def configure(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def equal_trees(one: Any, two: Any) -> bool:
    flat, other = tree.flatten(one), tree.flatten(two)
    return list(flat) == list(other) and all(
        leaf.dtype == other[path].dtype and torch.equal(leaf, other[path]) for path, leaf in flat.items()
    )


# Returned values


@pytest.mark.parametrize("copy", [False, True])
def test_bit_equal_and_mapped_or_owned(folder: Path, copy: bool) -> None:
    reference = load_file(folder / FILE)
    config, loaded = P.load_pretrained(folder, copy=copy)
    names = llama.hf_names(config)  # all plain
    flat = P.flatten(loaded)
    assert config == SMALL and names.keys() == flat.keys() and sorted(names.values()) == sorted(reference)
    for path, leaf in flat.items():
        assert torch.equal(leaf, reference[names[path]]) and leaf.dtype == torch.float32
        assert not leaf.requires_grad and leaf.is_contiguous() and leaf.is_leaf
        # not a slice of the file's storage: pickling or copying one leaf takes that leaf
        assert leaf.untyped_storage().nbytes() == leaf.nbytes

    before = (folder / FILE).read_bytes()
    flat["norm"].zero_()
    again = P.load_pretrained(folder)[1]
    assert (folder / FILE).read_bytes() == before and again["norm"].abs().sum() > 0

    saved = flat["embed_tokens"].clone()
    if copy:
        (folder / FILE).write_bytes(b"\0" * len(before))  # in place, which our own saves never do
    else:
        (folder / FILE).unlink()
    gc.collect(0)
    assert torch.equal(flat["embed_tokens"], saved)


def test_shards_equal_the_single_file(folder: Path, sharded: Path) -> None:
    assert equal_trees(P.load_pretrained(folder)[1], P.load_pretrained(sharded)[1])
    assert equal_trees(P.load_pretrained(folder)[1], P.load_pretrained(str(sharded), copy=True)[1])


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("asked", [None, torch.float32, torch.bfloat16])
def test_dtype_changes_when_asked_only(tmp_path: Path, stored: torch.dtype, asked: torch.dtype | None) -> None:
    params = generic_params(SMALL, stored)
    params = params | {"norm": params["norm"].float()}  # each tensor has its own dtype
    P.save_pretrained(tmp_path, SMALL, params)
    loaded = P.load_pretrained(tmp_path, dtype=asked)[1]
    assert equal_trees(loaded, tree.map(lambda leaf: leaf.to(asked or leaf.dtype), params))


def test_casting_goes_over_all_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("params.checkpoint.load.cast_buffer", lambda: torch.empty(28, dtype=torch.uint8))
    loaded = P.load_pretrained(folder, dtype=torch.bfloat16)[1]
    assert equal_trees(loaded, generic_params(SMALL, torch.bfloat16))


def test_leaves_that_keep_their_dtype(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = llama.spec

    def spec(config: llama.Config) -> Any:
        made = plain(config)
        made["norm"] = P.Leaf((16,), torch.float32, ("embed",), P.Constant(1.0), keep_dtype=True)
        return made

    monkeypatch.setattr(llama, "spec", spec)
    loaded = P.load_pretrained(folder, dtype=torch.bfloat16)[1]
    assert loaded["norm"].dtype == torch.float32 and loaded["embed_tokens"].dtype == torch.bfloat16


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_unaligned_files(folder: Path) -> None:
    """Old writers did not align tensors: here a single byte shifts all of them."""
    content = load_file(folder / FILE)
    leftover = "model.layers.0.self_attn.rotary_emb.inv_freq"
    entries: dict[str, Any] = {leftover: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    data = b"\0"
    for name, tensor in content.items():
        entries[name] = {"dtype": "F32", "shape": list(tensor.shape)}
        entries[name]["data_offsets"] = [len(data), len(data) + tensor.nbytes]
        data += tensor.numpy().tobytes()
    write_raw(folder / FILE, entries, data)
    for kwargs in ({}, {"copy": True}, {"dtype": torch.float64}):
        loaded = P.load_pretrained(folder, **kwargs)[1]
        assert equal_trees(tree.map(lambda leaf: leaf.float(), loaded), generic_params(SMALL))
        assert all(leaf.data_ptr() % leaf.itemsize == 0 for leaf in tree.leaves(loaded))


def test_default_device_does_not_leak_in(folder: Path) -> None:
    with torch.device("meta"):
        for kwargs in ({}, {"copy": True}, {"dtype": torch.bfloat16}):
            assert not any(leaf.is_meta for leaf in tree.leaves(P.load_pretrained(folder, **kwargs)[1]))


@pytest.mark.parametrize(
    ("case", "dtype"), list(zip(NAMINGS, itertools.cycle((None, torch.bfloat16)), strict=False)), ids=str
)  # a cast depends on the leaf alone, so the two ways to load take turns
def test_nothing_is_left_unfilled(
    case: Case, dtype: torch.dtype | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all new memory filled with NaN, loading and a tree from meta give the same forward."""
    params = generic_params(case.config)
    P.save_pretrained(tmp_path, case.config, params)
    plain = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        made = plain(*args, **kwargs)
        return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

    monkeypatch.setattr(torch, "empty", poisoned)
    config, loaded = P.load_pretrained(tmp_path, dtype=dtype, copy=True)
    monkeypatch.undo()
    target = tree.map(
        lambda leaf: torch.full(leaf.shape, float("nan"), dtype=leaf.dtype), P.abstract(config, dtype=dtype)
    )
    tree.map(lambda slot, leaf: slot.copy_(leaf), target, loaded)
    expected = tree.map(lambda leaf, slot: leaf.to(slot.dtype), params, target)
    ready = fnmodels.prepare(config, tokens_of(config, 2, 9))
    outputs = [fnmodels.forward(weights, *ready, config=config) for weights in (target, loaded, expected)]
    assert torch.isfinite(outputs[0]).all()
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[2])


@pytest.mark.parametrize("case", NAMINGS, ids=str)
def test_saving_and_loading_gives_the_same_back(case: Case, tmp_path: Path) -> None:
    params = generic_params(case.config)
    P.save_pretrained(tmp_path, case.config, params, max_shard_size=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and (tmp_path / INDEX).is_file()
    config, loaded = P.load_pretrained(tmp_path)
    assert config == case.config and equal_trees(loaded, params)


MEMORY = """
import sys, torch, params as P
def memory(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))
def measure(**kwargs):
    open("/proc/self/clear_refs", "w").write("5")  # resets the peak
    before = memory("VmRSS")
    loaded = P.load_pretrained(sys.argv[1], **kwargs)[1]
    return memory("VmHWM") - before, sum(leaf.nbytes for leaf in P.flatten(loaded).values())
measure()
for kwargs in ({}, {"copy": True}, {"dtype": torch.float32}):
    print(*measure(**kwargs))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures by /proc")
def test_memory(tmp_path: Path) -> None:
    """Memory: mapped needs none, copies only the result, casts less than one tensor more."""
    config = llama.Config(
        vocab_size=8000, hidden_size=512, intermediate_size=2048, num_hidden_layers=16, num_attention_heads=8,
        num_key_value_heads=8,
    )  # fmt: skip
    P.save_pretrained(tmp_path, config, P.init(config, 0, dtype=torch.bfloat16))
    largest = 8000 * 512 * 4
    command = [sys.executable, "-c", MEMORY, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(P.__file__).parents[1]).stdout
    lazy, owned, cast = (tuple(map(int, line.split())) for line in output.splitlines())
    assert cast[1] == 2 * owned[1] == 2 * lazy[1] > 200e6
    assert lazy[0] < 4e6
    assert owned[0] <= owned[1] + largest
    assert cast[0] <= cast[1] + largest


# Tied heads: config tied? x head on disk? x equal?


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("head", ["absent", "equal", "different", "other dtype", "other shape", "one sign"])
def test_ties(folder: Path, tied: bool, head: str) -> None:
    embedding = load_file(folder / FILE)["model.embed_tokens.weight"]
    embedding[3, 3] = 0.0
    heads = {"absent": None, "equal": embedding, "different": embedding + 1, "other dtype": embedding.bfloat16()}
    heads |= {"other shape": embedding[1:], "one sign": embedding.clone()}
    heads["one sign"][3, 3] = -0.0
    change(folder, model__embed_tokens__weight=embedding, lm_head__weight=heads[head])
    configure(folder, tie_word_embeddings=tied)
    bad = {"different", "other dtype", "other shape", "one sign"} if tied else {"absent", "other shape"}
    if head in bad:
        with pytest.raises(P.MismatchError, match=r"lm_head\.weight"):
            P.load_pretrained(folder)
        return
    config, loaded = P.load_pretrained(folder)
    assert config.tie_word_embeddings == tied and ("lm_head" in loaded) != tied
    if not tied:
        assert torch.equal(loaded["lm_head"], heads[head])
        assert loaded["lm_head"].data_ptr() != loaded["embed_tokens"].data_ptr(), "two leaves, even when equal"


@pytest.mark.parametrize("place", [(0, 0), (3, 3), (39, 15)])
def test_ties_are_compared_piece_by_piece_and_nothing_is_mapped(
    folder: Path, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that shrinks would kill a process that has mapped it, so comparisons read instead."""

    def refuse(*_: object) -> None:
        raise AssertionError("a file was mapped")

    embedding = load_file(folder / FILE)["model.embed_tokens.weight"]
    configure(folder, tie_word_embeddings=True)
    monkeypatch.setattr("params.checkpoint.read_leaf.map_file", refuse)
    monkeypatch.setattr("params.checkpoint.load.cast_buffer", lambda: torch.empty(112, dtype=torch.uint8))
    change(folder, lm_head__weight=embedding)
    assert torch.equal(P.load_pretrained(folder, copy=True)[1]["embed_tokens"], embedding)
    other = embedding.clone()
    other[place] += 1
    change(folder, lm_head__weight=other)
    for kwargs in ({"copy": True}, {}):
        with pytest.raises(P.MismatchError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            P.load_pretrained(folder, **kwargs)


# Strict both ways


def test_all_differences_are_in_one_error(folder: Path) -> None:
    content = load_file(folder / FILE)
    change(
        folder,
        **{
            "model.norm.weight": None,
            "model.layers.0.input_layernorm.weight": torch.ones(17),
            NAME: content[NAME].T.contiguous(),
            "model.layers.0.mlp.up_proj.weight": torch.ones(24, 16, dtype=torch.int32),
            "model.layers.0.mlp.gate_proj.weight": torch.ones(24, 16).to(torch.float8_e4m3fn),
            "model.layers.0.mlp.down_proj.weight": torch.ones(16, 24, dtype=torch.bool),
            "model.layers.0.self_attn.o_proj.weight": torch.ones(16, 16, dtype=torch.complex64),
            "model.layers.2.input_layernorm.weight": torch.ones(16),
            "transformer.wte": torch.ones(3),
        },
    )
    with pytest.raises(P.MismatchError) as caught:
        P.load_pretrained(folder)
    message = str(caught.value)
    for part in (
        str(folder),
        "9 differences",
        "model.norm.weight: missing; expected [16]",
        f"model.layers.0.input_layernorm.weight in {FILE}: expected [16], found [17]",
        f"{NAME} in {FILE}: expected [24, 16], found [16, 24]",
        "model.layers.0.mlp.up_proj.weight in model.safetensors: expected a floating dtype, found int32",
        "expected a floating dtype, found float8_e4m3fn",
        "expected a floating dtype, found bool",
        "expected a floating dtype, found complex64",
        "'model.layers.2.input_layernorm.weight' in model.safetensors: unexpected, [16] of float32",
        "'transformer.wte' in model.safetensors: unexpected, [3] of float32",
    ):
        assert part in message, message


def test_long_lists_are_cut(folder: Path) -> None:
    configure(folder, num_hidden_layers=40)
    with pytest.raises(P.MismatchError, match=r"342 differences(?s:.*)\.\.\. and 322 more") as caught:
        P.load_pretrained(folder)
    assert len(str(caught.value)) < 3000


def test_a_config_that_disagrees(folder: Path) -> None:
    configure(folder, hidden_size=32, head_dim=8)
    with pytest.raises(P.MismatchError, match=r"expected \[40, 32\], found \[40, 16\]"):
        P.load_pretrained(folder)


# Other damage is in tests/params/checkpoint/damage


def test_a_file_that_shrinks_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import params.checkpoint.header_checks

    plain = params.checkpoint.header_checks._compare

    def shrink(*args: Any) -> None:
        plain(*args)
        os.truncate(folder / FILE, (folder / FILE).stat().st_size - 4)

    monkeypatch.setattr(params.checkpoint.header_checks, "_compare", shrink)
    with pytest.raises(P.FormatError, match="ended 4 bytes early"):
        P.load_pretrained(folder, copy=True)


# The number of layers in a file, which XLM's variant states as its files do.
_NUMBER = {"": ("num_hidden_layers",), "xlm": ("n_layers", "num_hidden_layers")}


@pytest.mark.parametrize("case", [case for case in structures() if case.values is not None], ids=str)
def test_absurd_numbers_of_layers(case: Case) -> None:
    """Refused before anything is allocated per layer."""
    tracemalloc.start()
    try:
        for layers in (10_001, 1_000_000, 10**9):
            with pytest.raises(P.ConfigError, match=f"'num_hidden_layers' is {layers}, but must be .* to 1000"):
                type(case.config).from_hf(case.values | dict.fromkeys(_NUMBER.get(case.family, _NUMBER[""]), layers))
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # half a pointer for each layer of a million
    finally:
        tracemalloc.stop()


PUBLISHED = {
    name: v for family in family_modules() for name, v in getattr(variants_of(family), "published", dict)().items()
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_accepted(name: str, tmp_path: Path) -> None:
    """Including the fields that families ignore: classes, dtypes, tokens."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    P.load_config(tmp_path)


def test_arguments(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"The plan is of another model: \S+ is in only one of them"):
        P.load_pretrained(folder, plan={})
    with pytest.raises(ValueError, match="made from sizes alone"):
        P.load_pretrained(folder, plan=P.plan(llama.spec(SMALL), P.Rules(), {"dp": 1}))
    for dtype in (torch.int8, torch.float8_e4m3fn, "bfloat16"):
        with pytest.raises(TypeError, match=r"floating torch\.dtype"):
            P.load_pretrained(folder, dtype=dtype)  # type: ignore[arg-type]


def test_no_handle_stays_open(sharded: Path) -> None:
    if not Path("/proc/self/fd").exists():
        pytest.skip("counts by /proc")

    def count() -> int:
        gc.collect(0)  # what is older is not of this test; to look through a session's objects takes seconds
        return len(os.listdir("/proc/self/fd"))

    before = count()
    loaded = P.load_pretrained(sharded, copy=True)[1]
    assert count() == before
    loaded = P.load_pretrained(sharded)[1]
    del loaded
    assert count() == before
    (sharded / INDEX).unlink()
    with pytest.raises(FileNotFoundError):
        P.load_pretrained(sharded)
    assert count() == before
