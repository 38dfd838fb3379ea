"""D1 of texts that hear, and of texts whose images queries read or layers attend to."""

import pytest

from tests.support.ranks_pool import Ranks
from tests.support.sense_losses import SENSES
from tests.train.parallel.test_encoders import checked, step_of
from train.parallel import Mesh

MESHES = [*((name, "tp=2") for name in SENSES), ("granite_speech", "fsdp=2"), ("mllama", "fsdp=2"), ("blip", "fsdp=2")]


@pytest.mark.parametrize(("name", "mesh"), MESHES)
def test_a_step_is_that_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    checked(ranks(Mesh.parse(mesh).world)(step_of, name, mesh, {}, {}), name)
