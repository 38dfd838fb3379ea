"""`train.simulate` against real ranks: the messages they send, the bytes they hold, the order they work in."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import fnmodels
import params as P
import train
from fnmodels import tree
from tests.support.backward_memory import as_on_a_gpu, fused, watched
from tests.support.cases import tokens_of
from tests.support.ranks_pool import Ranks, devices
from tests.train.parallel.test_pipeline import batch_of, config_of, optimizer_of
from train.comm import collectives
from train.comm.dtensor import local_tree
from train.loss import as_loss
from train.parallel import Mesh
from train.parallel.mesh import Strategy
from train.parallel.pipeline import gradients as pp
from train.parallel.pipeline.schedule import SCHEDULES, pipeline
from train.parallel.pipeline.stages import init_stage, stage_plan
from train.parallel.pipeline.timeline import Action, order
from train.parallel.pipeline.tree_split import share
from train.parallel.placement import rules_of
from train.simulate import RankFacts, Work, simulate

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ROWS, LENGTH = 8, 12


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Counter[str]]]:
    """How many messages, and their bytes, by kind; not those of whole numbers, nor sums of counts and norms."""
    found: dict[str, Counter[str]] = {"count": Counter(), "bytes": Counter()}

    def note(kind: str, tensor: torch.Tensor) -> None:
        if tensor.numel() > 3 and tensor.is_floating_point():
            found["count"][kind] += 1
            found["bytes"][kind] += tensor.numel() * tensor.element_size()

    def watched(kind: str, function: Callable[..., Any], argument: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **more: Any) -> Any:
            note(kind, args[argument])
            return function(*args, **more)

        return run

    stages = torch.distributed.pipelining.PipelineStage
    with contextlib.ExitStack() as stack:
        patch = lambda *what: stack.enter_context(mock.patch.object(*what))  # noqa: E731
        patch(collectives, "_GATHER", watched("all_gather", collectives._GATHER, 0))
        patch(collectives, "_SCATTER", watched("reduce_scatter", collectives._SCATTER, 1))
        patch(dist, "all_reduce", watched("all_reduce", dist.all_reduce, 0))
        patch(dist, "all_to_all_single", watched("all_to_all", dist.all_to_all_single, 1))
        patch(pp, "_sum_copies", watched_copies(note))
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            patch(stages, name, watched_sends(note, getattr(stages, name)))
        yield found


def watched_copies(note: Callable[[str, torch.Tensor], None]) -> Callable[..., None]:
    run = pp._sum_copies

    def copies(grad: Any, ranks: Any, group: Any) -> None:
        for _ in ranks[1:]:
            note("send", grad)
        run(grad, ranks, group)

    return copies


def watched_sends(note: Callable[[str, torch.Tensor], None], function: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, part: int) -> Any:
        operations = function(self, part)
        for operation in operations:
            note("send", operation.tensor)
        return operations

    return run


def size(values: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(values) if leaf.is_floating_point())


def even(name: str) -> Any:
    """With a vocabulary, heads and experts that 2 divides, and experts as wide as grouped products want them."""
    config = dataclasses.replace(config_of(name, 4), vocab_size=64, num_attention_heads=4)
    experts: dict[str, dict[str, int]] = {
        "deepseek_v3": {"n_routed_experts": 6, "n_group": 2, "moe_intermediate_size": 16},
        "gpt_oss": {"intermediate_size": 16},
    }
    return dataclasses.replace(config, **experts.get(name, {}))


def over_mesh(
    name: str, text: str, remat: str, dtype: str, parts: int, kernel: str, schedule: str, length: int
) -> dict[str, Any]:
    """A step: its messages, and the bytes of what this rank holds. Rows of one document each, without padding."""
    config, mesh = even(name), Mesh.parse(text)
    optimizer = optimizer_of(config)
    plan = P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), devices(mesh))
    attention = fused if kernel == "fused" and mesh.cp == 1 else kernel if mesh.cp == 1 else "math"
    loss = functools.partial(train.next_token_loss, config=config, kernel=attention, experts="grouped")
    strategy = Strategy(gather_dtype=None if dtype == "fp32" else DTYPES[dtype], schedule=schedule)
    if mesh.pp > 1:
        params = init_stage(config, 0, stage_plan(plan, config, devices(mesh), strategy))
    else:
        params = P.init(config, 0, plan=plan)
    state = train.init_state(params, optimizer)
    step = train.make_step(loss, optimizer, accumulate=parts, remat=remat, mesh=mesh, strategy=strategy)
    tokens, ones = tokens_of(config, ROWS, length), torch.ones(ROWS, length, dtype=torch.long)
    batch = {"tokens": tokens, "positions": ones.cumsum(1) - 1, "segment_ids": ones, "labels": tokens}
    with counted() as found, as_on_a_gpu(), watched(local_tree(state.params), batch) as kept:
        state, _ = step(state, batch)
    params, moments = local_tree(state.params), local_tree(state.opt_state)
    return {**found, **kept.most, "buffers": kept.buffers, "parameters": size(params), "optimizer": size(moments)}


@pytest.mark.parametrize(
    ("name", "text", "remat", "dtype", "parts", "how"),
    [
        ("deepseek_v3", "fsdp=2", "full", "bf16", 2, "fused"),
        ("gpt_oss", "dp=2,fsdp=2", "full", "fp32", 1, "fused"),
        ("deepseek_v3", "tp=2", "none", "fp32", 1, "fused"),
        ("llama_tied", "tp=4", "none", "bf16", 1, "sdpa"),  # more than it has KV heads
        ("llama_tied", "fsdp=2,tp=2", "none", "fp32", 2, "sdpa"),
        ("deepseek_v3", "ep=2", "none", "fp32", 1, "fused"),
        ("deepseek_v3", "fsdp=2,ep=2", "none", "bf16", 2, "fused"),
        ("llama_tied", "cp=2", "none", "fp32", 1, "fused"),
        ("deepseek_v3", "fsdp=2,cp=2", "full", "fp32", 1, "fused"),
        ("llama_tied", "pp=2,cp=2", "none", "fp32", 4, "fused ZBVZeroBubble"),
        ("llama_tied", "pp=2,fsdp=2", "full", "bf16", 2, "sdpa"),
        ("llama_tied", "pp=2,fsdp=2", "full", "bf16", 4, "sdpa ZBVZeroBubble"),
        ("llama_tied", "pp=2,fsdp=2", "every:2", "bf16", 4, "sdpa DualPipeV"),
        ("deepseek_v3", "pp=2,ep=2", "full", "fp32", 4, "fused InterleavedZeroBubble"),
        ("deepseek_v3", "pp=2,tp=2", "full", "fp32", 4, "fused InterleavedZeroBubble"),
        ("gpt_oss", "fsdp=2,tp=2", "every:2", "bf16", 1, "fused"),
        ("llama_tied", "pp=2,fsdp=2", "none", "bf16", 4, "sdpa"),
        ("deepseek_v3", "pp=2,ep=2", "none", "fp32", 4, "fused"),
    ],
)
def test_messages_and_bytes_of_a_step(
    ranks: Ranks, name: str, text: str, remat: str, dtype: str, parts: int, how: str
) -> None:
    """how: the attention, torch's own fused one, or a stand-in that keeps the same, where that of a CPU keeps more."""
    mesh, (kernel, *schedules) = Mesh.parse(text), how.split()
    schedule = schedules[0] if schedules else "1F1B"
    length = 160 if mesh.tp == 4 else LENGTH  # more tokens than the head takes at a time
    real = ranks(mesh.world)(over_mesh, name, text, remat, dtype, parts, kernel, schedule, length)
    work = Work(ROWS, length, parts, schedule, remat=remat, dtype=DTYPES[dtype])
    for place, facts in enumerate(simulate(even(name), mesh, work)):
        same = mesh.world // mesh.pp
        compare(real[place * same : (place + 1) * same], facts)


