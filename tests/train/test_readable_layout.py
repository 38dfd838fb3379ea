"""`readable_layout` finds a layout where the host can read the masks, and says None where it cannot."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.func import vmap

import fnmodels
import params as P
import train
from fnmodels import llama, tree
from train.run_options import readable_layout

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CONFIG = llama.Config(vocab_size=32, num_key_value_heads=1, **SIZES)
IDS = torch.tensor([[1, 1, 2, 2], [1, 1, 1, 0]])


def masks_of(ids: Tensor) -> Any:
    positions = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    return fnmodels.family_of(CONFIG).attention_masks(CONFIG, positions, ids)


def test_plain_masks_have_their_layout() -> None:
    found = readable_layout(masks_of(IDS))
    assert found is not None and found == fnmodels.layout(masks_of(IDS))


def test_masks_without_values_have_none() -> None:
    assert readable_layout(masks_of(IDS.to("meta"))) is None
    with FakeTensorMode() as mode:
        assert readable_layout(masks_of(mode.from_tensor(IDS))) is None


def test_masks_that_are_mapped_have_none() -> None:
    found = []

    def run(ids: Tensor) -> Tensor:
        found.append(readable_layout(masks_of(ids[None])))
        return ids

    vmap(run)(IDS)
    assert found == [None]


def test_a_step_on_meta_has_shapes() -> None:
    optimizer = train.adamw(1e-3)
    state = train.init_state(tree.map(lambda leaf: leaf.to("meta"), P.init(CONFIG, 0)), optimizer)
    batch = {"tokens": IDS, "labels": IDS, "segment_ids": IDS, "positions": torch.arange(4).expand(2, 4)}
    batch = {name: value.to("meta") for name, value in batch.items()}
    step = train.make_step(functools.partial(train.next_token_loss, config=CONFIG), optimizer)
    _, metrics = step(state, batch)
    assert metrics["loss"].is_meta
