"""`prepare`, the errors of the front, and the rule of rows, permute and split. Forward is tested on every family."""

import dataclasses
import math
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import vmap
from torch.testing import assert_close

import fnmodels
import params as P
from fnmodels import llama
from fnmodels.apply import run_layers
from fnmodels.ops.attention import checks
from fnmodels.ops.attention.select import Asks, attention
from fnmodels.ops.rotary import mrope_table
from fnmodels.tree import leaves
from tests.support.cases import generic_params, off

CONFIG = llama.Config(
    vocab_size=17,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TOKENS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(
    ("segment_ids", "want"),
    [
        (None, [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
        ([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]], [[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]]),
        ([[1, 1, 1, 0, 0], [0, 3, 3, 3, 0]], [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]),
        ([[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]),
        ([[1, 1, 1, 1, 1]], [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]),
    ],
)
def test_positions_of_one_document(segment_ids: list | None, want: list) -> None:
    ids = None if segment_ids is None else torch.tensor(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS, segment_ids=ids)
    assert inputs["positions"].tolist() == want
    assert torch.equal(inputs["valid"], (torch.ones(2, 5) if ids is None else ids.expand(2, 5)) != 0)
    assert torch.equal(freqs_cis["full"], llama.freqs_cis(CONFIG, torch.tensor(want))["full"])
    assert torch.equal(masks["full"].kv_positions, torch.tensor(want))


def test_what_is_not_above_0_is_padding_everywhere() -> None:
    """-1 in the place of 0 makes the same batch: inputs, positions, masks, layout, logits."""
    with_zeros = torch.tensor([[1, 1, 1, 0, 0], [0, 3, 3, 3, 0]])
    with_others = torch.tensor([[1, 1, 1, -1, -2], [-1, 3, 3, 3, 0]])
    weights, logits = generic_params(CONFIG), []
    for ids in (with_zeros, with_others):
        inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS, segment_ids=ids)
        assert torch.equal(inputs["valid"], with_zeros > 0)
        assert inputs["positions"].tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
        found = fnmodels.layout(masks)
        assert found is not None and found.rows == (((0, 3),), ((1, 4),))
        logits.append(fnmodels.forward(weights, inputs, masks, freqs_cis, config=CONFIG, layout=found))
    assert torch.equal(*logits)


def test_integers_of_any_type() -> None:
    want = fnmodels.prepare(CONFIG, TOKENS, positions=TOKENS, segment_ids=torch.ones_like(TOKENS))
    for dtype in (torch.uint8, torch.uint16, torch.int32):
        given = {"positions": TOKENS.to(dtype), "segment_ids": torch.ones_like(TOKENS).to(dtype)}
        for one, other in zip(
            fnmodels.tree.leaves(fnmodels.prepare(CONFIG, TOKENS, **given)), fnmodels.tree.leaves(want), strict=True
        ):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_everything_has_the_batch_by_expanding() -> None:
    given = torch.arange(5)[None]
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS, positions=given, segment_ids=torch.ones_like(given))
    for tensor in (*inputs.values(), masks["full"].kv_segments, freqs_cis["full"]):
        assert tensor.shape[:2] == (2, 5)
    assert inputs["positions"].untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tokens": torch.zeros(5, dtype=torch.long)}, "tokens must be"),
        ({"positions": torch.zeros(2, 4, dtype=torch.long)}, "positions must be"),
        ({"positions": torch.zeros(5, dtype=torch.long)}, "positions must be"),
        ({"positions": torch.zeros(2, 4, 3, dtype=torch.long)}, "positions must be"),
        ({"positions": torch.zeros(2, 5, 3)}, "must be integers, not torch.float32"),
        ({"positions": torch.zeros(2, 5, 3, dtype=torch.long)}, r"not \[2, 5, 3\]: this model's masks count one axis"),
        ({"segment_ids": torch.ones(3, 5, dtype=torch.long), "positions": TOKENS}, "segment_ids must be"),
        ({"segment_ids": torch.tensor([[1, 1, 2, 2, 0]])}, "Row 0 holds several documents"),
    ],
)
def test_prepare_refuses(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fnmodels.prepare(CONFIG, **{"tokens": TOKENS, **given})


def test_bare_tokens_and_vectors() -> None:
    weights = generic_params(CONFIG)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    want = fnmodels.forward(weights, inputs, masks, freqs_cis, config=CONFIG)
    assert torch.equal(fnmodels.forward(weights, TOKENS, masks, freqs_cis, config=CONFIG), want)
    vectors = weights["embed_tokens"][TOKENS]
    assert torch.equal(fnmodels.forward(weights, vectors, masks, freqs_cis, config=CONFIG), want)
    soft, *_ = fnmodels.prepare(CONFIG, vectors)
    assert torch.equal(fnmodels.forward(weights, soft, masks, freqs_cis, config=CONFIG), want)


def test_forward_refuses() -> None:
    weights = generic_params(CONFIG)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    with pytest.raises(ValueError, match="'full' layers, but masks has"):
        fnmodels.forward(weights, inputs, {"sliding": masks["full"]}, freqs_cis, config=CONFIG)
    with pytest.raises(ValueError, match="'fast' is unknown"):
        fnmodels.forward(weights, inputs, masks, freqs_cis, config=CONFIG, kernel="fast")
    with pytest.raises(TypeError):
        fnmodels.forward(weights, inputs, config=CONFIG)  # masks and tables have no default


def test_kernels_and_wrappers_that_depend_on_the_layer() -> None:
    """Layers with equal choices share a block; a cache is filled with them too; compiled, it is one graph."""
    weights, prepared = generic_params(CONFIG), fnmodels.prepare(CONFIG, TOKENS)
    run = partial(fnmodels.forward, weights, *prepared, config=CONFIG)
    count, wrapped, called = CONFIG.num_hidden_layers, [], []

    def doubled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **how: Any) -> torch.Tensor:
        return attention(q, k, 2 * v, mask, kernel="math", **how)

    def recording(block: Any) -> Any:
        wrapped.append(block)

        def call(*args: Any, **more: Any) -> Any:
            called.append(1)
            return block(*args, **more)

        return call

    mine = fnmodels.PerLayer(lambda index: doubled if index == 1 else "math")
    edited = run(kernel="math", edits={"layers.1.attention.v": lambda value, name: 2 * value})
    assert off(run(kernel=mine), edited) < 1e-6 < 1e-3 < off(run(kernel="math"), edited)
    assert off(torch.compile(run, backend="eager", fullgraph=True)(kernel=mine), edited) < 1e-6
    wrap = fnmodels.PerLayer(lambda index: recording if index else None)
    assert off(run(kernel="math", layer_fn=wrap), run(kernel="math")) < 1e-6
    assert (len(wrapped), len(called)) == (1, count - 1)
    cache = fnmodels.init_cache(CONFIG, *TOKENS.shape, dtype=torch.float32)
    step = fnmodels.prepare_step(CONFIG, TOKENS, cache)
    logits, _ = fnmodels.prefill(weights, *step, cache, config=CONFIG, kernel=mine)
    assert off(logits, edited[:, -1]) < 1e-5
    with pytest.raises(ValueError, match='kernel="invariant" for layer 1'):
        run(kernel=fnmodels.PerLayer(lambda index: "invariant" if index else "math"))
    with pytest.raises(TypeError, match="takes one for all layers"):
        wrap(recording)


