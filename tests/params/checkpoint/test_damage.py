"""Every checkpoint of the corpus is refused with the right error and message, or loaded, in bounded time."""

import shutil
import time
from pathlib import Path

import pytest
import torch

import params as P
from fnmodels import tree
from tests.params.checkpoint.damage import BASES, Damage, corpus, make_bases
from tests.support.cases import generic_params

# Seconds of processor time: the largest file takes about 1 (2 on a slow machine), a quadratic reader takes minutes.
LONGEST = 10.0
CHANGED = {"norm", "layers.1.mlp.up_proj", "lm_head"}  # leaves whose values the valid checkpoints may change


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    make_bases(folder)
    return folder


@pytest.mark.timeout(30)  # fails a read that hangs
@pytest.mark.parametrize("damage", corpus(), ids=str)
def test_damage(damage: Damage, bases: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases / damage.base, folder)
    folder = damage.do(folder) or folder
    begin = time.process_time()
    if damage.kind is None:
        config, loaded = P.load_pretrained(folder, check_finite=damage.check_finite)
        assert config == BASES[damage.base][0]
        flat, wanted = tree.flatten(loaded), tree.flatten(generic_params(config))
        assert flat.keys() == wanted.keys()
        for path in flat.keys() - CHANGED:
            assert torch.allclose(flat[path].float(), wanted[path], rtol=1e-2, atol=1e-2), path  # some become bf16
    else:
        with pytest.raises(damage.kind) as caught:
            P.load_pretrained(folder, check_finite=damage.check_finite)
        assert caught.type is damage.kind or issubclass(damage.kind, OSError) or damage.kind is P.CheckpointError
        message = str(caught.value)
        for words in (*damage.words, str(folder)):
            assert words in message, message
        assert len(message) < 5000
    assert time.process_time() - begin < LONGEST


def test_the_corpus_is_large_and_has_good_ones() -> None:
    refused = [damage for damage in corpus() if damage.kind]
    assert len(refused) >= 180 and len(corpus()) - len(refused) >= 20
    assert all(damage.words for damage in refused)


def test_what_is_good_is_loaded_bit_for_bit(bases: Path) -> None:
    for name, (config, _) in BASES.items():
        loaded = tree.flatten(P.load_pretrained(bases / name)[1])
        assert all(torch.equal(loaded[path], leaf) for path, leaf in tree.flatten(generic_params(config)).items())
