"""The tasks beside language modeling over a mesh make the run of one process."""

import contextlib
import functools
import io
import os
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks_pool import Ranks
from tests.train.job.test_tasks import KINDS, command_of, model_of, rows_of, train


def of_ranks(kind: str, run: str, flags: list[str], *more: str) -> int:
    """A run in the pool's processes and their process group."""
    environment = {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    with (
        mock.patch.dict(os.environ, environment),
        contextlib.redirect_stdout(io.StringIO()),
        pytest.warns(UserWarning, match="The process group that is there is used as it is"),
    ):
        return train(kind, Path(run), flags, *more)


@pytest.mark.parametrize("kind", KINDS)
def test_task_over_a_mesh_is_that_of_one_process(kind: str, ranks: Ranks, tmp_path: Path) -> None:
    """The held-out examples do not divide over the ranks."""
    flags = command_of(kind, tmp_path)
    held = tmp_path / "held.jsonl"
    if kind == "flow":
        held = tmp_path / f"{kind}.jsonl"
    else:
        held.write_text("".join((tmp_path / f"{kind}.jsonl").read_text().splitlines(keepends=True)[:5]))
    flags += ["--heldout", str(held), "--eval-every", "2"]
    assert train(kind, tmp_path / "one", flags) == 0
    assert set(ranks(2)(of_ranks, kind, str(tmp_path / "two"), flags, "--mesh", "fsdp=2")) == {0}
    close = functools.partial(torch.testing.assert_close, rtol=1e-3, atol=1e-4)
    for one, two in zip(rows_of(tmp_path / "one"), rows_of(tmp_path / "two"), strict=True):
        for name in ("loss", "grad_norm", "heldout_loss"):
            close(two.get(name), one.get(name)) if name in one else None
    found, wanted = model_of(tmp_path / "two"), model_of(tmp_path / "one")
    assert found.keys() == wanted.keys()
    for path, leaf in wanted.items():
        torch.testing.assert_close(found[path], leaf, rtol=0, atol=2e-3, msg=path)