def test_mistakes_are_answered_by_a_sentence() -> None:
    weights = generic_params(CONFIG)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    run = partial(fnmodels.forward, config=CONFIG)
    given = (inputs, masks, freqs_cis)
    with pytest.raises(TypeError, match=r"taps=\('layers.0.output',\)"):
        run(weights, *given, taps="layers.0.output")
    with pytest.raises(TypeError, match="The config is a dict; make a Config of it"):
        fnmodels.forward(weights, *given, config=weights)
    with pytest.raises(TypeError, match="The config is a dict; make a Config of it"):
        fnmodels.prepare(CONFIG.to_hf(), TOKENS)
    with pytest.raises(TypeError, match=r"masks must be {kind: \.\.\.}, as fnmodels.prepare returns it, not a Tensor"):
        run(weights, inputs, masks["full"].dense(), freqs_cis)
    with pytest.raises(TypeError, match="prepare takes the config first"):
        fnmodels.prepare(TOKENS, CONFIG)
    with pytest.raises(ValueError, match=r"Under vmap pass fnmodels\.rows"):
        vmap(partial(run, weights))(*given)
    with pytest.raises(ValueError, match=r"params has no 'norm', which the fnmodels\.models\.decoder\.llama\.spec"):
        run({name: value for name, value in weights.items() if name != "norm"}, *given)
    with pytest.raises(TypeError, match=r"returned a Tensor; a block, .* returns \(x, aux\)"):
        run(weights, *given, layer_fn=lambda block: lambda *args, **more: block(*args, **more)[0])
    with pytest.raises(ValueError, match="and a function of your own"):
        run(weights, *given, kernel="fast")
    x = weights["embed_tokens"][TOKENS]
    with pytest.raises(ValueError, match=r"'layers\.1\.output' is outside of layers 0 to 0"):
        fnmodels.run_layers(weights, x, masks, freqs_cis, 0, 1, config=CONFIG, taps=("layers.1.output",))


