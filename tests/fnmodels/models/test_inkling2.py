"""Inkling 2: what its sublayers add, its loops, what they leave for each other and what they refuse; planted bugs."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import inkling2, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.context import Context
from fnmodels.models.common.inkling2 import passes
from fnmodels.ops.recurrent.dynamic_conv import dynamic_conv, residual_conv
from fnmodels.ops.streams.depth import attend_depth
from tests.parity.test_logits import test_logits as check_logits
from tests.support.cases import Case, batch_of, cases, generic, generic_params, routing_of, segments
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.inkling2 import LOOP, TINY

CASES = {case.name: case for case in cases() if case.family == "inkling2"}
TEXT, LOOPED, DEEP = CASES["inkling2"], CASES["inkling2_loop"], CASES["inkling2_loop_deep"]
ROWS = segments((9, 5), (14,))
TAPS = ("input", "attention", "middle", "mlp", "output")


def states_of(case: Case) -> tuple[dict[str, Tensor], Tensor]:
    """(every tap of the ends of layers, which tokens are there)."""
    batch = batch_of(case.config, ROWS)
    taps = tuple(f"layers.*.{name}" for name in TAPS)
    return batch.forward(generic_params(case.config), kernel="math", taps=taps)[1], batch.valid


@pytest.mark.parametrize("case", [TEXT, LOOPED, DEEP], ids=str)
def test_a_layer_adds_to_the_state_of_its_block(case: Case) -> None:
    """A layer that begins a block has nothing to add to; each pass of a loop begins with the state before it."""
    found, valid = states_of(case)
    kinds, start = fnmodels.family_of(case.config).kinds(case.config), case.config.loop_start
    before = found[f"layers.{start}.input"]
    for index, kind in enumerate(kinds):
        tap = {
            name: found[f"layers.{index}.{name}"][valid] for name in ("input", "attention", "middle", "mlp", "output")
        }
        own = 0 if "begins" in kind else tap["input"]
        torch.testing.assert_close(tap["middle"], own + tap["attention"])
        if "folds" in kind:
            continue
        torch.testing.assert_close(tap["output"], tap["middle"] + tap["mlp"])
        if "enters" in kind:  # its first state of a block is that of the first pass
            assert not torch.equal(tap["input"], before[valid])


def test_kinds_and_what_layers_leave() -> None:
    kinds, config = fnmodels.family_of(DEEP.config).kinds(DEEP.config), DEEP.config
    assert [kind.split("_")[2:] for kind in kinds] == [
        ["begins", "opens"],
        ["joins"],
        *([["joins", "begins"], ["joins"]] * 2),
        ["joins", "begins", "hears", "enters"],
        ["joins", "hears"],
        ["joins", "begins", "hears"],
        ["joins", "hears", "leaves", "folds"],
    ]
    assert [inkling2.left_shape(config, index)[0] for index in range(1, 10)] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    assert config.passes == (0, 1, 2, 3, 4, 5, 2, 3, 4, 5) and TEXT.config.passes == ()


@pytest.mark.parametrize("case", [TEXT, LOOPED, DEEP], ids=str)
def test_the_stack_in_parts_is_the_whole(case: Case) -> None:
    """At every border, with what the layers before have left."""
    config, params, batch = case.config, generic_params(case.config), batch_of(case.config, ROWS)
    inputs, masks, freqs = batch.prepared()
    count, how = len(inkling2.kinds(config)), {"config": config, "kernel": "math", "valid": inputs["valid"]}
    x = inkling2.embed(params, inputs, config=config)
    whole = fnmodels.run_layers(params, x, masks, freqs, 0, count, **how)
    for border in range(1, count):
        y, left = fnmodels.run_layers(params, x, masks, freqs, 0, border, **how, carried={})
        assert left["left"].shape[2:] == inkling2.left_shape(config, border)
        found, _ = fnmodels.run_layers(params, y, masks, freqs, border, count, **how, carried=left)
        assert torch.equal(found, whole)
    with pytest.raises(ValueError, match="reads what layer 0 has left"):
        fnmodels.run_layers(params, x, masks, freqs, 1, count, **how)


def test_every_pass_has_an_entry_of_a_cache_and_the_answers_are_those_without() -> None:
    config, params = LOOPED.config, generic_params(LOOPED.config)
    tokens = torch.randint(3, 61, (1, 12), generator=torch.Generator().manual_seed(1))
    whole = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    cache = fnmodels.init_cache(config, 1, 16)
    assert len(cache.layers) == len(config.passes) == 8
    found = []
    for piece in tokens.split((5, 1, 1, 3, 1, 1), 1):
        logits, cache = fnmodels.prefill(
            params, *fnmodels.prepare_step(config, piece, cache), cache, config=config, kernel="math", at="all"
        )
        found.append(logits)
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-5, atol=2e-5)
    for one, other in ((1, 3), (3, 5), (2, 4)):  # of one stored layer
        assert not torch.equal(cache.layers[one]["k"], cache.layers[other]["k"])


def test_counts_of_a_looped_layer_are_summed_over_its_passes() -> None:
    config, params, batch = LOOPED.config, generic_params(LOOPED.config), batch_of(LOOPED.config, ROWS)
    counts = train.next_token_loss(params, batch.batch(), config=config, kernel="math", aux=True)[2]["counts"]
    chosen = routing_of(params, batch.prepared(), config, kernel="math")[batch.valid]
    of_pass = torch.stack([F.one_hot(chosen[:, i], config.num_experts).sum((0, 1)) for i in range(chosen.shape[1])])
    assert counts.shape == (4, config.num_experts)
    for stored in range(4):
        rows = [row for row, layer in enumerate(config.passes) if layer == stored]
        assert torch.equal(counts[stored], of_pass[rows].sum(0))


def test_kernel_invariant_is_refused() -> None:
    batch = batch_of(TEXT.config, ROWS)
    with pytest.raises(ValueError, match='kernel="invariant" has no relative position bias'):
        batch.forward(generic_params(TEXT.config), kernel="invariant")


def test_text_is_read_of_a_file_with_a_tower() -> None:
    """And written again without it."""
    values = {"model_type": "inkling2_loop", "text_config": LOOP, "vision_config": {"hidden_size": 8}}
    config = inkling2.Config.from_hf(values | {"image_token_id": 5})
    assert dataclasses.replace(config, model_type="inkling2_loop_text") == inkling2.Config.from_hf(LOOP)
    again = config.to_hf()
    assert "vision_config" not in again and inkling2.Config.from_hf(again) == config


@pytest.mark.parametrize(("model_type", "text"), [("inkling2", TINY), ("inkling2_loop", LOOP)], ids=str)
def test_published_names_are_those_of_transformers(model_type: str, text: Any, tmp_path: Path, shows: Shows) -> None:
    """A model with images, saved by transformers: its text is read, and gives the text model's logits."""
    shows(model_type, "parity")
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"patch_size": 4, "posemb_grid_size": 4, "projection_hidden_dim": 12, "text_hidden_size": 32}
    config = transformers.AutoConfig.for_model(model_type, text_config=text, vision_config=vision, image_token_id=9)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours: Any = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
    assert_close(ours, theirs)
    assert config.model_type == model_type


