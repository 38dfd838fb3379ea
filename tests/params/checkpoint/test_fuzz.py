"""Seeded mutations of headers, configs and indexes: each is read, or refused by one of our errors, in bounded time.

The later seeds stand behind the `slow` marker.
"""

import copy
import gc
import json
import random
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import params as P
from params.io.safetensors_file import map_file, mapped_tensor, open_tensors
from tests.params.checkpoint.damage import corpus, make_bases
from tests.support.cases import Case, cases, generic_params, structures
from tests.support.garbage import no_collection

LONGEST = 2.0  # seconds of processor time that any single mutation may take

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 1e308, float("nan"), float("inf"), 10**7, 1 << 31, 1 << 63),
    *(
        -(1 << 63),
        1 << 64,
        10**400,
        "",
        "\0",
        "\ud800",
        "a" * 300,
        "1",
        "../x",
        "F32",
        "float32",
        "silu",
        "yarn",
        "llama",
    ),
    *([], [0], [-1], [1, 2, 3], [[]], [None], ["full_attention"], [1 << 62] * 3, {}, {"": 0}, {"a": {"b": []}}),
    *({"rope_type": "linear"}, {"rope_type": "longrope", "factor": 2.0}, {"dtype": "F32"}),
)


NESTED = tuple(f"nested {depth}" for depth in (2, 31, 33, 300, 990, 5000))  # see `dumps`


@pytest.fixture(autouse=True)
def no_garbage_at_the_recursion_limit() -> Iterator[None]:
    """Nested headers reach the limit, where finalizers of what earlier tests left would fail."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value in nested lists and objects."""
    found, level = [], [tree]
    while level:
        inner = level.pop()
        for key in list(inner) if isinstance(inner, dict) else range(len(inner)):
            found.append((inner, key))
            if isinstance(inner[key], (dict, list)):
                level.append(inner[key])
    return found


def mutate_tree(draw: random.Random, tree: Any) -> Any:
    """A copy with one to three values replaced, moved, renamed or dropped."""
    tree = copy.deepcopy(tree)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        spots = places(tree)
        if not spots:
            break
        inner, key = draw.choice(spots)
        kind = draw.randrange(8)
        if kind < 3:
            inner[key] = copy.deepcopy(draw.choice(NASTY))
        elif kind == 3:
            del inner[key]
        elif kind == 4:
            other, there = draw.choice(spots)
            inner[key] = copy.deepcopy(other[there])
        elif kind == 5 and isinstance(inner, dict):
            inner[draw.choice((key + "_", key[:-1], key.upper(), "rope_scaling", "dtype", "type"))] = inner.pop(key)
        elif kind == 6 and isinstance(inner[key], (int, float)):
            inner[key] = draw.choice((inner[key] + 1, inner[key] * 2, -inner[key], str(inner[key]), [inner[key]]))
        else:
            inner[key] = draw.choice(NESTED)
    return tree


def mutate_bytes(draw: random.Random, data: bytes, end: int) -> bytes:
    """Flip, remove or duplicate bytes among the first `end`, or truncate the file."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at, kind = draw.randrange(end), draw.randrange(6)
        if kind < 3 and at < len(changed):
            changed[at] = draw.choice((changed[at] ^ (1 << draw.randrange(8)), draw.randrange(256)))
        elif kind == 3:
            del changed[at : at + draw.choice((1, 2, 20))]
        elif kind == 4:
            changed[at:at] = changed[at : at + draw.choice((1, 8, 60))]
        else:
            del changed[draw.randrange(len(changed) + 1) :]
    return bytes(changed)


def dumps(tree: Any) -> bytes:
    """JSON in which "nested 3" becomes [[[]]]: json.dumps cannot write lists that are nested too deeply."""
    text = json.dumps(tree)
    for name in NESTED:
        depth = int(name.split()[1])
        text = text.replace(f'"{name}"', "[" * depth + "]" * depth)
    return text.encode()


def rewrite(path: Path, data: bytes) -> None:
    """Other content for a file that is there; emptied first, file systems would flush each of 100,000 to the disk."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