@pytest.mark.parametrize(
    ("missing", "use", "words"),
    [
        ("block", lambda config, folder: fnmodels.prepare(config, TOKENS), "mine, .*, has no 'block'"),
        ("freqs_cis", lambda config, folder: fnmodels.prepare(config, TOKENS), "mine, .*, has no 'freqs_cis'"),
        ("hf_names", lambda config, folder: P.save_pretrained(folder, config, generic_params(CONFIG)), "'hf_names'"),
    ],
)
def test_what_a_family_of_your_own_lacks_is_named(
    missing: str, use: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = own_family(monkeypatch)
    del mine.__dict__[missing]
    config = mine.Config(**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__})
    with pytest.raises((TypeError, ValueError), match=words):
        use(config, tmp_path / "folder")


@pytest.mark.parametrize("missing", ["head_dim", "vocab_size", "model_type"])
def test_a_field_that_a_config_of_your_own_lacks_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bare_config(monkeypatch, without=missing)
    with pytest.raises(TypeError, match=rf"mine\.Config has no field '{missing}'; a Config has vocab_size, .*head_dim"):
        fnmodels.prepare(config, TOKENS)


def test_a_config_of_your_own_needs_to_hf_only_for_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, weights = bare_config(monkeypatch), generic_params(CONFIG)
    got = fnmodels.forward(weights, *fnmodels.prepare(config, TOKENS), config=config)
    assert torch.equal(got, fnmodels.forward(weights, *fnmodels.prepare(CONFIG, TOKENS), config=CONFIG))
    with pytest.raises(TypeError, match=r"mine\.Config has no method 'to_hf'"):
        P.save_pretrained(tmp_path / "folder", config, weights)


def bare_config(monkeypatch: pytest.MonkeyPatch, without: str = "") -> Any:
    """CONFIG's fields, but one, in a dataclass without base class and methods, of `own_family`."""
    mine = own_family(monkeypatch)
    names = [name for name in CONFIG.__dataclass_fields__ if name != without]
    mine.Config = dataclasses.make_dataclass("Config", names, frozen=True, namespace={"__module__": "mine"})
    return mine.Config(**{name: getattr(CONFIG, name) for name in names})


def test_a_checkpoint_read_by_a_family_of_your_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    P.save_pretrained(tmp_path / "folder", CONFIG, weights := generic_params(CONFIG))
    mine = own_family(monkeypatch)
    mine.Config.from_hf = staticmethod(
        lambda values: mine.Config(**{f: getattr(llama.Config.from_hf(values), f) for f in CONFIG.__dataclass_fields__})
    )
    config, params = P.load_pretrained(tmp_path / "folder", family=mine)
    assert type(config) is mine.Config and type(P.load_config(tmp_path / "folder", family=mine)) is mine.Config
    assert all(torch.equal(x, y) for x, y in zip(leaves(params), leaves(weights), strict=True))
    with pytest.raises(TypeError, match="math has no class 'Config' with a static method 'from_hf'"):
        P.load_pretrained(tmp_path / "folder", family=math)


def own_family(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Llama's functions in a module outside of the package."""
    mine = types.ModuleType("mine")
    mine.__dict__.update({name: getattr(llama, name) for name in dir(llama) if not name.startswith("__")})
    mine.Config = type("Config", (llama.Config,), {"__module__": "mine"})
    monkeypatch.setitem(sys.modules, "mine", mine)
    return mine


def test_a_dense_mask_is_a_mask() -> None:
    weights = generic_params(CONFIG)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    want = fnmodels.forward(weights, inputs, masks, freqs_cis, config=CONFIG, kernel="math")
    dense = {"full": torch.ones(5, 5, dtype=torch.bool).tril()[None, None]}
    assert torch.equal(fnmodels.forward(weights, inputs, dense, freqs_cis, config=CONFIG, kernel="math"), want)


def test_a_stage_needs_its_own_layers_only() -> None:
    weights = generic_params(CONFIG)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG, TOKENS)
    x = weights["embed_tokens"][TOKENS]
    middle = fnmodels.run_layers(weights, x, masks, freqs_cis, 0, 1, config=CONFIG)
    stage = {"layers": {1: weights["layers"][1]}}
    last = fnmodels.run_layers(stage, middle, masks, freqs_cis, 1, 2, config=CONFIG)
    assert torch.equal(last, fnmodels.hidden(weights, inputs, masks, freqs_cis, config=CONFIG))


