"""Dropout of encoder-decoders: masks that packing, splitting and recomputation keep, every rate, and transformers'."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from fnmodels.inputs import noise_keys
from fnmodels.models.common.family import traits_of
from fnmodels.models.encoder_decoder import cross_attention
from fnmodels.ops.dropout import Dropout
from tests.support.cases import positions_of, segments
from tests.support.dropouts import apart, check_places, fixed_dropout

from .test_pairs import VARIANTS, config_of, pairs, params_of, reference_of, tokens_like

ROWS, LENGTH = 3000, 5
# Documents by (row, segment), in both rows.
SOURCES, TARGETS = segments((7, 4, 2), (9, 4)), segments((5, 3, 2), (2, 8))
RATES = Dropout(weights=0.3, attention=0.2, mlp=0.1, embedding=0.15, neurons=0.25, final=0.35)
NAMES = ("t5", "t5_v1_1", "umt5", "bart", "m2m_100", "t5gemma")
every_pair = pytest.mark.parametrize("name", NAMES)


class Problem:
    """A packed batch of pairs in fp64, with all rates that the family has a place for."""

    def __init__(self, name: str, rates: Dropout = RATES) -> None:
        config = config_of(name)
        self.final = any("norm" in stack for stack in (params_of(name)["encoder"],))
        rates = rates if self.final else dataclasses.replace(rates, final=0.0)
        self.config = dataclasses.replace(config, dropout=rates)
        self.params = tree.map(Tensor.double, params_of(name))
        self.tokens, self.decoder_tokens = tokens_like(SOURCES, 0), tokens_like(TARGETS, 1)
        self.keys = {
            "rng": noise_keys(3, positions_of(SOURCES), SOURCES),
            "decoder_rng": noise_keys(4, positions_of(TARGETS), TARGETS),
        }

    def forward(self, sources: Tensor, targets: Tensor, of: dict[str, Any], noise: Any, **options: Any) -> Tensor:
        given = {"segment_ids": sources, "positions": positions_of(sources)}
        given |= {"decoder_segment_ids": targets, "decoder_positions": positions_of(targets)}
        prepared = fnmodels.prepare_pair(self.config, of["tokens"], of["decoder_tokens"], **given, **noise)
        return fnmodels.forward(self.params, *prepared, config=self.config, **options)

    def whole(self, noise: Any = None, **options: Any) -> Tensor:
        of = {"tokens": self.tokens, "decoder_tokens": self.decoder_tokens}
        return self.forward(SOURCES, TARGETS, of, self.keys if noise is None else noise, **options)

    def alone(self, row: int, segment: int) -> Tensor:
        """The logits of one pair in rows of its own, with the keys of its tokens."""
        source, target = (ids[row] == segment for ids in (SOURCES, TARGETS))
        of = {"tokens": self.tokens[row, source][None], "decoder_tokens": self.decoder_tokens[row, target][None]}
        noise = {"rng": self.keys["rng"][row, source][None], "decoder_rng": self.keys["decoder_rng"][row, target][None]}
        ones = [torch.ones_like(ids) for ids in of.values()]
        return self.forward(*ones, of, noise)[0]


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def check_packed_pairs(name: str) -> None:
    p = Problem(name)
    whole = p.whole()
    for row, segment in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
        close(p.alone(row, segment), whole[row, TARGETS[row] == segment])


@every_pair
def test_packed_separate_split_and_recomputed_masks_are_the_same(name: str) -> None:
    check_packed_pairs(name)
    p = Problem(name)
    close(p.whole(layer_fn=fnmodels.remat), p.whole())
    batch = {"tokens": p.tokens, "positions": positions_of(SOURCES), "segment_ids": SOURCES, **p.keys}
    batch |= {"decoder_tokens": p.decoder_tokens, "decoder_positions": positions_of(TARGETS)}
    batch |= {"decoder_segment_ids": TARGETS, "labels": p.decoder_tokens}
    total, _ = train.losses.pair_loss(p.params, batch, config=p.config)
    halves = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(2)]
    close(sum(train.losses.pair_loss(p.params, half, config=p.config)[0] for half in halves), total)
    without = {key: value for key, value in batch.items() if not key.endswith("rng")}
    assert abs(train.losses.pair_loss(p.params, without, config=p.config)[0] - total) > 1e-3


@every_pair
def test_every_rate_acts_alone_and_without_keys_there_is_none(name: str) -> None:
    plain = Problem(name).whole({})
    close(plain, Problem(name, Dropout()).whole())
    for field in dataclasses.fields(Dropout):
        p = Problem(name, Dropout(**{field.name: 0.4}))
        assert ((p.whole() - plain).abs().max() > 1e-4) == (field.name != "final" or p.final), field.name


def test_a_seed_gives_both_stacks_keys_of_their_own() -> None:
    p = Problem("t5")
    of = p.tokens[:, :10], p.tokens[:, :10]
    inputs, _, _ = fnmodels.prepare_pair(p.config, *of, rng=3)
    assert not (inputs["encoder"]["rng"] == inputs["decoder"]["rng"]).any()
    assert torch.equal(inputs["decoder"]["memory_rng"], inputs["encoder"]["rng"])
    close(p.whole({"rng": 3}), p.whole({"rng": 3}))
    assert not torch.allclose(p.whole({"rng": 3}), p.whole({"rng": 5}))


@pytest.mark.parametrize("noise", [{"rng": torch.ones(2, 13).long()}, {"decoder_rng": torch.ones(2, 10).long()}])
def test_keys_of_one_stack_alone_are_refused(noise: Any) -> None:
    with pytest.raises(ValueError, match=r"the decoder's keys \[B, S\] are decoder_rng, which comes with"):
        Problem("t5").whole(noise)


def test_planted_keys_of_the_place_in_the_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(weights: Tensor, noise: Any, *rest: Any) -> Tensor:
        keys = torch.arange(noise.keys.shape[1]).expand_as(noise.keys)
        return dropped_weights(weights, dataclasses.replace(noise, keys=keys), *rest)

    dropped_weights = cross_attention.dropped_weights
    monkeypatch.setattr(cross_attention, "dropped_weights", planted)
    with pytest.raises(AssertionError):
        check_packed_pairs("bart")


class Trained:
    """A model with dropout, here and in transformers."""

    def __init__(self, name: str, rows: int) -> None:
        self.name, table = name, traits_of(fnmodels.family_of(config_of(name))).dropout
        rates = dict(zip(table, (0.35, 0.3, 0.25), strict=False))
        self.config = type(config_of(name)).from_hf(VARIANTS[name] | rates)
        assert self.config.to_hf().items() >= rates.items()
        self.model = reference_of({"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, **VARIANTS[name], **rates})
        given = tokens_like(torch.ones(1, LENGTH), 2), tokens_like(torch.ones(1, LENGTH - 1), 3)
        self.tokens, self.decoder_tokens = (ids.expand(rows, -1) for ids in given)

    @torch.no_grad()
    def theirs(self) -> Tensor:
        torch.manual_seed(0)
        given = {"input_ids": self.tokens, "decoder_input_ids": self.decoder_tokens}
        logits: Tensor = self.model.train()(**given, use_cache=False).logits
        return logits

    @torch.no_grad()
    def ours(self, dropout: Dropout) -> Tensor:
        own = dataclasses.replace(self.config, dropout=dropout)
        prepared = fnmodels.prepare_pair(own, self.tokens, self.decoder_tokens, rng=1)
        return fnmodels.forward(params_of(self.name), *prepared, config=own)


@pairs
def test_the_same_tensors_are_dropped_at_the_same_rates_as_in_transformers(name: str) -> None:
    p = Trained(name, 1)
    with fixed_dropout():
        check_places(p.ours, p.config.dropout, p.theirs())


# What shows in the logits when it is forgotten; the other places change too little of these models, and show in the
# other ones: together all do.
VISIBLE = {"t5": ("weights", "attention", "embedding", "final"), "bart": ("weights", "attention", "mlp", "neurons")}
VISIBLE |= {"t5gemma": ("weights", "attention", "embedding", "final")}


@pytest.mark.parametrize("name", VISIBLE)
def test_training_with_dropout_is_distributed_as_in_transformers(name: str) -> None:
    p = Trained(name, ROWS)
    theirs = p.theirs()
    means, variances = apart(p.ours(p.config.dropout), theirs)
    assert means < 1.5 and abs(variances) < 0.08, (means, variances)
    places = dataclasses.asdict(p.config.dropout)
    for place in VISIBLE[name]:  # planted: a place that is forgotten
        means, variances = apart(p.ours(Dropout(**places | {place: 0.0})), theirs)
        assert means > 1.5 or abs(variances) > 0.08, (place, means, variances)


@pytest.mark.parametrize("name", ["encoder_layerdrop", "decoder_layerdrop"])
def test_layerdrop_is_refused_with_keys_alone(name: str) -> None:
    config = config_of("bart")
    stated = type(config).from_hf(VARIANTS["bart"] | {name: 0.1})
    tokens = torch.tensor([[3, 4]])
    fnmodels.prepare_pair(stated, tokens, tokens)
    with pytest.raises(ValueError, match=f"states '{name}' = 0.1, which a bart here does not act on: leave rng out"):
        fnmodels.prepare_pair(stated, tokens, tokens, rng=1)
    assert stated.to_hf()[name] == 0.1