def run(seeds: range, mutate: Callable[[random.Random], None], read: Callable[[], None]) -> Counter[str]:
    """The count of each outcome; the seed of a failure is in the message."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        mutate(random.Random(seed))
        with no_collection():
            begin = time.process_time()
            try:
                read()
                outcome = "read"
            except (P.CheckpointError, OSError) as error:
                outcome = type(error).__name__
            except Exception as error:  # any other type fails the test
                raise AssertionError(f"mutation {seed} gave {type(error).__name__}: {error}") from error
            assert time.process_time() - begin < LONGEST, seed
        outcomes[outcome] += 1
    return outcomes


def fuzz_headers(folder: Path, seeds: range) -> Counter[str]:
    """Mutations of a file with tensors of several dtypes. Files that pass are mapped, and each byte of them is read."""
    path = folder / "model.safetensors"
    tensors = {"a": torch.ones(3, 2), "b.weight": torch.ones(4, dtype=torch.bfloat16), "c": torch.ones(2, 0)}
    save_file(tensors | {"d": torch.ones((), dtype=torch.int64)}, path, metadata={"format": "pt"})
    good = path.read_bytes()
    begin = 8 + struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8:begin])

    def mutate(draw: random.Random) -> None:
        if draw.random() < 0.5:
            rewrite(path, mutate_bytes(draw, good, begin))
        else:
            text = dumps(mutate_tree(draw, header))
            rewrite(path, struct.pack("<Q", len(text)) + text + good[begin:])

    def read() -> None:
        with ExitStack() as stack:
            file = open_tensors(path, stack)
            mapping = map_file(file)
            for entry in file.entries.values():
                assert mapped_tensor(mapping, entry).view(-1).view(torch.uint8).sum() >= 0

    return run(seeds, mutate, read)


def fuzz_configs(folder: Path, seeds: range) -> Counter[str]:
    """Mutations of a checkpoint of every family, which is loaded completely."""
    good: list[Case] = [case for case in cases() if case.values is not None]
    folders = {}
    for case in good:
        folders[case] = folder / case.name
        P.save_pretrained(folders[case], case.config, generic_params(case.config))
    current = folder

    def mutate(draw: random.Random) -> None:
        nonlocal current
        case = draw.choice(good)
        current = folders[case]
        values = case.values if draw.random() < 0.5 else case.config.to_hf()
        text = dumps(values)
        mutated = dumps(mutate_tree(draw, values)) if draw.random() < 0.9 else mutate_bytes(draw, text, len(text))
        rewrite(current / "config.json", mutated)

    return run(seeds, mutate, lambda: P.load_pretrained(current) and None)


def fuzz_indexes(folder: Path, seeds: range) -> Counter[str]:
    """Mutations of the index of a sharded model. A missing shard, or a name that is too long, raises an OSError."""
    case = cases()[0]
    P.save_pretrained(folder, case.config, generic_params(case.config), max_shard_size=20_000)
    path = folder / "model.safetensors.index.json"
    good = json.loads(path.read_text())

    def mutate(draw: random.Random) -> None:
        text = dumps(good)
        rewrite(path, dumps(mutate_tree(draw, good)) if draw.random() < 0.9 else mutate_bytes(draw, text, len(text)))

    return run(seeds, mutate, lambda: P.load_pretrained(folder) and None)


def fuzz_quantized(folder: Path, seeds: range) -> Counter[str]:
    """Mutations of an fp8 checkpoint: of its header, or of config.json's quantization; it is loaded completely."""
    make_bases(folder)
    folder = folder / "single"
    next(damage for damage in corpus() if damage.name == "tensors/good: fp8 with its scales").do(folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    good, values = weights.read_bytes(), json.loads(config.read_text())
    begin = 8 + struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8:begin])

    def mutate(draw: random.Random) -> None:
        which = draw.random() < 0.5
        text = dumps(mutate_tree(draw, header) if which else header)
        rewrite(weights, struct.pack("<Q", len(text)) + text + good[begin:])
        said = values["quantization_config"]
        rewrite(
            config,
            dumps(values | {"quantization_config": said if which else next(iter(mutate_tree(draw, [said])), None)}),
        )

    return run(seeds, mutate, lambda: P.load_pretrained(folder) and None)


