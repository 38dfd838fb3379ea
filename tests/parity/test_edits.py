"""Taps and edits equal hooks of transformers (E1), wherever it has the value of a tap; in float64, to 1e-6."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.edits import BoundEdit
from tests.support.cases import (
    Case,
    block_structures,
    cases,
    gradients,
    positions_of,
    richest,
    seed_of,
    segments,
    tap_names,
    tokens_of,
)
from tests.support.doubles import KeepsDoubles, doubled, with_exact_frequencies
from tests.support.oracle import model_of, params_of, position_ids
from tests.support.reference_taps import Site, sites_of

BOUND = 1e-6  # selection biases are fp32 in both, and the frequencies of scaled ropes
ROWS = segments((9,), (9,))
CASES = {case.name: case for case in (*block_structures(), *richest(lambda case: case.family)) if case.values}
# the layers of the first are no modules there; the second pads rows to whole windows inside of the model
CASES = {name: case for name, case in CASES.items() if case.family not in ("xlm", "longformer")}
# Another value in transformers, by the name of the tap or its end.
OTHERS = {
    "gemma4": ("embed", "attention.k", "attention.v"),  # read by other layers too, before the place of the hook
    **dict.fromkeys(("esm", "opt", "longcat_flash"), ("attention.q",)),  # scaled before the attention function there
    "gpt2": ("attention.q",),  # scaled by the layer's number there, and in the attention function here
    # its softmax reads their difference to the largest, sinks included
    **dict.fromkeys(("gpt_oss", "mimo_v2_flash"), ("attention.scores",)),
    # the indexer computes it again here, for its own choice
    **dict.fromkeys(("axk2", "deepseek_v32"), ("q_a_layernorm",)),
    # sinks scale what attention returns, after its softmax
    **dict.fromkeys(("granite_swa", "granitemoe"), ("attention.scores", "attention.pattern")),
    # between layers it has all rows of streams, the tap "streams"; keys of windows are joined to those of tokens before
    # attention, whose softmax reads differences to the largest score
    # keys are read by other layers too; gates are cut off first; rows of streams come first; a norm of two uses
    "gemma3n": ("attention.k", "attention.v", "mlp.pre", "input", "output", "streams", "altup.router_norm"),
    "deepseek_v4": ("input", "output", "attention.k", "attention.scores"),
    # the first two and the last as there; the indexer computes it again here, for its own choice
    "hy_v4": ("input", "output", "attention.scores", "q_a_layernorm"),
    # between layers it has all rows of streams there; gated in the same module; gates are cut off
    # first; a norm that a choice alone reads, without a gradient
    "glm5_next": ("input", "output", "attention.norm", "mlp.pre", "indexer.k_norm"),
    # its rows are one dimension there; mixed to one by a module of their own there; gated in the same module
    "qwen4_exp": ("input", "output", "streams", "hidden", "attention.norm"),
    # one of both states there; it is multiplied later there; after a norm here
    "hrm_text": ("input", "output", "streams", "embed", "hidden"),
    # states of blocks stay as they are there where those of layers are edited, and the last are mixed outside of it;
    # in later passes queries, keys and values have one norm, of one call here
    "inkling2": ("input", "output", "embed", "attention.scores", *(f"{i}.input_layernorm" for i in (4, 6, 8))),
    # a shared block reads the stream and returns what the next pass reads alone
    "zamba2": ("0.input", "0.output", "2.input", "2.output"),
    # norms that a choice alone reads, without a gradient; the sum of the experts is scaled, and not their weights
    "minimax_m3": ("indexer.q_norm", "indexer.k_norm", "experts", "expert_weights"),
    # the sum of the experts is scaled, and not their weights
    **dict.fromkeys(("laguna", "step3p5"), ("experts", "expert_weights")),
    "llama4": ("experts", "expert_weights"),  # one output per expert, not their sum; weights are in its inputs
    # gated in the same module
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid", "qwen3_next"), ("attention.norm",)),
}
# Values that no module, input or function call of transformers has.
NOWHERE = ("middle", "counts", "expert_indices", "choices", "attention.state")  # sums, integers, caches
_INLINE = tuple(f"attention.{name}" for name in ("q", "k", "v", "scores", "pattern"))
UNREACHED = {
    "falcon": _INLINE,  # its module computes attention itself
    "bloom": (*_INLINE, "mlp.pre"),
    "mpt": _INLINE,
    "roformer": (*_INLINE, "attention.z"),
    # the stream between two halves of its layers; a module's output, the tap "experts" already; the router's product
    "minimax_m3": ("mlp.pre",),  # gate and up are one product
    "longcat_flash": ("0.output", "1.input", "shortcut", "router_logits"),
    "gpt_neo": (*_INLINE, "attention.z"),
    "mpnet": (*_INLINE, "attention.z"),
    "deberta_v2": (*_INLINE, "attention.z"),
    **dict.fromkeys(("granitemoe", "granitemoehybrid"), ("mlp",)),  # a sum of two modules, multiplied
    **dict.fromkeys(
        ("qwen_moe", "qwen3_next", "qwen4_exp"), ("shared_expert",)
    ),  # a gate outside of the module multiplies it
    "inkling2": ("input_layernorm", "post_attention_layernorm"),  # of later passes of a loop
    "glm4_moe": ("attention.q_norm", "attention.k_norm"),  # of Sarvam, whose files name the modules otherwise
}


INSIDE = {  # the names that are edited, by a variant that has them
    "llama": ("embed", "input", *_INLINE, "attention.z", "attention", "mlp.pre", "mlp.neurons", "mlp", "output")
    + ("input_layernorm", "post_attention_layernorm", "hidden", "final.norm"),
    "qwen3_moe": ("attention.q_norm", "attention.k_norm", "router_logits", "experts"),
    "deepseek_v3": ("attention.q_a_layernorm", "attention.kv_a_layernorm", "expert_weights", "shared_expert"),
    "falcon_h1": ("mamba",),
    "gemma4_text_e": ("per_layer", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
}
MISPLACED = [(case, name) for case, names in INSIDE.items() for name in names]


class Edit:
    """value -> 0.75 value + delta, which keeps the value and, by delta, the gradient with respect to the result."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []
        self.deltas: list[Tensor] = []

    def __call__(self, value: Tensor, name: str = "") -> Tensor:
        self.values.append(value.detach().clone())
        self.deltas.append(torch.zeros_like(value).requires_grad_())
        return 0.75 * value + self.deltas[-1]