def test_messages_of_states(ranks: Ranks) -> None:
    real = ranks(2)(over_mesh, "lfm2", "cp=2", "full", "fp32", 1, "fused", "1F1B", LENGTH)
    compare_messages(real, simulate(even("lfm2"), Mesh(cp=2), Work(ROWS, LENGTH, remat="full", dtype=torch.float32))[0])


def compare(real: list[dict[str, Any]], facts: RankFacts) -> None:
    """The ranks of one place in the pipeline: what they sent, and held as far as it was measured."""
    compare_messages(real, facts)
    for rank in real:
        measured = {name: rank[name] for name in facts.held if name in rank}
        assert measured.keys() >= {"parameters", "optimizer"}
        assert measured == {name: facts.held[name] for name in measured}


def compare_messages(real: list[dict[str, Any]], facts: RankFacts) -> None:
    """The number and bytes of what ranks sent, by kind."""
    kinds = {message.kind for message in facts.messages}
    assert all(rank["count"].keys() == kinds for rank in real)
    for kind in sorted(kinds):
        sent = [message for message in facts.messages if message.kind == kind]
        assert {rank["count"][kind] for rank in real} == {sum(message.count for message in sent)}, (kind, sent)
        assert {rank["bytes"][kind] for rank in real} == {sum(message.bytes for message in sent)}, (kind, sent)