@pytest.mark.parametrize("seeds", [range(3000), pytest.param(range(3000, 20_000), marks=pytest.mark.slow)])
def test_headers(seeds: range, tmp_path: Path) -> None:
    outcomes = fuzz_headers(tmp_path, seeds)
    print(outcomes)
    assert set(outcomes) == {"read", "FormatError", "UnsupportedError"} and outcomes["read"] < len(seeds) / 5


@pytest.mark.parametrize("seeds", [range(500), pytest.param(range(500, 1500), marks=pytest.mark.slow)])
def test_configs(seeds: range, tmp_path: Path) -> None:
    outcomes = fuzz_configs(tmp_path, seeds)
    print(outcomes)
    kinds = {"read", "FormatError", "UnsupportedError", "ConfigError", "MismatchError"}
    assert set(outcomes) == kinds and outcomes["read"] < len(seeds) / 2


@pytest.mark.parametrize("seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)])
def test_indexes(seeds: range, tmp_path: Path) -> None:
    outcomes = fuzz_indexes(tmp_path, seeds)
    print(outcomes)
    ours = {"read", "FormatError", "IndexFileError", "UnsafePathError"}
    assert set(outcomes) - ours <= {"FileNotFoundError", "OSError"} and outcomes["read"] < len(seeds) / 5


@pytest.mark.parametrize("seeds", [range(200), pytest.param(range(200, 1000), marks=pytest.mark.slow)])
def test_quantized(seeds: range, tmp_path: Path) -> None:
    outcomes = fuzz_quantized(tmp_path, seeds)
    print(outcomes)
    kinds = {"read", "FormatError", "UnsupportedError", "ConfigError", "MismatchError"}
    assert set(outcomes) == kinds and outcomes["read"] < len(seeds) / 2


SIZES = (10**5, 10**7, 1 << 31)


@pytest.mark.slow
def test_every_number_of_every_family_may_be_enormous(tmp_path: Path) -> None:
    """Each integer of a model type's config.json in turn set to a huge value: refused, or loaded if it is no size.

    The sizes take turns over the cases, so that each meets a field which many families have. Numbers of experts, each
    of which has its own tensors in files, meet one size everywhere, which must be refused before names are listed.
    """
    outcomes: Counter[str] = Counter()
    seen: set[tuple[str, Any]] = set()
    for index, case in enumerate(case for case in structures() if case.values is not None):
        folder = tmp_path / case.name
        P.save_pretrained(folder, case.config, generic_params(case.config))
        for values in (case.values, case.config.to_hf()):
            numbers = {i: key for i, (inner, key) in enumerate(places(values)) if type(inner[key]) is int}
            names = [i for i, key in numbers.items() if type(key) is int or (case.config.model_type, key) not in seen]
            seen |= {(case.config.model_type, key) for key in numbers.values()}
            outcomes += run(range(len(names)), *_enlarging(folder / "config.json", values, names, SIZES[index % 3]))
            experts = [i for i in names if "experts" in str(numbers[i])]
            outcomes += run(range(len(experts)), *_enlarging(folder / "config.json", values, experts, SIZES[1]))
    print(outcomes)
    assert set(outcomes) == {"read", "UnsupportedError", "ConfigError", "MismatchError"}


def _enlarging(
    path: Path, values: Any, numbers: list[int], size: int
) -> tuple[Callable[[random.Random], None], Callable[[], None]]:
    """A function for `run` that sets the next integer to `size` on each call and loads the checkpoint."""
    left = iter(numbers)

    def mutate(_: random.Random) -> None:
        changed = copy.deepcopy(values)
        inner, key = places(changed)[next(left)]
        inner[key] = size
        rewrite(path, dumps(changed))

    return mutate, lambda: P.load_pretrained(path.parent) and None
