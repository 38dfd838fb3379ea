"""Log-probabilities of the tokens of prompts, several prompts in one packed row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels.image_text import Image
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.registry import text_config
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import ForwardOptions, Kernel
from fnmodels.tree import Tree, leaves
from train.data.token_budget import token_budget, unpacked
from train.data.turns.image_rows import image_batch, image_entries
from train.eval.scoring import tables_depend_on_length
from train.generation.images import text_model
from train.losses.next_token import model_states
from train.losses.token_chunks import chunk_of, per_token

TokenScores = tuple[tuple[int, float], ...]  # (token, nats) of the likeliest tokens of a place


@dataclass(frozen=True)
class PromptScores:
    """Scores of a prompt's tokens after those before: nats, and the likeliest of each place; None for the first."""

    logp: list[float | None]
    likeliest: list[TokenScores | None]


@torch.no_grad()
def score_prompts(
    params: Tree,
    config: Any,
    prompts: Sequence[Sequence[int]],
    likeliest: int,
    *,
    images: Sequence[Sequence[Image]] | None = None,
    kernel: Kernel = "auto",
) -> list[PromptScores]:
    """The scores of each prompt, in one row where the model's rotary tables allow it; each has a token at least.

    params, config: of the whole model where it reads images. likeliest: how many of the likeliest tokens are named,
    among them not always the prompt's own. images: of each prompt.
    """
    ids = [torch.tensor(list(prompt)) for prompt in prompts]
    own = [()] * len(ids) if images is None else images
    if tables_depend_on_length(text_config(config), [(list(prompt), 1) for prompt in prompts]):
        each = zip(ids, own, strict=True)
        return [score for one, of in each for score in _row(params, config, [one], likeliest, len(one), kernel, [of])]
    return _row(params, config, ids, likeliest, None, kernel, own)


def _row(
    params: Tree,
    config: Any,
    ids: list[Tensor],
    likeliest: int,
    length: int | None,
    kernel: Kernel,
    images: Sequence[Sequence[Image]],
) -> list[PromptScores]:
    labels = [torch.cat((one[1:], torch.tensor([IGNORE]))) for one in ids]
    entries = image_entries(params, ids, images, config=config, kernel=kernel) if any(images) else {}
    ((row,),) = token_budget({"tokens": ids, "labels": labels, **entries}, sum(map(len, ids)))
    found_images = image_batch(row, images, config=config) if entries else row.batch
    layout = fnmodels.inputs.document_layout(row.batch["positions"], row.batch["segment_ids"])
    (params, text), whole = text_model(params, config), config
    device = leaves(params)[0].device
    batch = {name: tensor.to(device) for name, tensor in found_images.items()}
    sizes = None if length is None else torch.tensor([length], device=device)
    options = ForwardOptions(kernel, layout=None if entries else layout)  # images may see what follows in their row
    x = model_states(params, batch, config=whole, length=sizes, options=options).x
    config = text
    family, most = fnmodels.family_of(config), min(max(likeliest, 1), config.vocab_size)

    def one(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        with invariant_rows(options.invariant):
            logits = family.unembed(params, x[None], config=config)[0]
        every = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), -1)
        best = every.topk(most)
        return every.gather(-1, labels.clamp(min=0)[:, None])[:, 0], best.indices, best.values

    chunk = chunk_of("auto", config.vocab_size, device, x.dtype)
    found = per_token(one, (x[0], batch["labels"][0]), batch["labels"][0].shape, chunk)
    each = [unpacked([row], [values[None].cpu()]) for values in found]
    scores = []
    for number, own in enumerate(ids):
        nats, tokens, values = ([None, *parts[number][: len(own) - 1].tolist()] for parts in each)
        best = [
            None if a is None else tuple(zip(a, b, strict=True))[:likeliest]
            for a, b in zip(tokens, values, strict=True)
        ]
        scores.append(PromptScores(nats, best))
    return scores
