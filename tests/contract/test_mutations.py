"""Planted bugs: each one, patched into a correct model, is detected by the test of the property that it breaks."""

import dataclasses
import itertools
import re
import threading
import time
from collections import defaultdict
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
import fnmodels.inputs.mask
import fnmodels.models.decoder.llama
import params as P
import train.gradients
from fnmodels import testing, tree
from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal, Window
from fnmodels.ops.attention import sdpa
from fnmodels.ops.mlp import gated_mlp
from fnmodels.ops.rotary import Rope, Rotation, frequencies, rotary_table, table_of
from fnmodels.stack.loop import LayerSideInputs
from tests.contract import (
    test_build,
    test_checkpoint,
    test_compile,
    test_config,
    test_inputs,
    test_kernels,
    test_loss,
    test_packing,
    test_public_checks,
    test_transforms,
)
from tests.support.cases import Case, block_of, cases, subject_of

PROPERTIES = {
    "B1": "params are the whole state",
    "B2": "rotary tables are fp32 and precise",
    "B3": "microbatches equal the batch",
    "B4": "no call remembers another",
    "B5": "permuting the sequence permutes the logits",
    "B6": "padding on either side changes nothing",
    "B7": "masks cost linear memory",
    "B8": "a kernel computes its mask or says that it cannot",
    "B9": "inputs are not written, threads do not meet",
    "B10": "nothing flows from what is not seen",
    "P1": "packed equals separate",
    "P2": "positions, segments and labels are independent",
    "P3": "converters of segments",
    "P4": "rows of padding and of one token",
    "P5": "sums and counts, whatever the split",
    "P6": "labels are shifted once and end with their document",
    "F1": "every transform goes through kernel='math'",
    "F2": "no value is read; vmap(grad) equals a loop",
    "F3": "rematerialization changes no bit",
    "F4": "custom functions have every rule",
    "F5": "gathered shards have the derivatives of the whole",
    "F6": "transforms compose",
    "F7": "a tie is one leaf with the gradient of both uses",
    "F8": "the stack comes apart",
    "F9": "ensembles equal a loop",
    "F10": "one graph, one compilation",
    "D2": "init is a function of seed and path",
    "L3": "loading is strict both ways",
    "L5": "saved and loaded bit for bit",
    "L7": "no dtype changes silently",
    "L9": "no field of a config is ignored",
    "R3": "a row has its own bits",
    "R6": "building changes no global state",
}

Patch = Callable[[pytest.MonkeyPatch], None]
Test = Callable[[Case], object]
LLAMA, DECODER = "fnmodels.models.decoder.llama", "fnmodels.models.common.decoder"
TABLES, HEAD = f"{DECODER}.masks_and_tables", f"{DECODER}.embed_and_head"
ATTENTION = "fnmodels.models.common.context.attention"


@dataclass(frozen=True)
class Bug:
    """A planted bug: the property it breaks, the patch, the variant that shows it, and the test that must fail."""

    breaks: str
    plant: Patch
    variant: str
    found_by: Test


PLANTED: dict[str, Bug] = {}


def bug(breaks: str, variant: str, *found_by: Test) -> Callable[[Patch], Patch]:
    def note(plant: Patch) -> Patch:
        for number, test in enumerate(found_by):
            PLANTED[f"{breaks}-{plant.__name__}-{number}"] = Bug(breaks, plant, variant, test)
        return plant

    return note


def check(public: Callable[[testing.Subject], None], kernel: str = "math") -> Test:
    """A public check as a test of a case."""
    return lambda case: public(subject_of(case, kernel))


def through(test: Callable[[Case, str], object], kernel: str = "math") -> Test:
    return lambda case: test(case, kernel)


def in_a_folder(test: Callable[[Case, Path], object]) -> Test:
    def run(case: Case) -> None:
        with TemporaryDirectory() as folder:
            test(case, Path(folder))

    return run


def _compiled(test: Test) -> Test:
    """Runs the test with the compiler reset before and after."""

    def run(case: Case) -> None:
        torch.compiler.reset()
        try:
            test(case)
        finally:
            torch.compiler.reset()

    return run


