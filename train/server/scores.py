"""What is asked of the tokens of prompts, several prompts in one packed row: log-probabilities and draws."""

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
from train.data.token_budget import PackedRow, token_budget, unpacked
from train.data.turns.image_rows import image_batch, image_entries
from train.eval.scoring import tables_depend_on_length
from train.generation.images import text_model
from train.generation.sampling import Sampling, sample_state, sample_step
from train.losses.next_token import model_states
from train.losses.token_chunks import automatic_chunk

TokenScores = tuple[tuple[int, float], ...]  # (token, nats) of the likeliest tokens of a place
DRAWN = 1 << 32  # row of the noise of a prompt's first draw: those of answers are below


@dataclass(frozen=True)
class Cells:
    """Token ids [N] whose log-probabilities are asked for, each after the token at its place [N]; places ascend."""

    places: Tensor
    ids: Tensor


@dataclass(frozen=True)
class Draws:
    """Tokens that are drawn after each token of a prompt, `count` of them."""

    count: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class ScoredPrompt:
    """A prompt of at least one token, and what is asked of it.

    Args:
        tokens: The ids.
        images: Those of the prompt.
        likeliest: The number of likeliest tokens that are named at each place.
        cells: Further tokens whose log-probabilities are asked for.
        draws: What is drawn at each place.
    """

    tokens: Sequence[int]
    images: Sequence[Image] = ()
    likeliest: int = 0
    cells: Cells | None = None
    draws: Draws | None = None


@dataclass(frozen=True)
class PromptScores:
    """Scores of a prompt's tokens after those before: nats, and the likeliest of each place; None for the first.

    cells: nats [N] of the cells. drawn: (tokens, their nats) [tokens - 1, count], at temperature 1 whatever drew them.
    """

    logp: list[float | None]
    likeliest: list[TokenScores | None]
    cells: Tensor | None = None
    drawn: tuple[Tensor, Tensor] | None = None


@torch.no_grad()
def score_prompts(
    params: Tree, config: Any, prompts: Sequence[ScoredPrompt], *, kernel: Kernel = "auto"
) -> list[PromptScores]:
    """The scores of each prompt, in one row where the model's rotary tables allow it.

    params, config: of the whole model where it reads images. Among the likeliest is not always the prompt's own token.
    """
    if tables_depend_on_length(text_config(config), [(list(prompt.tokens), 1) for prompt in prompts]):
        return [_row(params, config, [one], len(one.tokens), kernel)[0] for one in prompts]
    return _row(params, config, prompts, None, kernel)


def _row(
    params: Tree, config: Any, prompts: Sequence[ScoredPrompt], length: int | None, kernel: Kernel
) -> list[PromptScores]:
    ids, images = [torch.tensor(list(prompt.tokens)) for prompt in prompts], [prompt.images for prompt in prompts]
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
    x = model_states(params, batch, config=whole, length=sizes, options=options).x[0]
    wanted = _Wanted.of(row, prompts)
    chunk, parts, begin = automatic_chunk(text.vocab_size, device, x.dtype), list[_Found](), 0
    for states in x.split(chunk):
        with invariant_rows(options.invariant):
            logits = fnmodels.family_of(text).unembed(params, states[None], config=text)[0]
        parts.append(wanted.found(logits.to(torch.promote_types(logits.dtype, torch.float32)), begin))
        begin += len(states)
    return wanted.scores(parts, prompts)


@dataclass(frozen=True)
class _Found:
    """Of some tokens of a row: nats of the labels, likeliest tokens and their nats, drawn tokens and their nats, and
    the nats of cells."""

    per_token: tuple[Tensor, ...]
    cells: Tensor