def with_axes() -> types.ModuleType:
    """Llama with a table of three axes, as vision-language models have it."""
    mine = types.ModuleType("with_axes")
    mine.__dict__.update({name: getattr(llama, name) for name in dir(llama) if not name.startswith("__")})
    mine.Config = type("Config", (llama.Config,), {"__module__": "with_axes"})
    mine.freqs_cis = lambda config, positions, *, length=None: {
        "full": mrope_table(config.rope, config.head_dim, positions, (1, 1, 2), length=length)
    }
    mine.attention_masks = lambda config, positions, segment_ids, *, create=None: llama.attention_masks(
        config, fnmodels.inputs.text_order(positions, segment_ids), segment_ids, create=create
    )
    return mine


def test_positions_of_three_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """prepare, forward, permute, split and rows treat [B, S, 3] by the one rule: batch first, sequence second."""
    monkeypatch.setitem(sys.modules, "with_axes", mine := with_axes())
    sizes = {f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__} | {"head_dim": 8}
    config, plain = mine.Config(**sizes), dataclasses.replace(CONFIG, head_dim=8)
    weights = generic_params(plain)
    image = torch.tensor([[3, 3, 3], [3, 3, 4], [3, 4, 3], [3, 4, 4]])  # two rows of two after three words
    words = torch.arange(12)[:, None].expand(12, 3)
    rows = [torch.cat([words[:3], image, words[5:7]]), torch.cat([words[:4], words[:3], words[:2]])]
    given = {
        "positions": torch.stack(rows),
        "segment_ids": torch.tensor([[1] * 9, [1] * 4 + [2] * 3 + [0] * 2]),
    }
    tokens = torch.arange(18).view(2, 9) % 17
    options = {"config": config, "kernel": "math"}
    prepared = fnmodels.prepare(config, tokens, **given)
    assert prepared[0]["positions"].shape == (2, 9, 3)
    assert prepared[1]["full"].q_positions.tolist() == [[*range(9)], [0, 1, 2, 3, 0, 1, 2, 0, 0]]
    want = fnmodels.forward(weights, *prepared, **options)

    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    valid = given["segment_ids"][:, order] > 0
    moved = fnmodels.permute((tokens, given), order)
    for batch in (fnmodels.permute(prepared, order), fnmodels.prepare(config, moved[0], **moved[1])):
        assert_close(fnmodels.forward(weights, *batch, **options)[valid], want[:, order][valid])
    parts = [fnmodels.forward(weights, *part, **options) for part in fnmodels.split(prepared, 2)]
    assert_close(torch.cat(parts), want)
    one = partial(fnmodels.forward, weights, **options)
    assert_close(vmap(one)(*fnmodels.rows(prepared))[:, 0], want)
    alone = fnmodels.prepare(config, tokens[1:, 4:7], positions=given["positions"][1:, 4:7])
    assert_close(fnmodels.forward(weights, *alone, **options), want[1:, 4:7])
    # Text is where all axes agree, and an image is not.
    text = fnmodels.forward(weights, *fnmodels.prepare(plain, tokens), config=plain, kernel="math")
    assert_close(want[1, :4], text[1, :4])
    assert (want[0, 4:] - text[0, 4:]).abs().max() > 1e-2


def test_a_family_of_your_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module that defines the Config is the family; here Llama's with an embedding doubled."""
    mine = own_family(monkeypatch)
    mine.embed = lambda params, inputs, /, *, config: 2 * llama.embed(params, inputs, config=config)
    config = mine.Config(**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__})
    weights = generic_params(CONFIG)
    assert fnmodels.family_of(config) is mine
    got = fnmodels.forward(weights, *fnmodels.prepare(config, TOKENS), config=config)
    doubled = {**weights, "embed_tokens": 2 * weights["embed_tokens"], "lm_head": weights["lm_head"]}
    assert torch.equal(got, fnmodels.forward(doubled, *fnmodels.prepare(CONFIG, TOKENS), config=CONFIG))