def test_other_names_of_fields() -> None:
    renamed = {"sconv_kernel_size": "conv_kernel_size", "num_local_experts": "n_routed_experts"}
    renamed |= {"sliding_window": "sliding_window_size", "intermediate_size": "moe_intermediate_size"}
    taken = {name: value for name, value in TINY.items() if name not in renamed.values()}
    other = taken | {new: TINY[name] for new, name in renamed.items()}
    assert inkling2.Config.from_hf(other) == inkling2.Config.from_hf(TINY)
    with pytest.raises(ConfigError, match="'sconv_kernel_size' is 5 and 'conv_kernel_size' is 3"):
        inkling2.Config.from_hf(TINY | {"sconv_kernel_size": 5})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"scoring_func": "softmax"}, "'scoring_func' is"),
        ({"hidden_act": "gelu"}, "'hidden_act' is"),
        ({"tie_word_embeddings": True}, "has a head of its own"),
        ({"unpadded_vocab_size": 65}, "embedding_rows 64 are below vocab_size 65"),
        ({"swa_num_key_value_heads": 4}, "sliding_attention_heads 6 "),
        ({"loop_num_passes": 1}, "run 'loop_num_passes' 1 times"),
        ({"loop_layer_index_end": 5}, "'loop_layer_index_end' 5"),
        ({"n_layers_per_attn_res_block": 2}, "both are multiples of 2 up to 4"),
        ({"layer_types": ["hybrid", "full"]}, "'layer_types' is"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        inkling2.Config.from_hf(LOOP | changes)


def test_passes_of_one_layer_are_of_one_kind() -> None:
    kinds = LOOPED.config.layer_kinds
    with pytest.raises(ConfigError, match="other kinds in a later pass"):
        dataclasses.replace(LOOPED.config, layer_kinds=(*kinds[:3], kinds[4], kinds[3], *kinds[5:]))


def one_document(function: Any) -> Any:
    """The convolution of segment ids that say nothing of documents."""

    def wrong(x: Tensor, weight: Tensor, *rest: Any, **how: Any) -> Any:
        *dynamic, ids, tail, last = rest
        return function(x, weight, *dynamic, ids.clamp(max=1), tail, last, **how | {"reads": None})

    return wrong


def off_by_one(query: Tensor, blocks: Tensor, x: Tensor) -> Any:
    """Without the state that the first block began with."""
    return attend_depth(query, blocks[..., 1:, :], x)


def fewer_messages(x: Tensor, ctx: Context, words: list[str], config: Any) -> Any:
    """Without the first state of the pass before."""
    x, blocks, heard = passes.begun(x, ctx, words, config)
    if heard is not None:
        heard = torch.cat((heard[..., 1:2, :], heard[..., 1:, :]), -2)  # as many rows, which are left for later layers
    return x, blocks, heard


def from_the_end_of_the_loop(x: Tensor, ctx: Context, words: list[str], config: Any) -> Any:
    """A pass begins with the state that the pass before ended with."""
    return (x, *passes.begun(x, ctx, words, config)[1:])


BUGS: dict[str, tuple[str, Any]] = {
    "documents mixed in a convolution": ("residual_conv", one_document(residual_conv)),
    "documents mixed in a dynamic convolution": ("dynamic_conv", one_document(dynamic_conv)),
    "an entry of attention over depth is off by one": ("attend_depth", off_by_one),
    "messages miss a state": ("begun", fewer_messages),
    "a pass goes on where the last one ended": ("begun", from_the_end_of_the_loop),
    "clipped at another norm": ("l2_clip", lambda x, threshold: x),
    "the gate is not capped": ("softcapped_swiglu", lambda gate, up, **_: F.silu(gate) * up),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By logits of packed documents against transformers, each alone."""
    name, wrong = BUGS[bug]
    check_logits(LOOPED, "math", "packed")
    monkeypatch.setattr(inkling2, name, wrong)
    with pytest.raises(AssertionError):
        check_logits(LOOPED, "math", "packed")


def test_a_shared_entry_of_a_cache_is_found() -> None:
    """Where a later pass reads the entry of the first, the next token is another one's."""
    config, params = LOOPED.config, generic_params(LOOPED.config)
    tokens = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(1))
    given = fnmodels.prepare_step(config, tokens[:, :8], fnmodels.init_cache(config, 1, 9))
    _, cache = fnmodels.prefill(params, *given, fnmodels.init_cache(config, 1, 9), config=config, kernel="math")
    entries = list(cache.layers)
    entries[3] = entries[1]
    found = []
    for held in (cache, dataclasses.replace(cache, layers=tuple(entries))):
        given = fnmodels.prepare_step(config, tokens[:, 8:], held)
        found.append(fnmodels.prefill(params, *given, held, config=config, kernel="math")[0])
    assert float((found[0] - found[1]).abs().max()) > 1e-2


def test_a_choice_of_experts_for_another_layer_is_found() -> None:
    """A replay whose layers are rolled by one gives other logits; the own one gives the same bits."""
    config, params, batch = LOOPED.config, generic_params(LOOPED.config), batch_of(LOOPED.config, ROWS)
    inputs, masks, freqs = batch.prepared()
    routing = routing_of(params, (inputs, masks, freqs), config, kernel="math")

    def logits(given: dict[str, Tensor]) -> Tensor:
        return fnmodels.forward(params, {**inputs, **given}, masks, freqs, config=config, kernel="math")[batch.valid]

    plain = logits({})
    assert torch.equal(logits({"routing": routing}), plain)
    assert float((logits({"routing": routing.roll(1, 2)}) - plain).abs().max()) > 1e-2
    assert tree.flatten(params).keys() == tree.flatten(inkling2.spec(config)).keys()