# Each takes seconds.
LINEARIZED: Test = lambda case: test_transforms.test_linearize(case.family)  # noqa: E731
ONE_GRAPH = _compiled(test_compile.test_prepare_and_forward_are_one_graph)
ONE_BLOCK = _compiled(test_compile.test_one_compilation_of_the_block_for_all_layers_of_a_kind)


def _around_block(change: Callable[..., Any]) -> Patch:
    """Replaces the block by `change(block, layer, x, mask, freqs, **options)`."""
    block = fnmodels.models.decoder.llama.block
    return lambda patch: patch.setattr(f"{LLAMA}.block", lambda *args, **options: change(block, *args, **options))


def _around_mlp(function: type[torch.autograd.Function]) -> Patch:
    """Applies `function` to the output of the MLP."""
    return lambda patch: patch.setattr(
        f"{LLAMA}.gated_mlp", lambda layer, x, **o: function.apply(gated_mlp(layer, x, **o))
    )


class Identity(torch.autograd.Function):
    """The identity with all rules correct; each bug changes one."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
        return x.clone(), in_dims[0]


# ---------------------------------------------------------------------------------------- order-sensitive inputs


@bug("B1", "llama_mlp_bias", test_build.test_params_are_the_whole_state)
def a_leaf_that_nobody_reads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        f"{LLAMA}.gated_mlp",
        lambda layer, x, **o: gated_mlp({k: v for k, v in layer.items() if k != "up_bias"}, x, **o),
    )


@bug("B1", "llama", test_build.check_no_tensor_is_kept)
def an_activation_kept(patch: pytest.MonkeyPatch) -> None:
    kept: list[Tensor] = []
    patch.setattr(f"{LLAMA}.KEPT", kept, raising=False)

    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        kept.append(x)
        return block(layer, x, *rest, **options)

    _around_block(change)(patch)


@bug("B2", "llama", check(testing.check_rotary_tables))
def tables_rounded_to_bf16(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{TABLES}.rotary_table", lambda *args: rotary_table(*args).bfloat16().float())


@bug("B2", "llama", check(testing.check_rotary_tables))
def angles_in_fp32(patch: pytest.MonkeyPatch) -> None:
    def single(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        angles = positions[..., None].float() * frequencies(rope, head_dim).float()
        return torch.stack((angles.cos(), angles.sin()), dim=-1)

    patch.setattr(f"{TABLES}.rotary_table", single)


@bug("B2", "llama", check(testing.check_rotary_tables), test_inputs.test_tables_are_fp32_whatever_the_default_dtype)
def tables_in_the_default_dtype(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{TABLES}.rotary_table", lambda *args: rotary_table(*args).to(torch.get_default_dtype()))


@bug("B2", "llama", test_inputs.test_low_precision_parameters_leave_the_tables_alone)
def angles_in_the_dtype_of_the_activations(patch: pytest.MonkeyPatch) -> None:
    """As if a table of angles, not of cosines, were cast with the parameters."""

    def change(block: Any, layer: Any, x: Tensor, mask: Any, freqs: Tensor | Rotation, **options: Any) -> Any:
        table = table_of(freqs)
        angles = (torch.atan2(table[..., 1], table[..., 0]) + 200 * torch.pi).to(x.dtype).float()
        return block(layer, x, mask, torch.stack((angles.cos(), angles.sin()), dim=-1), **options)

    _around_block(change)(patch)


@bug(
    "B3",
    "llama",
    check(testing.check_microbatches),
)
@bug("F2", "llama", test_transforms.test_vmap_over_rows)
def rows_that_see_each_other(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x - 0.01 * x.mean(0, keepdim=True), *rest, **options)

    _around_block(change)(patch)


@bug("B3", "llama", test_inputs.test_split_arguments_are_those_of_the_rows)
def one_row_of_tables_for_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{TABLES}.rotary_table", lambda *args: rotary_table(*args)[:1].expand(len(args[2]), -1, -1, -1))


@bug("B3", "llama", check(testing.check_microbatches))
def a_mask_kept_from_the_first_call(patch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Tensor] = {}

    def change(block: Any, layer: Any, x: Tensor, mask: Any, *rest: Any, **options: Any) -> Any:
        mask = kept.setdefault("mask", mask)
        return block(layer, x, mask[: len(x)], *rest, **options)

    _around_block(change)(patch)


@bug("B4", "llama_dynamic", through(test_public_checks.test_history_independence))
def a_table_cached_on_a_global(patch: pytest.MonkeyPatch) -> None:
    longest = [0]

    def cached(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        longest[0] = max(longest[0], int(positions.max()) + 1)
        return rotary_table(rope, head_dim, positions, longest[0])

    patch.setattr(f"{TABLES}.rotary_table", cached)


@bug("B4", "llama", test_inputs.test_tables_depend_on_their_positions_only)
@bug(
    "B5", "llama", check(testing.check_permutation), test_inputs.test_permuted_arguments_are_those_of_the_permuted_rows
)
@bug("B6", "llama", check(testing.check_padding))
@bug("P1", "llama", check(testing.check_packing_of_a_cut_document))
def positions_counted_by_index(patch: pytest.MonkeyPatch) -> None:
    def by_index(rope: Rope, head_dim: int, positions: Tensor, length: Any = None) -> Tensor:
        # A mere offset would stay hidden, since rotary scores depend on distances only: so the square.
        return rotary_table(rope, head_dim, torch.arange(positions.shape[1]).square().expand(positions.shape), length)

    patch.setattr(f"{TABLES}.rotary_table", by_index)


@bug("B5", "jamba", test_inputs.test_permuted_arguments_are_those_of_the_permuted_rows)
def an_order_that_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fnmodels.inputs.order.check_order", lambda *given: None)


@bug("B5", "llama", check(testing.check_permutation))
def a_mask_by_index(patch: pytest.MonkeyPatch) -> None:
    def dense(self: Mask) -> Tensor:
        length = self.q_positions.shape[1]
        same = (self.q_segments[:, :, None] == self.kv_segments[:, None]) & (self.kv_segments[:, None] > 0)
        return (same & torch.ones(length, length, dtype=torch.bool).tril())[:, None]

    patch.setattr(Mask, "dense", dense)


@bug("B5", "llama", check(testing.check_permutation, "auto"))
def a_layout_of_another_order(patch: pytest.MonkeyPatch) -> None:
    stale = fnmodels.inputs.document_layout(torch.arange(12)[None], torch.ones(4, 12, dtype=torch.long))
    patch.setattr(fnmodels, "layout", lambda masks: stale)
    # as in a context where values cannot be read
    patch.setattr("fnmodels.ops.attention.checks._check_documents", lambda *given: None)


@bug("P4", "llama", through(test_packing.test_rows_of_padding_and_of_one_token))
def padding_that_is_seen_and_not_cleared(patch: pytest.MonkeyPatch) -> None:
    padding_that_is_seen(patch)
    patch.setattr("fnmodels.apply.cleared", lambda x, valid: x)


@bug("B6", "llama", check(testing.check_padding))
def padding_that_is_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Mask, "allowed", lambda self, q, kv: ((q.segments == kv.segments) | (kv.segments == 0)) & self.rule(q, kv)
    )


@bug("B7", "llama", test_inputs.test_masks_cost_linear_memory)
def a_dense_mask_at_once(patch: pytest.MonkeyPatch) -> None:
    def masks(config: Any, positions: Tensor, segment_ids: Tensor, *, create: Any = None) -> Any:
        few = positions[:, :4096]  # 1.7e7 elements: enough to be detected, few enough to allocate
        return {"full": few[:, :, None] >= few[:, None]}

    patch.setattr(f"{LLAMA}.attention_masks", masks)


@bug("B7", "llama", test_inputs.test_masks_cost_linear_memory)
def a_mask_copied_for_every_layer(patch: pytest.MonkeyPatch) -> None:
    prepare = fnmodels.prepare

    def copying(*given: Any, **options: Any) -> Any:
        inputs, masks, freqs_cis = prepare(*given, **options)
        return inputs, masks, tree.map(lambda table: table.repeat(40, 1, 1, 1)[:1], freqs_cis)

    patch.setattr(fnmodels, "prepare", copying)


def _causal_whatever_it_is_asked(
    q: Tensor, k: Tensor, v: Tensor, allowed: Any, *, causal: bool = False, **o: Any
) -> Tensor:
    return sdpa.sdpa_attention(q, k, v, None, causal=True, **o)


@bug(
    "B8",
    "llama",
    through(test_kernels.test_every_rule_through_every_kernel, "sdpa"),
    test_kernels.test_a_mask_without_a_rule,
)
@bug("P1", "llama", check(testing.check_packing, "sdpa"))
def a_fused_kernel_that_falls_back_to_causality(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fnmodels.ops.attention.kernels.sdpa_attention", _causal_whatever_it_is_asked)


@bug("B8", "llama", through(test_kernels.test_every_rule_through_every_kernel, "blocks"))
def blocks_that_fall_back_to_causality(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fnmodels.ops.attention.block_sparse.sdpa_attention", _causal_whatever_it_is_asked)


@bug(
    "B8", "llama", *(through(test_kernels.test_every_rule_through_every_kernel, k) for k in ("math", "sdpa", "blocks"))
)
def a_window_one_too_wide(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Window, "__call__", lambda self, q, kv: q.positions - kv.positions <= self.size)
    patch.setattr(Window, "covers", lambda self, q, kv: q[1] - kv[0] <= self.size)


@bug("B8", "llama", test_kernels.test_a_mask_without_a_rule)
def a_refusal_left_out(patch: pytest.MonkeyPatch) -> None:
    forward = fnmodels.forward

    def willing(*given: Any, kernel: str, **options: Any) -> Tensor:
        dense = all(isinstance(mask, Tensor) for mask in given[2].values())
        return forward(*given, kernel="math" if dense else kernel, **options)

    patch.setattr(fnmodels, "forward", willing)


@bug("B9", "llama", check(testing.check_inputs_unchanged))
def an_input_written_in_place(patch: pytest.MonkeyPatch) -> None:
    embed = fnmodels.models.decoder.llama.embed
    patch.setattr(
        f"{LLAMA}.embed", lambda params, inputs, **o: embed(params, {**inputs, "t": inputs["tokens"].abs_()}, **o)
    )


@bug("B9", "llama", check(testing.check_inputs_unchanged))
def an_entry_added_to_the_parameters(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        layer["last_input"] = x
        return block(layer, x, *rest, **options)

    _around_block(change)(patch)


@bug("B9", "llama", check(testing.check_threads))
def a_workspace_that_threads_share(patch: pytest.MonkeyPatch) -> None:
    shared: dict[str, Tensor] = {}

    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        shared["x"] = x
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.005)  # lets the other thread run in between
        return block(layer, shared["x"], *rest, **options)

    _around_block(change)(patch)


@bug(
    "B10",
    "mistral_sliding",
    through(test_inputs.test_gradients_flow_from_the_past_only),
    through(test_inputs.test_gradients_flow_from_the_past_only, "sdpa"),
    check(testing.check_causality),
)
def a_look_at_the_next_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Causal, "__call__", lambda self, q, kv: kv.positions <= q.positions + 1)


@bug(
    "B10",
    "llama_ungrouped",
    through(test_inputs.test_gradients_flow_from_the_past_only),
    check(testing.check_causality),
)
def keys_of_long_ago_forgotten(patch: pytest.MonkeyPatch) -> None:
    attention = fnmodels.models.common.context.attention

    def forgetful(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, **options: Any) -> Tensor:
        return attention(q, k, v, mask.tril().triu(-3), **options)

    patch.setattr(ATTENTION, forgetful)


# ---------------------------------------------------------------------------------------------- packing and loss


@bug("B10", "llama", through(test_inputs.test_gradients_flow_from_the_past_only))
@bug("P1", "llama", check(testing.check_packing))
def documents_not_separated(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Mask, "allowed", lambda self, q, kv: (q.segments > 0) & (kv.segments > 0) & self.rule(q, kv))


@bug("P1", "llama", check(testing.check_packing))
def documents_separated_by_position_resets(patch: pytest.MonkeyPatch) -> None:
    right = fnmodels.models.decoder.llama.attention_masks

    def masks(config: Any, positions: Tensor, segment_ids: Tensor, *, create: Any = None) -> Any:
        resets = (positions[:, 1:] < positions[:, :-1]).long()  # a document of one token has none
        return right(config, positions, F.pad(resets.cumsum(1), (1, 0)) + 1, create=create)

    patch.setattr(f"{LLAMA}.attention_masks", masks)


@bug("P1", "llama", check(testing.check_packing, "auto"))
def documents_merged_where_positions_run_on(patch: pytest.MonkeyPatch) -> None:
    """In the layout, and so in the kernels that read it; the mask itself is correct."""
    right = fnmodels.inputs.document_layout

    def merged(positions: Tensor, segment_ids: Tensor) -> Any:
        goes_on = (positions[:, 1:] == positions[:, :-1] + 1) & (segment_ids[:, 1:] > 0) & (segment_ids[:, :-1] > 0)
        return right(positions, F.pad((~goes_on).long().cumsum(1), (1, 0)).add(1).where(segment_ids > 0, 0))

    patch.setattr("fnmodels.inputs.layout.document_layout", merged)


def _around_prepare(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Patch:
    """Replaces positions and segment ids, if both are given, by `change(positions, segment_ids)`."""
    prepare = fnmodels.prepare

    def changed(config: Any, tokens: Tensor, *, positions: Any = None, segment_ids: Any = None, **o: Any) -> Any:
        if positions is not None and segment_ids is not None:
            positions, segment_ids = change(positions, segment_ids)
        return prepare(config, tokens, positions=positions, segment_ids=segment_ids, **o)

    return lambda patch: patch.setattr(fnmodels, "prepare", changed)


@bug("P1", "llama", check(testing.check_packing_of_a_cut_document))
def positions_counted_anew(patch: pytest.MonkeyPatch) -> None:
    """Not visible in comparisons of two calls: rotary scores depend on distances only."""
    _around_prepare(lambda _, ids: (fnmodels.positions_from_segments(ids), ids))(patch)


@bug("P2", "qwen2", test_inputs.test_positions_segments_and_tokens_are_independent)
def positions_made_from_segments(patch: pytest.MonkeyPatch) -> None:
    _around_prepare(lambda positions, ids: (positions + ids, ids))(patch)


@bug("P2", "qwen2", test_inputs.test_positions_segments_and_tokens_are_independent)
def segments_made_from_positions(patch: pytest.MonkeyPatch) -> None:
    _around_prepare(lambda positions, _: (positions, fnmodels.inputs.segments_from_positions(positions)))(patch)


@bug("P3", "llama", test_loss.test_converters_agree_on_documents)
def pads_that_are_documents(patch: pytest.MonkeyPatch) -> None:
    def begins(positions: Tensor, **_: Any) -> Tensor:
        return F.pad((positions[:, 1:] != positions[:, :-1] + 1).long().cumsum(1), (1, 0)) + 1

    patch.setattr(fnmodels.inputs, "segments_from_positions", begins)


@bug("P3", "llama", test_loss.test_converters_agree_on_documents)
def an_end_token_that_begins_the_next(patch: pytest.MonkeyPatch) -> None:
    def early(tokens: Tensor, end: int, *, valid: Tensor) -> Tensor:
        return ((tokens == end).cumsum(1) + 1).where(valid, 0)

    patch.setattr(fnmodels.inputs, "segments_from_eos", early)


@bug("P3", "llama", test_loss.test_converters_agree_on_documents)
def lengths_that_are_ends(patch: pytest.MonkeyPatch) -> None:
    right = fnmodels.segments_from_lengths
    patch.setattr(
        fnmodels,
        "segments_from_lengths",
        lambda rows, length: right([list(itertools.accumulate(r)) for r in rows], 99)[:, :length],
    )


@bug("P4", "llama", through(test_packing.test_rows_of_padding_and_of_one_token), check(testing.check_empty_rows))
def a_softmax_over_nothing(patch: pytest.MonkeyPatch) -> None:
    def plain(q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scale: float, **_: Any) -> Tensor:
        allowed = mask.dense() if isinstance(mask, Mask) else mask
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
        scores = torch.einsum("bqnh,bknh->bnqk", q, k) * scale
        weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        return torch.einsum("bnqk,bknh->bqnh", weights, v)

    patch.setattr(ATTENTION, plain)


@bug("P5", "llama", test_loss.test_any_split_is_the_step_of_one_batch)
def a_mean_of_means(patch: pytest.MonkeyPatch) -> None:
    right = train.gradients._gradients

    def divided(*given: Any, divide: bool) -> Any:
        return right(*given, divide=True)

    patch.setattr("train.gradients._gradients", divided)


@bug("P5", "llama", test_loss.test_a_step_on_nothing, test_loss.test_any_split_is_the_step_of_one_batch)
def nothing_over_nothing(patch: pytest.MonkeyPatch) -> None:
    right = train.gradients._gradients

    def divided(*given: Any, divide: bool) -> Any:
        total, count, aux, grads, *rest = right(*given, divide=False)
        return total, count, aux, [grad / count * (1 if divide else count) for grad in grads], *rest

    patch.setattr("train.gradients._gradients", divided)


@bug("P6", "llama", test_loss.test_labels_are_the_next_tokens_of_each_document)
def labels_shifted_twice(patch: pytest.MonkeyPatch) -> None:
    right = train.losses.next_token.loss_of_targets
    patch.setattr(
        "train.losses.next_token.loss_of_targets", lambda p, x, labels, **o: right(p, x, labels.roll(-1, 1), **o)
    )


@bug(
    "P6",
    "llama",
    test_loss.test_labels_are_the_next_tokens_of_each_document,
    lambda _: test_loss.test_an_oracle_reaches_zero(),
)
def a_label_across_a_boundary(patch: pytest.MonkeyPatch) -> None:
    right = fnmodels.pack

    def pack(documents: Any, length: int) -> Any:
        rows = right(documents, length)
        return dataclasses.replace(rows, labels=rows.tokens.roll(-1, 1).where(rows.segment_ids.roll(-1, 1) > 0, -100))

    patch.setattr(fnmodels, "pack", pack)


# ---------------------------------------------------------------------------------------------------- transforms


@bug("F1", "llama", test_transforms.test_grad_is_autograd, test_transforms.test_jvp, test_transforms.test_jacobians)
def a_gradient_cut(patch: pytest.MonkeyPatch) -> None:
    class Cut(Identity):
        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 0.9 * gradient

    _around_mlp(Cut)(patch)


@bug("F1", "llama", test_transforms.test_hessian_vector_products)
def a_backward_of_one_order(patch: pytest.MonkeyPatch) -> None:
    """As if backward were computed outside of the autograd graph."""

    class Once(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.sin()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * ctx.saved_tensors[0].detach().cos()

        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return tangent * ctx.saved_tensors[0].cos()

    _around_mlp(Once)(patch)


@bug(
    "F1",
    "llama",
    test_transforms.test_jvp,
    test_transforms.test_hessian_vector_products,
    test_transforms.test_jacobians,
)
@bug("F4", "llama", test_transforms.test_jvp)
@bug("F6", "llama", LINEARIZED, test_transforms.test_compositions)
def a_tangent_cut(patch: pytest.MonkeyPatch) -> None:
    class Cut(Identity):
        @staticmethod
        def jvp(ctx: Any, tangent: Tensor) -> Tensor:
            return 0.9 * tangent

    _around_mlp(Cut)(patch)


@bug("F2", "llama", test_transforms.test_vmap_over_rows)
@bug("F4", "llama", test_transforms.test_vmap_over_rows)
@bug("F6", "llama", test_transforms.test_compositions)
@bug("F9", "llama", test_transforms.test_ensembles, test_transforms.test_one_adapted_leaf)
def a_vmap_rule_that_mixes(patch: pytest.MonkeyPatch) -> None:
    class Mixed(Identity):
        @staticmethod
        def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor) -> tuple[Tensor, int | None]:
            return x + 0.1 * (x.roll(1, in_dims[0] or 0) - x), in_dims[0]

    _around_mlp(Mixed)(patch)


@bug("F2", "llama", through(test_build.test_forward_reads_no_values))
def a_value_read_on_the_host(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x if x.abs().max().item() < 1e4 else x.clamp(-1e4, 1e4), *rest, **options)

    _around_block(change)(patch)


@bug("F3", "qwen2", through(test_transforms.test_layer_fn_wraps_each_kind_once))
def a_layer_with_noise(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x + 1e-3 * torch.randn_like(x), *rest, **options)

    _around_block(change)(patch)


@bug("F3", "qwen2", through(test_transforms.test_layer_fn_wraps_each_kind_once))
def a_layer_that_is_another_when_recomputed(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        return block(layer, x * 1.001 if in_backward else x, *rest, **options)

    _around_block(change)(patch)


@bug("F4", "llama", lambda _: test_transforms.test_custom_functions_have_every_rule())
def a_function_without_rules(patch: pytest.MonkeyPatch) -> None:
    class Bare(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

    patch.setattr(f"{LLAMA}.Bare", Bare, raising=False)


@bug("F5", "llama", test_transforms.test_parameters_gathered_layer_by_layer)
def a_gather_with_half_a_tangent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(test_transforms, "gather", lambda first, second: torch.cat((first, second.detach())))


@bug("F7", "llama_tied", through(test_transforms.test_a_tied_head_is_one_leaf_read_twice))
def a_tied_head_that_learns_from_one_use(patch: pytest.MonkeyPatch) -> None:
    unembed = fnmodels.models.decoder.llama.unembed

    def detached(params: Any, x: Tensor, /, *, config: Any) -> Tensor:
        tied = {"embed_tokens": params["embed_tokens"].detach()} if config.tie_word_embeddings else {}
        return unembed({**params, **tied}, x, config=config)

    patch.setattr(f"{LLAMA}.unembed", detached)


@bug("F8", "llama", through(test_transforms.test_the_stack_comes_apart))
def a_slice_of_layers_one_short(patch: pytest.MonkeyPatch) -> None:
    run = fnmodels.run_layers
    patch.setattr(
        fnmodels,
        "run_layers",
        lambda p, x, m, f, lo, hi, /, **o: run(p, x, m, f, lo, max(lo, hi - 1) if hi == 1 else hi, **o),
    )


@bug("F8", "llama", through(test_transforms.test_the_stack_comes_apart))
def a_head_that_looks_at_its_chunk(patch: pytest.MonkeyPatch) -> None:
    unembed = fnmodels.models.decoder.llama.unembed
    patch.setattr(f"{LLAMA}.unembed", lambda p, x, *, config: unembed(p, x, config=config) - 1e-3 * x.mean())


@bug("F10", "llama_ungrouped", ONE_GRAPH)
def a_break_in_the_graph(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        torch._dynamo.graph_break()
        return block(layer, x, *rest, **options)

    _around_block(change)(patch)


@bug("F10", "llama_ungrouped", ONE_GRAPH)
def a_compilation_for_an_equal_config(patch: pytest.MonkeyPatch) -> None:
    """A cache keyed by identity misses for equal but distinct objects."""
    seen: dict[int, int] = {}
    embed = fnmodels.models.decoder.llama.embed
    patch.setattr(
        f"{LLAMA}.embed", lambda p, inputs, *, config: embed(p, inputs, config=config) + seen.get(id(config), 0)
    )


@bug("F10", "llama_ungrouped", ONE_BLOCK)
def a_block_that_counts_its_calls(patch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        calls[0] += 1
        return block(layer, x + 1e-9 * calls[0], *rest, **options)

    _around_block(change)(patch)


@bug("F10", "mixtral", test_compile.test_layers_of_a_kind_are_called_alike)
def another_layout_of_memory_in_every_other_layer(patch: pytest.MonkeyPatch) -> None:
    right = LayerSideInputs.tensors

    def turned(self: Any, layer: Any) -> dict[str, Any]:
        found = right(self, layer)
        return found | ({"valid": found["valid"].mT.contiguous().mT} if layer.index % 2 else {})

    patch.setattr(LayerSideInputs, "tensors", turned)


# --------------------------------------------------------------------------- checkpoints, numerics, global state


@bug("D2", "llama", test_build.test_init_is_a_function_of_seed_and_path)
def init_from_the_global_generator(patch: pytest.MonkeyPatch) -> None:
    normal = Tensor.normal_
    patch.setattr(Tensor, "normal_", lambda self, mean, std, *, generator=None: normal(self, mean, std))


@bug("L3", "llama", in_a_folder(test_checkpoint.test_a_missing_and_an_unexpected_tensor_are_both_named))
def an_error_that_names_the_first_only(patch: pytest.MonkeyPatch) -> None:
    load = P.load_pretrained

    def first(*given: Any, **options: Any) -> Any:
        try:
            return load(*given, **options)
        except P.MismatchError as error:
            raise P.MismatchError(str(error)[:120]) from error

    patch.setattr(P, "load_pretrained", first)


@bug("L5", "llama", in_a_folder(test_checkpoint.test_round_trip))
def a_silent_cast_on_saving(patch: pytest.MonkeyPatch) -> None:
    save = P.save_pretrained
    patch.setattr(
        P, "save_pretrained", lambda f, c, w, **o: save(f, c, tree.map(lambda t: t.bfloat16().float(), w), **o)
    )


@bug("L7", "llama", in_a_folder(test_checkpoint.test_loading_in_another_precision))
def a_norm_that_stays_behind(patch: pytest.MonkeyPatch) -> None:
    load = P.load_pretrained

    def partly(*given: Any, **options: Any) -> Any:
        config, weights = load(*given, **options)
        return config, {**weights, "norm": weights["norm"].float()}

    patch.setattr(P, "load_pretrained", partly)


@bug("L9", "llama", test_config.test_every_field_changes_the_logits)
def an_epsilon_written_in_the_code(patch: pytest.MonkeyPatch) -> None:
    norm = fnmodels.models.decoder.llama.rms_norm
    for module in (LLAMA, HEAD):
        patch.setattr(f"{module}.rms_norm", lambda x, weight, *, eps: norm(x, weight, eps=1e-6))


@bug("R3", "llama", test_kernels.test_a_row_alone_has_the_bits_that_it_has_in_a_batch)
def a_sum_ordered_by_the_batch(patch: pytest.MonkeyPatch) -> None:
    def change(block: Any, layer: Any, x: Tensor, *rest: Any, **options: Any) -> Any:
        return block(layer, x / (len(x) + 1) * (len(x) + 1), *rest, **options)

    _around_block(change)(patch)


@bug("R6", "llama", test_build.test_building_changes_no_global_state)
def a_seed_that_is_set(patch: pytest.MonkeyPatch) -> None:
    prepare = fnmodels.prepare

    def seeded(*given: Any, **options: Any) -> Any:
        torch.manual_seed(1)
        return prepare(*given, **options)

    patch.setattr(fnmodels, "prepare", seeded)


# --------------------------------------------------------------------------------------------------------------


def _marked(name: str) -> Any:
    slow = PLANTED[name].found_by in (LINEARIZED, ONE_GRAPH, ONE_BLOCK)
    return pytest.param(name, marks=[pytest.mark.slow] if slow else [])


def test_the_block_of_a_planted_bug_is_one_that_its_test_runs() -> None:
    """Of tests that take a case alone: no selection of cases leaves a planted bug behind."""
    blocks, seen = {case.name: block_of(case) for case in cases()}, 0
    for name, planted in PLANTED.items():
        for mark in getattr(planted.found_by, "pytestmark", ()):
            if mark.name == "parametrize" and mark.args[0] == "case":
                assert blocks[planted.variant] in map(block_of, mark.args[1]), name
                seen += 1
    assert seen > 30


@pytest.mark.parametrize("name", [_marked(name) for name in PLANTED])
def test_a_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = PLANTED[name]
    case = next(case for case in cases() if case.name == planted.variant)
    planted.plant(monkeypatch)
    # On meta tensors torch itself raises, and the check of a layout refuses one of other documents.
    raised: dict[Patch, Any] = {
        a_value_read_on_the_host: RuntimeError,
        documents_merged_where_positions_run_on: ValueError,
        an_order_that_is_not_looked_at: pytest.fail.Exception,  # no error was raised
    }
    with pytest.raises(raised.get(planted.plant, AssertionError)):
        planted.found_by(case)


def test_every_property_has_a_bug_that_breaks_it() -> None:
    broken: dict[str, set[Patch]] = defaultdict(set)
    for planted in PLANTED.values():
        broken[planted.breaks].add(planted.plant)
    assert broken.keys() == PROPERTIES.keys()


def test_every_property_of_the_core_is_listed_and_named_by_a_test() -> None:
    core = {f"{letter}{n}" for letter, last in (("B", 10), ("P", 6), ("F", 10)) for n in range(1, last + 1)}
    assert core <= PROPERTIES.keys()
    files = [file for file in Path(__file__).parent.glob("test_*.py") if file != Path(__file__)]
    named = set(re.findall(r"\b[BPFDLR]\d+\b", "\n".join(file.read_text() for file in files)))
    assert PROPERTIES.keys() <= named, PROPERTIES.keys() - named