def test_an_unknown_family_raises() -> None:
    with pytest.raises(TypeError, match="has no 'block'"):
        fnmodels.family_of(object())
    with pytest.raises(fnmodels.errors.UnsupportedError, match="'eliza' is not supported; supported are"):
        fnmodels.family_for("eliza")


def test_permute() -> None:
    order, each = torch.tensor([4, 0, 1, 3, 2]), torch.tensor([[4, 0, 1, 3, 2], [0, 1, 2, 3, 4]])
    tree = {"tokens": TOKENS, "table": torch.randn(1, 5, 3, 2), "none": None}
    moved, rows = fnmodels.permute(tree, order), fnmodels.permute(tree, each)
    assert torch.equal(moved["tokens"], TOKENS[:, order]) and torch.equal(moved["table"], tree["table"][:, order])
    assert torch.equal(rows["tokens"][0], TOKENS[0, order]) and torch.equal(rows["tokens"][1], TOKENS[1])
    assert torch.equal(rows["table"][0], tree["table"][0, order]) and torch.equal(rows["table"][1], tree["table"][0])
    with pytest.raises(ValueError, match=r"'mask'.*dense mask"):
        fnmodels.permute({"mask": torch.ones(2, 1, 5, 5)}, order)
    with pytest.raises(ValueError, match=r"'short'.*no sequence of 5"):
        fnmodels.permute({"short": torch.ones(2, 4)}, order)
    with pytest.raises(ValueError, match=r"'mask'.*dense mask"):  # of five heads
        fnmodels.permute({"mask": torch.ones(2, 5, 5, 5, dtype=torch.bool)}, order)
    assert fnmodels.permute(torch.ones(2, 5, 5, 5), order).shape == (2, 5, 5, 5)


def test_the_layout_of_a_mask_is_found_once_until_the_mask_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    params, found = generic_params(CONFIG), []
    real = checks.one_document_per_row
    monkeypatch.setattr(checks, "one_document_per_row", lambda *a: found.append(a) or real(*a))
    positions, ids = torch.arange(5).repeat(2, 1), torch.ones(2, 5, dtype=torch.int64)
    inputs, masks, tables = fnmodels.prepare(CONFIG, TOKENS, positions=positions, segment_ids=ids)
    first, again = (fnmodels.forward(params, inputs, masks, tables, config=CONFIG) for _ in range(2))
    assert len(found) == 1 and torch.equal(first, again)
    masks["full"].q_segments[:, 3:] = 2  # a second document, whose tokens see no others
    other = {"full": dataclasses.replace(masks["full"])}
    got, want = (fnmodels.forward(params, inputs, given, tables, config=CONFIG) for given in (masks, other))
    assert torch.equal(got, want) and off(got[:, 3:], first[:, 3:]) > 1e-3


def test_split_and_rows() -> None:
    batch = {"tokens": TOKENS, "deep": [torch.randn(2, 5, 3)]}
    first, second = fnmodels.split(batch, 2)
    assert torch.equal(torch.cat((first["tokens"], second["tokens"])), TOKENS) and first["deep"][0].shape == (1, 5, 3)
    with pytest.raises(ValueError, match="'tokens' in 3"):
        fnmodels.split(batch, 3)
    for n in (0, -1):
        with pytest.raises(ValueError, match=f"one part or more, not in {n}"):
            fnmodels.split(batch, n)
    assert fnmodels.rows(batch)["deep"][0].shape == (2, 1, 5, 3)


def test_without_segments_nothing_is_read_from_the_tokens() -> None:
    inputs, masks, _ = fnmodels.prepare(CONFIG, TOKENS.to("meta"))
    assert inputs["positions"].is_meta and masks["full"].q_segments.is_meta