@pytest.mark.parametrize("case", CASES.values(), ids=str)
def test_edits_equal_hooks(case: Case) -> None:
    """All taps are edited at once. Equal are each value, the logits, and the gradients by each value and parameter."""
    values, family = case.values, fnmodels.family_of(case.config)
    case = Case(case.family, case.name, values, family.Config.from_hf(values))
    model = with_exact_frequencies(doubled(model_of(values)), case.config)
    sites = {tap: site for tap, site in sites_of(model, case).items() if not tap.endswith(OTHERS.get(case.family, ()))}
    known = (".scale", *NOWHERE, *OTHERS.get(case.family, ()), *UNREACHED.get(case.family, ()))
    kinds = family.kinds(case.config)
    here = ("", *(str(i) for i in range(len(kinds)) if kinds[i] not in kinds[:i]))  # `sites_of` has one of each kind
    lost = [tap for tap in tap_names(case.config) if tap not in sites and not tap.endswith(known)]
    assert not [tap for tap in lost if tap.partition("layers.")[2].partition(".")[0] in here]
    tokens = tokens_of(case.config, *ROWS.shape, seed=seed_of(case))

    leaves = tree.map(lambda leaf: leaf.requires_grad_(leaf.is_floating_point()), params_of(model, case.config))
    ours = {tap: Edit() for tap in sites}
    with KeepsDoubles():
        inputs = fnmodels.prepare(case.config, tokens)
    logits = fnmodels.forward(leaves, *inputs, config=case.config, kernel="math", edits=dict(ours))

    theirs = {tap: Edit() for tap in sites}
    with contextlib.ExitStack() as stack:
        for tap, site in sites.items():
            stack.enter_context(site.edited(theirs[tap]))
        stack.enter_context(KeepsDoubles())
        wanted = model(input_ids=tokens, position_ids=position_ids(values, positions_of(ROWS)), use_cache=False).logits

    assert near(logits, wanted), float((logits - wanted).abs().max())
    found = by_values(logits, ours)
    for tap, (value, gradient) in by_values(wanted, theirs).items():
        assert same(tap, found[tap][0], value, sites[tap]), (tap, "value")
        assert same(tap, found[tap][1], gradient, sites[tap]), (tap, "gradient")
    spec = tree.flatten(family.spec(case.config))
    got = tree.flatten(gradients(logits.square().mean(), leaves))
    for path, want in tree.flatten(gradients_of(model, wanted, case.config)).items():
        assert not spec[path].trainable or near(got[path], want), path


