"""Scores of texts over a mesh of processes, which share the rows of a batch and the weights.

Every process reads the same texts and computes its shard of each batch; all get the same results.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import params as P
from fnmodels import family_of
from fnmodels.errors import UserError
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train.comm.torchrun import rank_and_world_size
from train.losses.logprobs import token_logprobs
from train.parallel.mesh import Mesh
from train.parallel.placement import rules_of
from train.step.evaluation import make_forward_only

from .pretrained import load_model, weights_folder
from .scoring import ContextPair, batch_of, rows_of_pairs, tables_depend_on_length


def mesh_of_flag(text: str) -> Mesh:
    """The mesh of `--mesh`, whose processes torchrun has started; the process group is created if there is none.

    Raises:
        UserError: It is no mesh, has a pipeline, or there is another number of processes.
    """
    try:
        mesh = Mesh.parse(text)
    except ValueError as error:
        raise UserError(f"--mesh {text}: {error}") from error
    if mesh.pp > 1 or mesh.cp > 1:
        raise UserError(f"--mesh {text}: texts are scored over dp, fsdp, ep and tp")
    processes = rank_and_world_size()[1]
    if mesh.world != processes:
        raise UserError(
            f"--mesh {text} is of {mesh.world} processes, and there {'is' if processes == 1 else 'are'} {processes}: "
            f"give torchrun --nproc-per-node {mesh.world} -m train.eval and the flags"
        )
    if mesh.world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    return mesh


def load_sharded(folder: Path, mesh: Mesh, *, family: Any, dtype: torch.dtype | None) -> tuple[DecoderConfig, Tree]:
    """(config, this process's shards) of a checkpoint or of adapters with their base model.

    UserError where the mesh does not divide the model.
    """
    config: DecoderConfig = P.load_config(weights_folder(folder), part="text", family=family)
    try:
        plan = P.plan(family_of(config).spec(config), rules_of(mesh, config), mesh.device_mesh())
    except ValueError as error:
        raise UserError(f"--mesh {mesh}: {error}") from error
    return load_model(folder, merge=True, family=family, dtype=dtype, plan=plan)


def score_over_mesh(
    params: Tree, config: DecoderConfig, pairs: Sequence[ContextPair], mesh: Mesh, *, batch_tokens: int
) -> list[float]:
    """The log-probability in nats of the continuation of each (context, continuation), in their order.

    Args:
        params: This process's shards.
        config: The model's config.
        pairs: The same in all processes.
        mesh: The processes.
        batch_tokens: Tokens of a batch over all of them, padding included; each has one row at least.

    Raises:
        UserError: The model's rotary tables depend on the length of a row, which these rows share.
    """
    rows = rows_of_pairs(pairs, config.max_position_embeddings)
    if tables_depend_on_length(config, rows):
        raise UserError("--mesh: this model's rotary tables depend on the length of a text: leave --mesh out")
    run = make_forward_only(functools.partial(token_logprobs, config=config), mesh=mesh)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index][0]))
    found = [0.0] * len(rows)
    while order:
        width = len(rows[order[0]][0]) - 1
        size = max(1, batch_tokens // width // mesh.rows) * mesh.rows
        some, order = order[:size], order[size:]
        batch = padded_batch([rows[index] for index in some], size)
        logp = run(params, batch)[0].cpu().double().sum(1).tolist()
        for index, value in zip(some, logp, strict=False):  # rows of padding are behind
            found[index] = value
    return found


def padded_batch(rows: Sequence[tuple[list[int], int]], size: int) -> dict[str, torch.Tensor]:
    """A row for each (ids, number of targets), and rows of padding up to `size`."""
    batch = batch_of(rows)
    missing = size - len(rows)
    more = {name: torch.zeros_like(tensor[:1]).expand(missing, -1) for name, tensor in batch.items()}
    more |= {"positions": batch["positions"][:1].expand(missing, -1), "labels": more["labels"] + IGNORE}
    return {name: torch.cat([tensor, more[name]]) for name, tensor in batch.items()}