@pytest.mark.parametrize("name", ["positions", "segment_ids"])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (torch.ones(2, 1, dtype=torch.long), r"must be \[B, S\] = \[2, 5\] like the tokens, not \[2, 1\]"),
        (torch.ones(2, 5, 3, dtype=torch.long), r"not \[2, 5, 3\]"),
        (torch.ones(2, 5), "must be integers, not torch.float32"),
    ],
)
def test_positions_and_segments_of_another_form_are_refused(name: str, given: torch.Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must.*{sentence}|{name} {sentence}"):
        fnmodels.prepare(CONFIG, TOKENS, **{name: given})


def test_what_does_not_fit_is_refused_in_a_sentence() -> None:
    params, (inputs, masks, freqs_cis) = generic_params(CONFIG), fnmodels.prepare(CONFIG, TOKENS)
    extra = params | {"layers": [*params["layers"], params["layers"][0]]}
    with pytest.raises(ValueError, match="params has 3 layers, but the config has 2"):
        fnmodels.forward(extra, inputs, masks, freqs_cis, config=CONFIG)
    with pytest.raises(
        ValueError, match=rf"token ids go from -1 to .* knows those from 0 to {CONFIG.vocab_size - 1}\."
    ):
        fnmodels.forward(params, TOKENS.clone().index_fill(1, torch.tensor([1]), -1), masks, freqs_cis, config=CONFIG)
    _, short, tables = fnmodels.prepare(CONFIG, TOKENS[:, :3])
    with pytest.raises(ValueError, match=r"masks\['full'\] is made for 3 queries and 3 keys, but x has 5"):
        fnmodels.forward(params, inputs, short, freqs_cis, config=CONFIG)
    dense = {
        r"5 queries and 1 keys, but x has 5": (1, 1, 5, 1),
        r"1 queries and 5 keys, but x has 5": (1, 1, 1, 5),
        r"3 rows, but x has 2": (3, 1, 5, 5),
    }
    for words, shape in dense.items():
        with pytest.raises(ValueError, match=rf"masks\['full'\] is made for {words}"):
            fnmodels.forward(params, inputs, {"full": torch.ones(shape, dtype=torch.bool)}, freqs_cis, config=CONFIG)
    made = llama.attention_masks(
        CONFIG, inputs["positions"], torch.ones_like(TOKENS), create=lambda *sizes, device: "mine"
    )
    for junk, name in (({"full": None}, "NoneType"), (made, "str")):
        with pytest.raises(TypeError, match=rf"masks\['full'\] is a {name}; a mask is a fnmodels.inputs.Mask"):
            fnmodels.forward(params, inputs, junk, freqs_cis, config=CONFIG)
    with pytest.raises(TypeError, match=r"made of a Layout, not of a Mask: fnmodels.layout\(masks\)"):
        fnmodels.inputs.to_cu_seqlens(masks["full"])
    with pytest.raises(ValueError, match=r"freqs_cis\['full'\] is made for \[2, 3\] tokens \[B, S\], x has \[2, 5\]"):
        fnmodels.forward(params, inputs, masks, tables, config=CONFIG)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0; it must be an integer of at least 1"),
        ({"hidden_size": 8.0}, "hidden_size is 8.0"),
        ({"vocab_size": -1}, "vocab_size is -1"),
        ({"sliding_window": -1}, "sliding_window is -1"),
    ],
)
def test_impossible_sizes_are_refused_where_the_config_is_made(change: dict, sentence: str) -> None:
    with pytest.raises(fnmodels.errors.ConfigError, match=sentence):
        dataclasses.replace(CONFIG, **change)


def test_a_config_made_with_a_list_is_hashable() -> None:
    hash(dataclasses.replace(CONFIG, layer_kinds=["full", "full"]))


@pytest.mark.parametrize(
    ("act", "function"),
    [
        ("permute", lambda batch: fnmodels.permute(batch, torch.arange(5))),
        ("split", lambda batch: fnmodels.split(batch, 2)),
        ("give a batch dimension to", fnmodels.rows),
    ],
)
def test_what_is_no_tensor_is_named(act, function) -> None:
    _, masks, _ = fnmodels.prepare(CONFIG, TOKENS)
    for leaf, words in (
        (fnmodels.inputs.to_block_mask(masks["full"]), "is a BlockMask.* fnmodels.inputs.Mask"),
        (fnmodels.layout(masks), "is a Layout.* make it anew"),
        (5, "is a int and no tensor"),
    ):
        with pytest.raises(ValueError, match=f"Cannot {act} 'mine': it {words}"):
            function({"tokens": TOKENS, "mine": leaf})


def test_the_kernel_is_chosen_once_by_what_the_hidden_states_are(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    monkeypatch.setattr("fnmodels.stack.ready.materialize", lambda *form, **how: given.append(how) or "made")
    params, (_, masks, freqs) = generic_params(CONFIG), fnmodels.prepare(CONFIG, TOKENS)
    x = torch.zeros(2, 5, 8, dtype=torch.bfloat16)
    seen = []

    def layer_fn(_):
        return lambda layer, x, mask, freqs: (x, seen.append(mask) or {})

    run_layers(params, x, masks, freqs, 0, 2, config=CONFIG, layer_fn=layer_fn)
    assert given == [{"device": x.device, "dtype": torch.bfloat16, "asks": Asks(), "checked": False}]
    assert seen == ["made"] * 2