@dataclass(frozen=True)
class _Wanted:
    """What is asked of the tokens of a row. places: of the cells, in the row; ids: theirs; the rest is per token."""

    row: PackedRow
    places: Tensor
    ids: Tensor
    likeliest: int
    draws: Tensor  # of each token
    temperatures: Tensor
    seeds: Tensor

    @staticmethod
    def of(row: PackedRow, prompts: Sequence[ScoredPrompt]) -> "_Wanted":
        places, ids, begin = list[Tensor](), list[Tensor](), 0
        draws = [prompts[number].draws or Draws(0, 1.0, 0) for number in row.sequences]
        for number, length in zip(row.sequences, row.lengths, strict=True):
            if (cells := prompts[number].cells) is not None:
                places.append(cells.places + begin)
                ids.append(cells.ids)
            begin += length

        def per_token(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).repeat_interleave(torch.tensor(row.lengths))

        none = torch.empty(0, dtype=torch.int64)
        return _Wanted(
            row,
            torch.cat([none, *places]),
            torch.cat([none, *ids]),
            max(1, *(prompt.likeliest for prompt in prompts)),
            per_token([one.count for one in draws], torch.int64),
            per_token([one.temperature for one in draws], torch.float32),
            per_token([one.seed for one in draws], torch.int64),
        )

    def found(self, logits: Tensor, begin: int) -> _Found:
        """Of the tokens from `begin` on, which have these logits [T, V]."""
        device, end = logits.device, begin + len(logits)
        every = torch.log_softmax(logits, -1)
        labels = self.row.batch["labels"][0, begin:end].to(device).clamp(min=0)
        best = every.topk(min(self.likeliest, logits.shape[-1]))
        nats = every.gather(-1, labels[:, None])[:, 0]
        drawn = self._drawn(logits, begin)
        first, last = torch.searchsorted(self.places, torch.tensor([begin, end])).tolist()
        places, ids = (t[first:last].to(device) for t in (self.places - begin, self.ids))
        per_token = (nats, best.indices, best.values, drawn, every.gather(-1, drawn))
        return _Found(tuple(one.cpu() for one in per_token), every[places, ids].cpu())

    def _drawn(self, logits: Tensor, begin: int) -> Tensor:
        """Draws [T, the most of a token]; those of tokens with fewer have no meaning."""
        of = slice(begin, begin + len(logits))
        counts, steps = self.draws[of], self.row.batch["positions"][0, of]
        found = torch.zeros(len(logits), int(self.draws.max()), dtype=torch.int64, device=logits.device)
        for number in range(int(counts.max())):
            rows = (counts > number).nonzero()[:, 0]
            seeds, noise = self.seeds[of][rows], torch.full_like(rows, DRAWN + number)
            state = sample_state(Sampling(self.temperatures[of][rows]), seeds, noise, steps=steps[rows].long())
            tokens, *_ = sample_step(logits[rows.to(logits.device)], state, active=torch.ones_like(rows).bool())
            found[rows, number] = tokens
        return found

    def scores(self, parts: Sequence[_Found], prompts: Sequence[ScoredPrompt]) -> list[PromptScores]:
        """The scores of each prompt, of what was found in the chunks of the row."""
        whole = (torch.cat(one)[None] for one in zip(*(part.per_token for part in parts), strict=True))
        nats, ids, values, tokens, drawn = (unpacked([self.row], [one]) for one in whole)
        each = (prompts[number].cells for number in self.row.sequences)
        asked = [0 if one is None else len(one.ids) for one in each]
        cells = dict(zip(self.row.sequences, torch.cat([part.cells for part in parts]).split(asked), strict=True))
        found = []
        for number, prompt in enumerate(prompts):
            size, k = len(prompt.tokens) - 1, prompt.likeliest
            best = zip(ids[number][:size, :k].tolist(), values[number][:size, :k].tolist(), strict=True)
            of = slice(size), slice(0 if prompt.draws is None else prompt.draws.count)
            found.append(
                PromptScores(
                    [None, *nats[number][:size].tolist()],
                    [None, *(tuple(zip(*place, strict=True)) for place in best)],
                    None if prompt.cells is None else cells[number],
                    None if prompt.draws is None else (tokens[number][of], drawn[number][of]),
                )
            )
        return found
