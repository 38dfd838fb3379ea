"""Models of an encoder and a decoder: `prepare_pair`, for `fnmodels.forward` with the config of both.

    inputs, masks, freqs_cis = prepare_pair(config, tokens, decoder_tokens, segment_ids=..., decoder_segment_ids=...)
    logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)       # [B, S, V] of the decoder

Each of the three is {"encoder": ..., "decoder": ...}, what `prepare` makes for that stack, and masks["cross"] says
which tokens of the encoder a token of the decoder sees: those of its document, which has the same segment id in both
rows. So packed pairs are as each alone. The encoder runs once with `config.encoder` and `stack_params(params,
"encoder")`, the decoder with its result as inputs["memory"].
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE, Document
from fnmodels.inputs.segments import integers, positions_from_segments
from fnmodels.models.common.registry import stack_configs
from fnmodels.models.encoder_decoder.cross_attention import cross_mask
from fnmodels.ops.dropout import named
from fnmodels.preparation import check_tokens

from .apply import prepare

Pair = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def prepare_pair(
    config: Any,
    tokens: Tensor,
    decoder_tokens: Tensor,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    decoder_positions: Tensor | None = None,
    decoder_segment_ids: Tensor | None = None,
    rng: int | Tensor | None = None,
    decoder_rng: Tensor | None = None,
) -> Pair:
    """Prepares a batch of an encoder-decoder for `fnmodels.forward`.

    Args:
        config: The config of both stacks.
        tokens: What the encoder reads, [B, K].
        decoder_tokens: What the decoder reads, already shifted, int64 [B, S].
        positions: [B, K]; None: counted from 0 in each row.
        segment_ids: [B, K], pairs from 1, padding 0 or less; None: a row is one pair without padding.
        decoder_positions: [B, S]; None: counted from 0 in each row.
        decoder_segment_ids: [B, S]: a token of the decoder sees the encoder's tokens of its segment.
        rng: Turns the config's dropout on, see `fnmodels.prepare`: a seed for both stacks, [] or [B], or the keys
            [B, K] of the encoder's tokens, which come with decoder_rng.
        decoder_rng: The keys of the decoder's tokens [B, S]; None: of the seed.

    Returns:
        (inputs, masks, freqs_cis), each {"encoder", "decoder"}; masks have "cross" too.

    Raises:
        ValueError: The model has a single stack, or the stacks have other numbers of rows, or one has keys of noise
            and the other has none.
    """
    stacks = stack_configs(config)
    if not stacks:
        raise ValueError(
            f"A model of type {config.model_type!r} with this config has one stack: take fnmodels.prepare."
        )
    if tokens.shape[:1] != decoder_tokens.shape[:1]:
        raise ValueError(
            f"The encoder has {tokens.shape[0]} rows and the decoder {decoder_tokens.shape[0]}: row i of one is for "
            "row i of the other."
        )
    check_tokens(decoder_tokens, "decoder_tokens")
    places = {"positions": decoder_positions, "segment_ids": decoder_segment_ids}
    source = prepare(stacks["encoder"], tokens, positions=positions, segment_ids=segment_ids, rng=rng)
    target = prepare(stacks["decoder"], decoder_tokens, **places, rng=_of_decoder(rng, decoder_rng))
    if rng is not None:
        target[0]["memory_rng"] = source[0]["rng"]
        if decoder_rng is None:
            target[0]["rng"] = named(target[0]["rng"], "decoder")
    inputs, masks, freqs_cis = ({"encoder": one, "decoder": other} for one, other in zip(source, target, strict=True))
    where: list[Tensor] = []
    for made, ids in ((target, decoder_segment_ids), (source, segment_ids)):
        at = made[0]["positions"]
        where += [at, made[0]["valid"].long() if ids is None else integers("segment_ids", ids).expand(at.shape)]
    return inputs, {**masks, "cross": cross_mask(*where)}, freqs_cis


def _of_decoder(rng: int | Tensor | None, decoder_rng: Tensor | None) -> int | Tensor | None:
    """The seed or the keys of the decoder's tokens."""
    keys = isinstance(rng, Tensor) and rng.ndim > 1
    if keys is not (decoder_rng is not None):
        raise ValueError(
            "rng is a seed, of which both stacks have keys, or keys [B, K] of the encoder's tokens; the decoder's keys "
            "[B, S] are decoder_rng, which comes with the encoder's."
        )
    return rng if decoder_rng is None else decoder_rng


def pair_batch(
    pairs: Sequence[tuple[Document, Document]], length: int, decoder_length: int, *, start: int
) -> dict[str, Tensor]:
    """Packs pairs of token ids unsplit: the batch of `train.losses.pair_loss`.

    The longest pairs come first, each in the first row with room in both.

    Args:
        pairs: (source, target) of each pair, token ids.
        length: Tokens of sources in a row.
        decoder_length: Tokens of targets in a row.
        start: The token that each target begins with in decoder_tokens, `config.decoder_start_token_id`.

    Returns:
        tokens, positions, segment_ids [B, length] of the sources, and decoder_tokens, decoder_positions,
        decoder_segment_ids, labels [B, decoder_length] of the targets: labels are the targets, and decoder_tokens the
        same, one place later.

    Raises:
        ValueError: A source or target is empty or too long, or there are no pairs.
    """
    limits = (length, decoder_length)
    made: list[tuple[list[int], list[int]]] = []
    for index, pair in enumerate(pairs):
        made.append(([int(t) for t in pair[0]], [int(t) for t in pair[1]]))
        for what, found, limit in zip(("source", "target"), made[-1], limits, strict=True):
            if not 0 < len(found) <= limit:
                raise ValueError(
                    f"The {what} of pair {index} has {len(found)} tokens; a row has room for 1 to {limit}."
                )
    if not made:
        raise ValueError("There are no pairs.")
    rows: list[list[int]] = []
    free: list[list[int]] = []
    for index in sorted(
        range(len(made)), key=lambda i: -max(len(made[i][0]) / length, len(made[i][1]) / decoder_length)
    ):
        need = [len(part) for part in made[index]]
        at = next((r for r, room in enumerate(free) if all(n <= f for n, f in zip(need, room, strict=True))), len(rows))
        if at == len(rows):
            rows.append([])
            free.append(list(limits))
        rows[at].append(index)
        free[at] = [f - n for n, f in zip(need, free[at], strict=True)]
    batch = {name: torch.zeros(len(rows), length, dtype=torch.long) for name in ("tokens", "segment_ids")}
    names = ("decoder_tokens", "decoder_segment_ids", "labels")
    batch |= {name: torch.zeros(len(rows), decoder_length, dtype=torch.long) for name in names}
    batch["labels"].fill_(IGNORE)
    for row, members in enumerate(rows):
        ends = [0, 0]
        for segment, index in enumerate(sorted(members), 1):
            source, target = made[index]
            first, second = (slice(end, end + len(part)) for end, part in zip(ends, (source, target), strict=True))
            values = {"tokens": source, "decoder_tokens": [start, *target[:-1]], "labels": target}
            for name, value in values.items():
                batch[name][row, first if name == "tokens" else second] = torch.tensor(value)
            batch["segment_ids"][row, first] = batch["decoder_segment_ids"][row, second] = segment
            ends = [first.stop, second.stop]
    for prefix in ("", "decoder_"):
        batch[f"{prefix}positions"] = positions_from_segments(batch[f"{prefix}segment_ids"])
    return batch
