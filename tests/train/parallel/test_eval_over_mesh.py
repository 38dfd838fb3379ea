"""Scores of texts over a mesh are those of one process."""

from pathlib import Path

import pytest

import params as P
from fnmodels import llama
from fnmodels.errors import UserError
from tests.support.cases import generic_params
from tests.support.ranks_pool import Ranks, devices
from train.eval.over_mesh import load_sharded, mesh_of_flag, score_over_mesh
from train.eval.scoring import score_continuations
from train.parallel import Mesh

CONFIG = llama.Config(62, 32, 48, 2, 4, 2, max_position_embeddings=24, tie_word_embeddings=True)
PAIRS = [([1, 2], [3, 4, 5]), ([7], list(range(10, 34))), ([1], [2]), ([5, 6, 7, 8], []), ([9] * 30, [3, 4])]


def scored(folder: str, sizes: dict[str, int]) -> list[float]:
    mesh = Mesh(**sizes)
    devices(mesh)
    config, params = load_sharded(Path(folder), mesh, family=None, dtype=None)
    return score_over_mesh(params, config, PAIRS, mesh, batch_tokens=40)


@pytest.mark.parametrize("sizes", [{"fsdp": 2}, {"dp": 2}, {"tp": 2}], ids=str)
def test_scores_over_a_mesh_are_those_of_one_process(sizes: dict[str, int], ranks: Ranks, tmp_path: Path) -> None:
    params = generic_params(CONFIG)
    P.save_pretrained(tmp_path, CONFIG, params)
    wanted = [logp for logp, _ in score_continuations(params, CONFIG, PAIRS)]
    for found in ranks(2)(scored, str(tmp_path), sizes):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_a_mesh_that_does_not_fit_is_a_sentence() -> None:
    for text, said in [
        ("nosuch=2", "--mesh nosuch=2: "),
        ("pp=2", "texts are scored over dp, fsdp, ep and tp"),
        ("fsdp=2", "and there is 1: give torchrun --nproc-per-node 2 -m train.eval"),
    ]:
        with pytest.raises(UserError, match=said):
            mesh_of_flag(text)
