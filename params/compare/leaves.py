"""Differences of leaves: their names and shapes on disk, then their values."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.storage import extract_parameter
from fnmodels.tree import Tree
from params.checkpoint.tensor_map import by_name, is_leftover, stored_leaves, unread_part

from .table import largest_difference


def leaf_faults(config: DecoderConfig, theirs: Mapping[str, Tensor]) -> list[str]:
    """Differences in name or shape between the tensors on disk that our spec expects and the reference's.

    A bias of a router's choice that is all zeros and that the family lacks is no difference: files of A.X K1 have none,
    and transformers' class makes one. Nor is a tensor that the family leaves unread.
    """
    ours = {name: pieces[0].disk_shape for name, pieces in by_name(stored_leaves(config)).items()}
    faults = []
    for name in (*ours, *(name for name in theirs if name not in ours)):
        if name not in theirs:
            faults.append(f"{name}: only ours, {list(ours[name])}")
        elif name not in ours:
            empty = name.endswith(".e_score_correction_bias") and not theirs[name].any()
            if not (empty or is_leftover(config, name) or unread_part(config, name)):
                faults.append(f"{name}: only theirs, {list(theirs[name].shape)}")
        elif ours[name] != tuple(theirs[name].shape):
            faults.append(f"{name}: ours is {list(ours[name])}, theirs {list(theirs[name].shape)}")
    return faults


def value_faults(config: DecoderConfig, params: Tree, theirs: Mapping[str, Tensor]) -> dict[str, float]:
    """{path: largest difference} of the leaves whose values differ from the reference's."""
    flat, found = tree.flatten(params), {}
    for parameter in stored_leaves(config):
        ours, reference = flat[parameter.path], extract_parameter(parameter.stored, theirs).detach()
        if not torch.equal(ours, reference):
            found[parameter.path] = largest_difference(ours, reference)
    return found
