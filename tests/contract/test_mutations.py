"""The suite can fail: each bug, planted in a model that is right, is found by the test of the property it breaks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
import fnmodels.llama
import fnmodels.mask
import params as P
from fnmodels import testing, tree
from fnmodels.mask import Mask
from fnmodels.ops.rotary import Rope, frequencies, rotary_table
from fnmodels.rules import Causal
from tests.contract import (
    test_build,
    test_checkpoint,
    test_config,
    test_inputs,
    test_packing,
    test_public_checks,
    test_transforms,
)
from tests.support import Case, cases, subject_of

Patch = Callable[[pytest.MonkeyPatch], None]
LLAMA = "fnmodels.llama"
PLANTED: dict[str, "Bug"] = {}


@dataclass(frozen=True)
class Bug:
    """How it is planted, the variant that shows it, and the test (of a case) which must fail."""

    plant: Patch
    variant: str
    found_by: Callable[[Case], object]


def bug(variant: str, *found_by: Callable[[Case], object]) -> Callable[[Patch], Patch]:
    def note(plant: Patch) -> Patch:
        for number, test in enumerate(found_by):
            PLANTED[f"{plant.__name__}-{number}"] = Bug(plant, variant, test)
        return plant

    return note


def check(public: Callable[[testing.Subject], None], kernel: str = "math") -> Callable[[Case], object]:
    """One of the public checks, of the case that it is given."""
    return lambda case: public(subject_of(case, kernel))


def _around_block(change: Callable[..., Any]) -> Patch:
    """`change(block, layer, x, mask, freqs, **options)` in the place of the block."""
    block = fnmodels.llama.block
    return lambda patch: patch.setattr(f"{LLAMA}.block", lambda *args, **options: change(block, *args, **options))


@bug("llama_dynamic", lambda case: test_public_checks.test_history_independence(case, "math"))
def a_table_cached_on_a_global(patch: pytest.MonkeyPatch) -> None:
    longest = [0]

    def cached(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        longest[0] = max(longest[0], int(positions.max()) + 1)
        return rotary_table(rope, head_dim, positions, longest[0])

    patch.setattr(f"{LLAMA}.rotary_table", cached)


@bug(
    "llama",
    check(testing.check_permutation),
    check(testing.check_padding),
    test_inputs.test_tables_depend_on_their_positions_only,
    check(testing.check_packing_of_a_cut_document),
)
def positions_counted_by_index(patch: pytest.MonkeyPatch) -> None:
    def by_index(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        # Left pads come out right all the same: rotary scores see distances only. So from a square.
        return rotary_table(rope, head_dim, torch.arange(positions.shape[1]).square().expand(positions.shape), length)

    patch.setattr(f"{LLAMA}.rotary_table", by_index)


@bug("llama", check(testing.check_permutation))
def a_mask_by_index(patch: pytest.MonkeyPatch) -> None:
    def dense(self: Mask) -> Tensor:
        length = self.q_positions.shape[1]
        same = (self.q_segments[:, :, None] == self.kv_segments[:, None]) & (self.kv_segments[:, None] > 0)
        return (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]

    patch.setattr(Mask, "dense", dense)


@bug(
    "llama",
    check(testing.check_packing),
    lambda case: test_inputs.test_gradients_flow_from_the_past_only(case, "math"),
)
def documents_not_told_apart(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mask, "allowed", lambda self, q, kv: (q.segments > 0) & (kv.segments > 0) & self.rule(q, kv))


@bug("llama", check(testing.check_packing))
def documents_told_apart_by_position_resets(patch: pytest.MonkeyPatch) -> None:
    right = fnmodels.llama.attention_masks

    def masks(config: Any, positions: Tensor, segment_ids: Tensor, *, create: Any = None) -> Any:
        resets = (positions[:, 1:] < positions[:, :-1]).long()  # a document of one token has none
        return right(config, positions, F.pad(resets.cumsum(1), (1, 0)) + 1, create=create)

    patch.setattr(f"{LLAMA}.attention_masks", masks)


@bug(
    "mistral_sliding",
    lambda case: test_inputs.test_gradients_flow_from_the_past_only(case, "math"),
    lambda case: test_inputs.test_gradients_flow_from_the_past_only(case, "sdpa"),
)
def a_look_at_the_next_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Causal, "__call__", lambda self, q, kv: kv.positions <= q.positions + 1)


@bug("llama", check(testing.check_inputs_unchanged))
def an_input_written_in_place(patch: pytest.MonkeyPatch) -> None:
    embed = fnmodels.llama.embed
    patch.setattr(
        f"{LLAMA}.embed", lambda params, inputs, **o: embed(params, {**inputs, "t": inputs["tokens"].abs_()}, **o)
    )


@bug("llama", check(testing.check_inputs_unchanged))
def an_entry_added_to_the_parameters(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        layer["last_input"] = x
        return block(layer, x, *rest, **options)

    _around_block(change)(patch)


@bug("llama", check(testing.check_rotary_tables))
def tables_rounded_to_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{LLAMA}.rotary_table", lambda *args: rotary_table(*args).bfloat16().float())


@bug("llama", check(testing.check_rotary_tables))
def angles_in_fp32(patch: pytest.MonkeyPatch) -> None:
    def single(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        angles = positions[..., None].float() * frequencies(rope, head_dim).float()
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    patch.setattr(f"{LLAMA}.rotary_table", single)


@bug("llama", lambda case: test_packing.test_rows_of_padding_and_of_one_token(case, "math"))
def a_softmax_over_nothing(patch: pytest.MonkeyPatch) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, **_: Any) -> Tensor:
        allowed = mask.dense() if isinstance(mask, Mask) else mask
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,bknh->bqnh", weights, v)

    patch.setattr(f"{LLAMA}.attention", plain)


@bug("llama_tied", lambda case: test_transforms.test_a_tied_head_is_one_leaf_read_twice(case, "math"))
def a_tied_head_that_learns_from_one_use(patch: pytest.MonkeyPatch) -> None:
    unembed = fnmodels.llama.unembed

    def detached(params: Any, x: Tensor, /, *, config: Any) -> Tensor:
        tied = {"embed_tokens": params["embed_tokens"].detach()} if config.tie_word_embeddings else {}
        return unembed({**params, **tied}, x, config=config)

    patch.setattr(f"{LLAMA}.unembed", detached)


@bug("llama", test_inputs.test_masks_cost_linear_memory)
def a_dense_mask_at_once(patch: pytest.MonkeyPatch) -> None:
    def masks(config: Any, positions: Tensor, segment_ids: Tensor, *, create: Any = None) -> Any:
        few = positions[:, :4096]  # 1.7e7 numbers are enough to be seen, and not too many to be made
        return {"full": few[:, :, None] >= few[:, None]}

    patch.setattr(f"{LLAMA}.attention_masks", masks)


@bug("llama", lambda case: test_build.test_forward_reads_no_values(case, "math"))
def a_value_read_on_the_host(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x if x.abs().max().item() < 1e4 else x.clamp(-1e4, 1e4), *rest, **options)

    _around_block(change)(patch)


@bug("llama_mlp_bias", test_build.test_params_are_the_whole_state)
def a_leaf_that_nobody_reads(patch: pytest.MonkeyPatch) -> None:
    mlp = fnmodels.llama.gated_mlp
    patch.setattr(
        f"{LLAMA}.gated_mlp", lambda layer, x, **o: mlp({k: v for k, v in layer.items() if k != "up_bias"}, x, **o)
    )


@bug(
    "llama",
    check(testing.check_microbatches),
    check(testing.check_per_sample_gradients),
)
def rows_that_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x - 0.01 * x.mean(0, keepdim=True), *rest, **options)

    _around_block(change)(patch)


@bug("llama", lambda case: test_build.test_no_tensor_is_kept("llama"))
def an_activation_kept(patch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    patch.setattr(f"{LLAMA}.KEPT", kept, raising=False)

    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        kept.append(x)
        return block(layer, x, *rest, **options)

    _around_block(change)(patch)


@bug("llama", test_build.test_init_is_a_function_of_seed_and_path)
def init_from_the_global_generator(patch: pytest.MonkeyPatch) -> None:
    normal = Tensor.normal_
    patch.setattr(Tensor, "normal_", lambda self, mean, std, *, generator=None: normal(self, mean, std))


@bug("llama", lambda case: test_transforms.test_the_stack_comes_apart(case, "math"))
def a_slice_of_layers_one_short(patch: pytest.MonkeyPatch) -> None:
    run = fnmodels.run_layers
    patch.setattr(
        fnmodels,
        "run_layers",
        lambda p, x, m, f, lo, hi, /, **o: run(p, x, m, f, lo, max(lo, hi - 1) if hi == 1 else hi, **o),
    )


@bug("qwen2", test_inputs.test_positions_segments_and_tokens_are_independent)
def positions_made_from_segments(patch: pytest.MonkeyPatch) -> None:
    prepare = fnmodels.prepare

    def derived(
        config: Any, tokens: Tensor, *, positions: Any = None, segment_ids: Any = None, length: Any = None
    ) -> Any:
        if segment_ids is not None:
            positions = positions + segment_ids
        return prepare(config, tokens, positions=positions, segment_ids=segment_ids, length=length)

    patch.setattr(fnmodels, "prepare", derived)


@bug("llama", check(testing.check_permutation, "auto"))
def a_layout_of_another_order(patch: pytest.MonkeyPatch) -> None:
    stale = fnmodels.Layout(*_plain_layout(4, 12))
    patch.setattr(fnmodels, "layout", lambda masks: stale)
    patch.setattr("fnmodels.ops.attention._check_documents", lambda *given: None)  # as where values cannot be read


def _plain_layout(batch: int, length: int) -> tuple[Any, ...]:
    ones = torch.ones(batch, length, dtype=torch.long)
    layout = fnmodels.document_layout(torch.arange(length)[None], ones)
    assert layout is not None
    return tuple(getattr(layout, name) for name in layout.__dataclass_fields__)


@bug("llama", test_config.test_every_field_changes_the_logits)
def an_epsilon_written_in_the_code(patch: pytest.MonkeyPatch) -> None:
    norm = fnmodels.llama.rms_norm
    patch.setattr(f"{LLAMA}.rms_norm", lambda x, weight, *, eps: norm(x, weight, eps=1e-6))


@bug("qwen2", lambda case: test_transforms.test_layer_fn_wraps_each_kind_once(case, "math"))
def a_layer_with_noise(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x + 1e-3 * torch.randn_like(x), *rest, **options)

    _around_block(change)(patch)


@bug("llama", test_transforms.test_jvp, test_transforms.test_hessian_vector_products)
def a_gradient_cut(patch: pytest.MonkeyPatch) -> None:
    mlp = fnmodels.llama.gated_mlp

    class Straight(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            pass

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 0.9 * grad

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent.clone()

    patch.setattr(f"{LLAMA}.gated_mlp", lambda layer, x, **o: Straight.apply(mlp(layer, x, **o)))


def _round_trip(case: Case) -> None:
    with TemporaryDirectory() as folder:
        test_checkpoint.test_round_trip(case, Path(folder))


@bug("llama", _round_trip)
def a_silent_cast_on_saving(patch: pytest.MonkeyPatch) -> None:
    save = P.save_pretrained
    patch.setattr(
        P, "save_pretrained", lambda f, c, w, **o: save(f, c, tree.map(lambda t: t.bfloat16().float(), w), **o)
    )


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    case = next(case for case in cases() if case.name == planted.variant)
    planted.plant(monkeypatch)
    # On meta tensors torch itself says that there is no value to read.
    error = RuntimeError if planted.plant is a_value_read_on_the_host else AssertionError
    with pytest.raises(error):
        planted.found_by(case)