@pytest.mark.parametrize(("variant", "name"), MISPLACED)
@pytest.mark.parametrize("bug", ["dropped", "twice", "cut"])
def test_a_wrong_edit_is_found(variant: str, name: str, bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model goes on with the value before the edit, with one edited again, or with one that has no gradient."""
    inner = BoundEdit.__call__

    def edited(edit: BoundEdit, value: Tensor, tensors: Any) -> Tensor:
        found = inner(edit, value, tensors)
        if edit.tap != name:
            return found
        return {"dropped": value + 0 * found, "twice": 0.75 * found, "cut": found - value + value.detach()}[bug]

    monkeypatch.setattr(BoundEdit, "__call__", edited)
    with pytest.raises(AssertionError):
        test_edits_equal_hooks(next(case for case in cases() if case.name == variant))


def by_values(logits: Tensor, edits: dict[str, Edit]) -> dict[str, tuple[Tensor, Tensor]]:
    """{tap: (the value before its edit, the gradient by the value after it)}."""
    for tap, edit in edits.items():
        assert len(edit.values) == 1, (tap, len(edit.values))
    deltas = [edit.deltas[0] for edit in edits.values()]
    found = torch.autograd.grad(logits.square().mean(), deltas, retain_graph=True)
    return {tap: (edits[tap].values[0], gradient) for tap, gradient in zip(edits, found, strict=True)}


def gradients_of(model: Any, logits: Tensor, config: Any) -> Any:
    """The gradients of all parameters as our tree: they have the file layout of their parameters."""
    logits.square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return params_of(model, config)


def same(tap: str, ours: Tensor, theirs: Tensor, site: Site) -> bool:
    """Whether the values are equal, but for the order of dimensions.

    transformers has rotated numbers of interleaved pairs in another order, the same for queries and keys, and the
    chosen experts in any order; it scores masked keys with a very low number, and the attention sink as a last key.
    """
    if tap.endswith((".scores", ".pattern")):
        theirs = theirs[..., : ours.shape[-1]]
        hidden = theirs < -1e30 if tap.endswith(".scores") else torch.zeros_like(theirs, dtype=torch.bool)
        return near(ours.masked_fill(hidden, 0), theirs.masked_fill(hidden, 0))
    if theirs.shape != ours.shape and theirs.ndim == 4 and theirs.transpose(1, 2).shape == ours.shape:
        theirs = theirs.transpose(1, 2)
    theirs = theirs.reshape(ours.shape)
    if tap.endswith(("attention.q", "attention.k", "expert_weights")) and not near(ours, theirs):
        ours, theirs = ours.sort(-1).values, theirs.sort(-1).values
    return near(ours, theirs)


def near(ours: Tensor, theirs: Tensor) -> bool:
    """Whether the largest difference is at most `BOUND` of the largest entry, or of 1 if that is smaller."""
    assert ours.dtype == theirs.dtype == torch.float64 and ours.shape == theirs.shape
    return float((ours - theirs).detach().abs().max()) <= BOUND * max(1.0, float(theirs.detach().abs().max()))
