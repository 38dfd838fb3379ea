"""Mutated settings and headers of every form of quantized files: read, or refused by one of our errors, and in time."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

import params as P
from tests.params.checkpoint.test_fuzz import dumps, mutate_tree, rewrite, run
from tests.params.quantized.test_dialects import READ, write

KINDS = {"read", "FormatError", "UnsupportedError", "ConfigError", "MismatchError"}


def mutation(folder: Path, file: str) -> Callable[[random.Random], None]:
    """A function that rewrites the folder with its settings in `file`, or the header of its tensors, mutated."""
    weights, config = folder / "model.safetensors", folder / file
    good, values = weights.read_bytes(), json.loads(config.read_text())
    begin = 8 + struct.unpack("<Q", good[:8])[0]
    header = json.loads(good[8:begin])

    def mutate(draw: random.Random) -> None:
        which = draw.random() < 0.3
        text = dumps(mutate_tree(draw, header) if which else header)
        rewrite(weights, struct.pack("<Q", len(text)) + text + good[begin:])
        said = values.get("quantization_config", values)
        changed = said if which else next(iter(mutate_tree(draw, [said])), None)
        rewrite(config, dumps(changed if said is values else values | {"quantization_config": changed}))

    return mutate


SEEDS = [(range(2), False), (range(2, 4), True), (range(4, 22), False), (range(22, 40), True)]


@pytest.mark.parametrize(
    ("seeds", "kept"), [pytest.param(*each, marks=[pytest.mark.slow] * (each[0].start > 3)) for each in SEEDS]
)
def test_mutated_dialects_are_read_or_refused(seeds: range, kept: bool, tmp_path: Path) -> None:
    for number, dialect in enumerate(READ):
        folder = tmp_path / str(number)
        write(folder, dialect)

        def read(folder: Path = folder) -> None:
            P.load_pretrained(folder, keep_quantized=kept)

        outcomes = run(seeds, mutation(folder, dialect.file or "config.json"), read)
        assert set(outcomes) <= KINDS, (dialect.name, outcomes)