def over_stages(name: str, layers: int, schedule: str, parts: int) -> dict[str, Any]:
    """A pipeline's messages, its order, and the bytes of its gradients."""
    config, rank = config_of(name, layers), dist.get_rank()
    optimizer, pipe = optimizer_of(config), pipeline(config, dist.get_world_size(), schedule)
    params = share(P.init(config, 0), config, pipe, rank)
    loss = functools.partial(train.next_token_loss, config=config, kernel=fused)
    over = as_loss(loss).with_options(blocks={"outer": lambda block: block})  # layers of a mesh are always wrapped
    of = pp.gradient_sums(over, optimizer, pipe)
    done: list[Action] = []

    def noted(function: Callable[..., Any], kind: Callable[..., str]) -> Callable[..., Any]:
        def run(self: Any, part: int, *args: Any, **more: Any) -> Any:
            done.append((kind(**more), self.stage_index, part))
            return function(self, part, *args, **more)

        return run

    stages = torch.distributed.pipelining.PipelineStage
    kinds: dict[str, Callable[..., str]] = {
        "forward_one_chunk": lambda **_: "F",
        "backward_one_chunk": lambda full_backward=True, **_: "B" if full_backward else "I",
        "backward_weight_one_chunk": lambda **_: "W",
    }
    with contextlib.ExitStack() as stack:
        for method, kind in kinds.items():
            stack.enter_context(mock.patch.object(stages, method, noted(getattr(stages, method), kind)))
        batch = batch_of(config, parts)
        found, kept = stack.enter_context(counted()), stack.enter_context(watched(params, batch))
        sums = of(params, fnmodels.split(batch, parts))
    held = {"parameters": size(params), "gradients": size(sums.grads), "buffers": kept.buffers, **kept.most}
    return {**found, "order": done, "held": held}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_and_order_of_a_pipeline(ranks: Ranks, schedule: str) -> None:
    config, mesh, parts = config_of("llama_tied", 5), Mesh(pp=2), 4
    real = ranks(2)(over_stages, "llama_tied", 5, schedule, parts)
    work = Work(2 * parts, LENGTH, parts, schedule, dtype=torch.float32)
    pipe = pipeline(config, 2, schedule)
    for rank, facts in enumerate(simulate(config, mesh, work)):
        sent = [message for message in facts.messages if message.kind == "send"]
        assert real[rank]["count"]["send"] == sum(message.count for message in sent)
        assert real[rank]["bytes"]["send"] == sum(message.bytes for message in sent)
        assert list(map(tuple, real[rank]["order"])) == order(pipe, rank, parts)
        held = real[rank]["held"]
        assert held == {name: facts.held[name] for name in held}
