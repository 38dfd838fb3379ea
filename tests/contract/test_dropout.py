"""Dropout by keys of tokens, in every family: its masks are the same however a batch is packed, split, permuted or run.

Outputs in fp64 are compared to 1e-9: one element of one mask that differed would change them by its size.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import fnmodels
import train
from fnmodels import tree
from fnmodels.inputs import noise_keys
from fnmodels.models.common.dropout import dropout_table
from fnmodels.models.common.family import field_of, traits_of
from fnmodels.models.common.registry import ordered_kinds
from fnmodels.ops import dropout as op
from fnmodels.ops.attention import disentangled
from fnmodels.ops.dropout import Dropout
from fnmodels.stack import loop
from tests.support import masks
from tests.support.cases import (
    Batch,
    Case,
    attending_layers,
    batch_of,
    cases,
    generic_params,
    layer_structures,
    representatives,
    segments,
    short,
    sublayers,
)

RATES = Dropout(weights=0.3, attention=0.2, mlp=0.1, embedding=0.15)
every_structure = pytest.mark.parametrize(
    "case", [case for case in layer_structures() if hasattr(case.config, "dropout")], ids=str
)
every_part = pytest.mark.parametrize(
    "case", [case for case in representatives() if hasattr(case.config, "dropout")], ids=str
)
some_parts = pytest.mark.parametrize("case", every_part.args[1][::2], ids=str)
PACKED = segments((4, 7, 2), (6, 5, -2), (13,))


class Problem:
    """A packed batch of a family with all rates above 0, in fp64."""

    def __init__(self, case: Case, **rates: float) -> None:
        rates = rates or dataclasses.asdict(RATES)
        self.config = dataclasses.replace(case.config, dropout=Dropout(**rates))
        self.params = generic_params(self.config, torch.float64)
        self.batch = batch_of(self.config, PACKED)
        self.keys = noise_keys(3, self.batch.positions, self.batch.segment_ids)

    def forward(self, rng: Any = 3, batch: Any = None, **options: Any) -> Tensor:
        inputs, masks, freqs_cis = self.prepared(rng, batch)
        return fnmodels.forward(self.params, inputs, masks, freqs_cis, config=self.config, **options)

    def apart(self) -> Batch:
        """Each document in a row of its own: a seed numbers them in the same order."""
        within = torch.arange(13) < torch.tensor([4, 7, 2, 6, 5, 13])[:, None]
        made = Batch(self.config, *(torch.zeros(6, 13, dtype=torch.int64) for _ in range(3)), self.batch.length)
        made.tokens[within], made.positions[within] = self.batch.tokens[PACKED > 0], self.batch.positions[PACKED > 0]
        made.segment_ids[within] = 1
        return made

    def prepared(self, rng: Any = 3, batch: Any = None) -> Any:
        b = batch or self.batch
        places = {"positions": b.positions, "segment_ids": b.segment_ids, "length": b.length, "rng": rng}
        return fnmodels.prepare(self.config, b.tokens, **places)


def close(one: Any, other: Any) -> None:
    for a, b in zip(tree.leaves(one), tree.leaves(other), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@every_structure
def test_packed_separate_split_and_rematerialised_masks_are_the_same(case: Case) -> None:
    p = Problem(case)
    whole = p.forward()
    close(p.forward(layer_fn=fnmodels.remat), whole)
    close(p.forward(p.keys), whole)
    rows = [p.forward(p.keys[i : i + 1], p.batch.take(slice(i, i + 1), slice(None))) for i in range(3)]
    close(torch.cat(rows), whole)
    apart = p.apart()
    close(p.forward(batch=apart)[apart.valid], whole[PACKED > 0])


@every_structure
def test_masks_are_the_same_bit_for_bit(case: Case) -> None:
    """Packed, each document in a row, each row alone, permuted, and rematerialised where a backward pass follows."""
    p = Problem(case, **dataclasses.asdict(RATES) | {"neurons": 0.25})
    of_batch = masks.keyed(p.keys, p.batch.valid)

    def recorded(batch: Batch, keys: Tensor, **options: Any) -> masks.Masks:
        with masks.recording(of_batch, p.batch.valid, 4 * p.config.num_hidden_layers) as found:
            p.forward(keys, batch, **options)
        return found

    packed = recorded(p.batch, of_batch)
    apart = p.apart()
    by_seed = noise_keys(3, apart.positions, apart.segment_ids)
    masks.check_same(recorded(apart, masks.keyed(by_seed, apart.valid)).grids, packed.grids)
    rows = [recorded(p.batch.take(slice(i, i + 1), slice(None)), of_batch[i : i + 1]).grids for i in range(3)]
    masks.check_same(masks.joined(rows), packed.grids)
    with masks.recording(of_batch, p.batch.valid, 4 * p.config.num_hidden_layers) as again:
        params = tree.map(lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()), p.params)
        inputs, made, freqs_cis = p.prepared(of_batch)
        logits = fnmodels.forward(params, inputs, made, freqs_cis, config=p.config, layer_fn=fnmodels.remat)
        logits.where(p.batch.valid[..., None], 0).square().sum().backward()
    masks.check_same(again.grids, packed.grids)
    assert all(
        count == (1 if layer < 0 else 2) * packed.counts[name, layer] for (name, layer), count in again.counts.items()
    )
    if not ordered_kinds(p.config):
        order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
        with masks.recording(of_batch, p.batch.valid, 4 * p.config.num_hidden_layers) as moved:
            inputs, made, freqs_cis = fnmodels.permute(p.prepared(of_batch), order)
            fnmodels.forward(p.params, inputs, made, freqs_cis, config=p.config)
        masks.check_same(moved.grids, packed.grids)


STEPS: dict[str, dict[str, Any]] = {
    "halves": {"accumulate": 2},
    "rows": {"accumulate": 3, "inplace": False},
    "list": {},
    "full": {"remat": "full", "accumulate": 3},
    "selective": {"remat": "selective"},
    "every other": {"remat": "every:2"},
    "own": {"layer_fn": fnmodels.remat},
}


@pytest.mark.parametrize("how", STEPS)
@pytest.mark.parametrize("name", ["gpt2", "mixtral", "qwen3_next"])
def test_steps_of_microbatches_and_remat_have_the_masks_of_one_batch(name: str, how: str) -> None:
    p = Problem(short(next(case for case in cases() if case.name == name)), **dataclasses.asdict(RATES))
    keys, options = masks.keyed(p.keys, p.batch.valid), dict(STEPS[how])
    batch, optimizer = p.batch.batch() | {"rng": keys}, train.sgd(0.1)
    own = {"layer_fn": options.pop("layer_fn")} if "layer_fn" in options else {}

    def stepped(batches: Any, **options: Any) -> masks.Grids:
        loss = functools.partial(train.next_token_loss, config=p.config, length=p.batch.length, **own)
        with masks.recording(keys, p.batch.valid, p.config.num_hidden_layers) as found:
            train.make_step(loss, optimizer, **options)(train.init_state(p.params, optimizer), batches)
        return found.grids

    rows = [{entry: tensor[i : i + 1] for entry, tensor in batch.items()} for i in (2, 0, 1)]
    masks.check_same(stepped(rows if how == "list" else batch, **options), stepped(batch))


@every_structure
def test_without_keys_or_rates_there_is_no_dropout(case: Case) -> None:
    p = Problem(case)
    plain = batch_of(case.config, PACKED).forward(p.params, kernel="auto")
    assert torch.equal(p.forward(None, layout=fnmodels.layout(p.prepared(None)[1])), plain)
    off = Problem(case, mlp=0.0)
    assert torch.equal(off.forward(3, layout=fnmodels.layout(off.prepared(None)[1])), plain)
    assert not torch.allclose(p.forward(3), plain) and not torch.allclose(p.forward(3), p.forward(4))


@every_part
def test_every_rate_acts_alone(case: Case) -> None:
    """Each place has masks of its own, in every layer that has the place."""
    plain = batch_of(case.config, PACKED).forward(generic_params(case.config, torch.float64))
    for field in dataclasses.fields(Dropout):
        if field.name == "final":
            with pytest.raises(ValueError, match='"final" is for encoder-decoders'):
                Problem(case, final=0.4).forward()
            continue
        if field.name == "neurons" and not any("mlp.neurons" in name for name in fnmodels.tap_names(case.config)):
            continue
        if field.name == "weights" and not attending_layers(case.config):
            continue
        if field.name == "mlp" and not any("mlp" in parts for parts in sublayers(case.config)):
            continue
        if field.name == "attention" and not any("attention" in n for n in fnmodels.tap_names(case.config)):
            continue
        assert (Problem(case, **{field.name: 0.4}).forward() - plain).abs().max() > 1e-4, field.name


@every_structure
def test_a_permuted_batch_has_its_masks_permuted(case: Case) -> None:
    if ordered_kinds(case.config):
        pytest.skip("its layers read tokens in their order")
    p, order = Problem(case), torch.randperm(13, generator=torch.Generator().manual_seed(0))
    inputs, masks, freqs_cis = fnmodels.permute(p.prepared(), order)
    moved = fnmodels.forward(p.params, inputs, masks, freqs_cis, config=p.config)
    close(moved, p.forward()[:, order])


@some_parts
def test_seeds_may_be_mapped_and_gradients_see_the_masks(case: Case) -> None:
    p = Problem(case)

    def loss(params: Any, seed: Any, **options: Any) -> Tensor:
        inputs, masks, freqs_cis = p.prepared(seed)
        logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=p.config, kernel="math", **options)
        return logits.where(p.batch.valid[..., None], 0).square().sum()

    path = "layers.0.mlp" if "mlp" in p.params["layers"][0] else "layers.0"
    mapped = vmap(grad(functools.partial(loss, layer_fn=fnmodels.remat)), (None, 0))(p.params, torch.arange(2))
    for seed in range(2):
        alone = grad(loss)(p.params, seed)
        for name, leaf in tree.flatten(alone).items():
            if name.startswith(path):
                torch.testing.assert_close(tree.flatten(mapped)[name][seed], leaf, rtol=1e-8, atol=1e-8)


@every_structure
def test_a_stage_of_layers_has_the_masks_of_its_layers(case: Case) -> None:
    config = dataclasses.replace(case.config, dropout=Dropout(attention=0.2, mlp=0.1, weights=0.3))
    p = Problem(dataclasses.replace(case, config=config), attention=0.2, mlp=0.1, weights=0.3)
    inputs, masks, freqs_cis = p.prepared()
    if field_of(config, "hidden_size_per_layer_input") or hasattr(fnmodels.family_of(config), "shared"):
        pytest.skip("layers need tensors beside x, which other tests pass")
    x, carried = fnmodels.family_of(config).embed(p.params, inputs, config=config), {}
    x = x.where(inputs["valid"][..., None], 0)
    for i in range(config.num_hidden_layers):
        more = {"valid": inputs["valid"], "noise": inputs["rng"], "carried": carried}
        x, carried = fnmodels.run_layers(p.params, x, masks, freqs_cis, i, i + 1, config=config, **more)
    close(x, fnmodels.hidden(p.params, inputs, masks, freqs_cis, config=config))


def test_compiled_dropout_is_that_of_eager_mode() -> None:
    p = Problem(short(next(case for case in cases() if case.name == "gpt2")))
    prepared = p.prepared()
    compiled = torch.compile(
        lambda *batch: fnmodels.forward(p.params, *batch, config=p.config), backend="aot_eager", fullgraph=True
    )
    close(compiled(*prepared), p.forward())
    whole = torch.compile(p.forward, backend="aot_eager", fullgraph=True)  # with `prepare`, as a whole step has it
    close(whole(p.keys), p.forward())
    torch.compiler.reset()


def test_kernels_without_single_weights_are_refused() -> None:
    p = Problem(short(next(case for case in cases() if case.name == "gpt2")))
    assert torch.equal(p.forward(), p.forward(kernel="math"))
    for kernel in ("sdpa", "invariant", lambda *args, **options: args[2]):
        with pytest.raises(ValueError, match=r'at a rate of 0.3, needs them written out.*"auto" or kernel="math"'):
            p.forward(kernel=kernel)
    rest = Problem(short(next(case for case in cases() if case.name == "gpt2")), mlp=0.2)
    close(rest.forward(kernel="sdpa"), rest.forward(kernel="math"))


def test_a_step_on_a_cache_has_no_dropout() -> None:
    p = Problem(short(next(case for case in cases() if case.name == "gpt2")))
    cache = fnmodels.init_cache(p.config, 1, 8, dtype=torch.float64)
    inputs, masks, freqs_cis = fnmodels.prepare_step(p.config, torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="this call has a cache: leave rng out"):
        fnmodels.prefill(p.params, inputs | {"rng": torch.ones(1, 2).long()}, masks, freqs_cis, cache, config=p.config)


@pytest.mark.parametrize("case", [c for c in cases() if c.values and hasattr(c.config, "dropout")], ids=str)
def test_published_rates_are_read_and_saved(case: Case) -> None:
    family: Any = fnmodels.family_of(case.config)
    table = dropout_table(case.config)
    stated = {name: 0.05 * (i + 1) for i, name in enumerate(table)}
    config = type(case.config).from_hf(case.values | stated)
    places = {place: stated[name] for name, of in table.items() for place in of}
    assert config.dropout == Dropout(**places)
    written = config.to_hf()
    assert {name: written[name] for name in table} == stated and type(config).from_hf(written) == config
    without = {name: value for name, value in case.values.items() if name not in table}
    defaults = traits_of(family).dropout_defaults
    usual = Dropout(**{place: defaults.get(name, 0.0) for name, of in table.items() for place in of})
    of_their_own = ("seed_oss", "jina_embeddings_v3", "xglm", "biogpt")  # defaults
    if case.values["model_type"] not in of_their_own:
        assert type(config).from_hf(without).dropout == usual
    if places:
        changed = dataclasses.replace(config, dropout=Dropout())
        assert type(config).from_hf(changed.to_hf()).dropout == Dropout()


def test_a_rate_that_no_family_acts_on_is_refused_with_keys_alone() -> None:
    case = next(case for case in cases() if case.name == "modernbert" or case.family == "modernbert")
    config = type(case.config).from_hf(case.values | {"mlp_dropout": 0.2, "classifier_dropout": 0.3})
    fnmodels.prepare(config, torch.tensor([[1, 2]]))
    with pytest.raises(ValueError, match=r"the config states 'mlp_dropout' = 0.2, which a modernbert here does not"):
        fnmodels.prepare(config, torch.tensor([[1, 2]]), rng=1)


def recorded(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[Tensor]:
    """The masks of one forward pass of GPT-2 with two layers, in the order in which they act."""
    p, masks = Problem(next(case for case in cases() if case.name == "gpt2")), list[Tensor]()
    thinned = op._thinned

    def noted(x: Tensor, hashes: Tensor, rate: float) -> Tensor:
        masks.append(hashes >= 2**31)  # at one rate, so that equal hashes are equal masks
        return thinned(x, hashes, rate)

    with monkeypatch.context() as patch:
        patch.setattr(op, "_thinned", noted)
        p.forward(**options)
    return masks


def check_masks_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [mask for mask in recorded(monkeypatch) if mask.ndim == 3]
    assert len(masks) == 5  # of the embedding, and of both sublayers of both layers
    for i, one in enumerate(masks):
        for other in masks[:i]:
            assert abs(float((one ^ other).double().mean()) - 0.5) < 5 * 0.5 / one.numel() ** 0.5


def test_masks_of_layers_and_names_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    check_masks_are_independent(monkeypatch)


def test_masks_are_the_same_bit_for_bit_when_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(block: Any) -> Any:
        def run(*args: Any, **tensors: Any) -> Any:
            block(*args, **tensors)
            return block(*args, **tensors)

        return run

    once, again = recorded(monkeypatch), recorded(monkeypatch, layer_fn=twice)
    assert len(again) == 2 * len(once) - 1
    assert all(any(torch.equal(mask, other) for other in again) for mask in once)


def without_the_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "fold", lambda keys, index: keys)


def one_mask_for_two_names(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(op, "_number", lambda name: 0)


def by_the_index_in_the_row(patch: pytest.MonkeyPatch) -> None:
    def keys(rng: Any, positions: Tensor, ids: Tensor) -> Tensor:
        return noise_keys(rng, torch.arange(ids.shape[1]).expand_as(ids), ids)

    patch.setattr("fnmodels.preparation.noise_keys", keys)


@pytest.mark.parametrize("plant", [without_the_layer, one_mask_for_two_names], ids=lambda plant: plant.__name__)
def test_planted_keys_without_a_part_are_found(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_masks_are_independent(monkeypatch)


def test_a_planted_key_of_the_index_in_the_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_index_in_the_row(monkeypatch)
    with pytest.raises(AssertionError):
        test_packed_separate_split_and_rematerialised_masks_are_the_same(
            short(next(case for case in cases() if case.name == "gpt2"))
        )


def deberta() -> Problem:
    return Problem(short(next(case for case in cases() if case.name == "deberta_v2")), embedding=0.3)


def test_tables_of_distances_are_the_same_where_documents_cannot_be_counted() -> None:
    """Under vmap over seeds and compiled, packed and with a layout of one document per row."""
    p = deberta()

    def forward(seed: Any, options: Any, batch: Any = None) -> Tensor:
        return p.forward(seed, batch, **options)

    mapped = vmap(lambda seed: forward(seed, {}))(torch.arange(3, 5))
    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    for i, whole in enumerate((p.forward(3), p.forward(4))):
        close(mapped[i], whole)
        close(compiled(torch.tensor(3 + i), {}, p.batch), whole)
    alone = batch_of(p.config, segments((13,), (9, -4), (11, -2)))  # of the same shape: one graph for both
    layout = fnmodels.layout(p.prepared(3, alone)[1])
    for options in ({"layout": layout}, {}):
        close(compiled(torch.tensor(3), options, alone), p.forward(3, alone))
    torch.compiler.reset()


def test_a_planted_table_of_distances_for_a_whole_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = short(next(case for case in cases() if case.name == "deberta_v2"))
    monkeypatch.setattr(disentangled, "document_keys", lambda keys, positions: keys[:, :1].expand_as(keys))
    with pytest.raises(AssertionError):
        test_packed_separate_split_and_rematerialised_masks_are_the_same(case)


def test_tables_of_distances_differ_by_layer_and_document(monkeypatch: pytest.MonkeyPatch) -> None:
    p, tables = deberta(), list[Tensor]()
    made = disentangled.dropped_table

    def noted(table: Tensor, *args: Any) -> Tensor:
        tables.extend((made(torch.ones_like(table), *args) > 0).flatten(0, 1))
        return made(table, *args)

    monkeypatch.setattr(disentangled, "dropped_table", noted)
    p.forward()
    # Rows of 3, 2 and 1 documents have tables for 3 each, the unused ones alike; in each of the layers.
    assert len({tuple(table.flatten().tolist()) for table in tables}) == p.config.num_hidden_layers * (6 + 1)
    kept = torch.stack(tables).double().mean()
    assert abs(float(kept) - 0.7) < 5 * (0.21 / torch.stack(tables).numel()) ** 0.5
