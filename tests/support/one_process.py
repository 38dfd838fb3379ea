"""What one process computes, and how far from it the same step is over a mesh; for the jobs of ranks.

8 rows of 16 tokens: packed documents, padding on both sides, a row of padding alone, and rows with different numbers of
valid tokens, so that a mean of means, a count of one rank or a padded row that teaches would show.
"""

import contextlib
import dataclasses
import fcntl
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import LayerKind, function_of
from fnmodels.models.common.registry import family_of, ordered_kinds
from params import Rules, plan
from tests.support import copies
from tests.support.cases import batch_of, cases, generic_params, segments
from tests.support.mtp import mtp_cases, with_heads
from tests.support.ranks_pool import FOLDER, devices
from train import (
    Optimizer,
    adamw,
    distill,
    init_state,
    make_eval_step,
    make_step,
    mtp_loss,
    next_token_loss,
    policy_loss,
)
from train.comm.collectives import summed
from train.comm.dtensor import local_tree
from train.gradients import Sums, gradient_sums
from train.losses import indexer_loss, look_ahead, routed_logprobs, with_indexers
from train.parallel import Mesh, Strategy
from train.parallel import update as updates
from train.parallel.batch_shards import own_rows
from train.parallel.fsdp2 import Model, shard
from train.parallel.padding import padded
from train.parallel.pipeline.stages import stage_plan
from train.parallel.placement import rules_of, shardings
from train.remat import layer_fn
from train.run_options import Balance
from train.update import update

# A tied embedding, biases, normed heads and a window; latents, a dense first layer, a shared expert and a bias of the
# experts' choice, which no gradient moves; sinks, experts with biases and two kinds of layers.
MODELS = {"llama": "qwen3_bias_sliding", "deepseek": "deepseek_v3", "gpt_oss": "gpt_oss"}
# Recurrent layers, experts and attention with a gate; convolutions with biases.
HYBRIDS = {"qwen3_next": "qwen3_next", "lfm2": "lfm2_bias_untied"}
# A variant of every family whose layers go along the sequence, choose their keys, or borrow those of others.
SEQUENTIAL = {
    **{name: name for name in ("qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear", "mamba2", "falcon_h1", "bamba")},
    **{name: name for name in ("falcon_h1_norm", "granitemoehybrid", "nemotron_h_moe", "nemotron_h_latent_bias")},
    **{name: name for name in ("granitemoehybrid_dense_tied", "lfm2_moe", "deepseek_v32", "glm_moe_dsa")},
    **{name: name for name in ("axk2", "qwen4_exp", "hy_v4", "glm5_next", "rwkv7", "mistral_large4", "kimi_k3")},
    "gemma4_e": "gemma4_text_e",
    "gemma4_moe": "gemma4_text_moe",
}
NORMED = {"muse_spark": "muse_spark_text"}  # what each expert returns
STREAMS = {name: name for name in ("deepseek_v4", "deepseek_v41", "deepseek_v41_plain")}
# by kernel="sparse"
GATHERED = {"gathered": "deepseek_v32", "gathered_blocks": "minimax_m3"}
GATHERED |= {"gathered_windows": "deepseek_v4", "gathered_shared_windows": "deepseek_v41"}
BLOCKS = {"minimax_m3": "minimax_m3"}  # choices of blocks of keys, by head of keys
# with a summand that goes on to the next layer; with tables in layers, and a convolution
NGRAMS = {name: name for name in ("longcat_flash_ngram", "qwen4_exp_ngrams")}
LOOPS = {"hrm_text": "hrm_text_deep", "zamba2": "zamba2", "ouro": "ouro_expected"}  # whose layers run several times
# whose layers leave states of blocks, and what runs some of them several times with messages
DEPTH = {"inkling2": "inkling2", "inkling2_loop": "inkling2_loop"}
# What microbatches change: a loss of all rows together, tables that the longest position decides.
WHOLE = {"batch": "deepseek_v3", "length": "llama_dynamic", "mtp": "deepseek_v3"}  # and heads for further tokens
# Heads whose block is not a layer like the last one: of several layers, of another kind.
HEADS = {f"mtp_{case.name}": case.name for case in mtp_cases() if function_of(family_of(case.config), "mtp_kinds")}
WHOLE["policy"] = "deepseek_v3"  # and a loss that somebody else has written
# What takes a second model: with tables that the longest position decides, with experts.
TAUGHT = {"forward": "deepseek_v3", "reverse": "deepseek_v3"}
# What trains indexers of keys and of blocks of them, by the stage: as a warm-up and beside the next-token loss.
CHOOSING = {"dense": "deepseek_v32", "sparse": "glm_moe_dsa", "dense pools": "qwen4_exp", "sparse pools": "glm5_next"}
CHOOSING |= {"sparse blocks": "minimax_m3", "sparse windows": "deepseek_v4", "sparse shared windows": "deepseek_v41"}
NAMED = MODELS | HYBRIDS | SEQUENTIAL | STREAMS | BLOCKS | GATHERED | NGRAMS | LOOPS | DEPTH | WHOLE | TAUGHT | CHOOSING
NAMED |= HEADS | NORMED
TEACHERS = {"forward": "length", "reverse": "gpt_oss"}
OPTIONS: dict[str, dict[str, Any]] = {name: {"balance_rate": 0.01} for name in ("deepseek", "mtp", "policy", *TAUGHT)}
TERMS: dict[str, dict[str, Any]] = {
    "llama": {"label_smoothing": 0.1, "z_loss": 1e-2},
    "deepseek": {"balance": Balance(sequence=0.3, z=0.1, scores="sigmoid")},
    "qwen3_next": {"balance": Balance(sequence=0.3, z=0.1)},
    "gemma4_moe": {"balance": Balance(sequence=0.3, z=0.1)},
    "batch": {"balance": Balance(sequence=0.1, batch=0.5, z=0.1)},
    "length": {"length": None},
    "policy": {"balance": Balance(sequence=0.3, z=0.1)},
    "mtp": {"balance": Balance(sequence=0.3), "label_smoothing": 0.1, "z_loss": 1e-2},
    **{name: {"balance": Balance(sequence=0.3, z=0.1), "direction": name, "temperature": 2.0} for name in TAUGHT},
}
TERMS["forward"]["length"] = None
TERMS |= {name: {"kernel": "sparse"} for name in GATHERED}
# 2 divides their heads, experts and vocabularies, 4 but for the KV heads.
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "deepseek": {"attention_bias": True, "n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "gpt_oss": {"num_local_experts": 8},
    "qwen3_next": {"num_experts": 8},
    "lfm2": {},
    "batch": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "length": {},
    "mtp": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 2},
}
CHANGES |= dict.fromkeys(("policy", *TAUGHT), CHANGES["batch"])
LENGTH = 24  # what some rope scalings need: of the whole run, not of a rank's part
CLIP = 0.5  # below the norms
Errors = dict[str, float]
T = TypeVar("T")


@functools.cache
def config_of(name: str, layers: int | None = None) -> Any:
    """One of `NAMED`, with as many layers, whose kinds begin anew where they end."""
    config = even(NAMED[name])
    config = dataclasses.replace(config, **CHANGES.get(name, even_experts(config)))
    config = with_heads(config, 2) if name in HEADS else config
    if name == "length":
        config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, original_max_position_embeddings=4))
    if layers is None:
        return config
    again = config.layer_kinds[1:] if name == "deepseek" else config.layer_kinds  # whose first layer alone is dense
    longer = (*config.layer_kinds, *again * layers)[:layers]
    return dataclasses.replace(config, num_hidden_layers=layers, layer_kinds=longer)


def even(name: str) -> Any:
    """The tiny config of that name, with a vocabulary and heads that 4 divides."""
    config = next(case.config for case in cases() if case.name == name)
    changes: dict[str, Any] = {"vocab_size": 64}
    names = {field.name for field in dataclasses.fields(config) if field.init}
    if config.num_attention_heads % 4:
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": config.hidden_size // 4}
        changes |= {key: value for key, value in sizes.items() if key in names}
    if "linear_num_value_heads" in names:
        changes |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    if "linear_num_heads" in names:
        changes["linear_num_heads"] = 4
    return dataclasses.replace(config, **changes)


def even_experts(config: Any) -> dict[str, Any]:
    """The changes that make a model's experts, if it has any, eight in two groups."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    changes = {name: 8 for name in names if getattr(config, name, 0)}
    grouped = changes and getattr(config, "n_group", 1) > 1
    return changes | ({"n_group": 2, "topk_group": 1} if grouped else {})


@functools.cache
def batch() -> dict[str, Tensor]:
    """[8, 16] of everything."""
    rows = ((10, 6), (-3, 1, 12), (16,), (-16,), (5, -11), (2, 2, 2, 10), (15, -1), (-8, 4, 4))
    made = batch_of(config_of("llama"), segments(*rows))
    return made.batch()


def batch_for(name: str) -> dict[str, Tensor]:
    """With what its loss reads."""
    heads = {"mtp": 2, **{one: config_of(one).num_nextn_predict_layers for one in HEADS if one == name}}
    return look_ahead(batch(), heads[name]) if name in heads else batch()


def pieces(lengths: list[int]) -> list[dict[str, Tensor]]:
    """The batch in as many lists of rows, with padding before them up to these lengths: the last columns are tokens."""
    parts = [padded(part, length) for part, length in zip(fnmodels.split(batch(), len(lengths)), lengths, strict=True)]
    return [{name: tensor.roll(tensor.shape[1] - 16, 1) for name, tensor in part.items()} for part in parts]


def loss_of(name: str, layers: int | None = None, **options: Any) -> Callable[..., Any]:
    options = {"kernel": "math", "length": LENGTH, **TERMS.get(name, {}), **options}
    if name in TAUGHT:
        theirs = config_of(TEACHERS[name])
        teacher = functools.partial(distill, teacher=generic_params(theirs), teacher_config=theirs, chunk=7)
        return functools.partial(teacher, config=config_of(name, layers), **options)
    if name in CHOOSING:
        options |= {"stage": name.split()[0], "weight": 0.7}
        return functools.partial(indexer_loss, config=config_of(name, layers), **options)
    loss = {"mtp": mtp_loss, "policy": policy, **dict.fromkeys(HEADS, mtp_loss)}.get(name, next_token_loss)
    return functools.partial(loss, config=config_of(name, layers), **options)


def policy(
    params: Any,
    batch: Mapping[str, Tensor],
    *,
    config: Any,
    balance: Balance,
    kernel: str,
    experts: str = "auto",
    aux: bool = True,
    **how: Any,
) -> tuple[Any, ...]:
    """A policy gradient of an MoE model. aux: accepted as the step passes it; the counts are returned anyway."""
    how |= {"kernel": kernel, "experts": experts}
    logp, entropy, valid, added, sums = routed_logprobs(params, batch, config=config, balance=balance, chunk=7, **how)
    place = 7.0 * batch["tokens"] + batch["positions"]
    total, count, metrics = policy_loss(logp, place.sin() - 4, place.cos(), valid, entropy=entropy, entropy_bonus=0.1)
    return total + added, count, metrics | sums


def weights_of(config: Any) -> Any:
    """Generic parameters: in fp32, or fp64 for models with recurrent layers, those that choose keys, and Muse Spark.

    Their fp32 gradients in one process are up to 1.2e-5 from those in fp64, those of attention 4e-6; and rounding makes
    another choice. Those of Muse Spark are up to 4e-5 from fp64, in which every mesh is within 1e-13 of one process.
    """
    family = fnmodels.family_of(config)
    precise = ordered_kinds(config) or config.model_type == "muse_spark_text"
    precise = precise or any(LayerKind.parse(kind).indexed for kind in family.kinds(config))
    return generic_params(config, torch.float64 if precise else torch.float32)


def spec_of(name: str, layers: int | None = None) -> Any:
    config = config_of(name, layers)
    spec = fnmodels.family_of(config).spec(config)
    return with_indexers(spec, name.split()[0]) if name in CHOOSING else spec  # type: ignore[arg-type]


def optimizer_of(name: str, layers: int | None = None) -> Optimizer:
    # A large eps, as otherwise AdamW scales up tiny gradients, whose sign is noise.
    return adamw(1e-2, eps=1e-3, weight_decay=0.1, spec=spec_of(name, layers))


@dataclass(frozen=True)
class One:
    """The reference of one process: {path: gradient of the summed loss}, {path: parameter after a step}, metrics."""

    grads: Mapping[str, Tensor]
    after: Mapping[str, Tensor]
    metrics: Mapping[str, Any]


@functools.cache
def one_process(name: str, layers: int | None = None) -> One:
    """The reference of a model, with as many layers."""
    return by_one_rank(f"{name}-{layers}", lambda: computed(name, layers))


def by_one_rank(name: str, compute: Callable[[], T]) -> T:
    """Computed by the first of a pool's ranks, read by the others; in a process without a pool, computed."""
    folder = os.environ.get(FOLDER)
    if folder is None:
        return compute()
    path = Path(folder) / f"{name}.pt"
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            torch.save(compute(), path)
    found: T = torch.load(path, weights_only=False)
    return found


def computed(name: str, layers: int | None) -> One:
    params, optimizer = weights_of(config_of(name, layers)), optimizer_of(name, layers)
    options = OPTIONS.get(name, {})
    sums = gradient_sums(loss_of(name, layers), optimizer, counts=bool(options))(
        params, [batch_for(name)], divide=False
    )
    learning = [path for path, leaf in tree.flatten(spec_of(name, layers)).items() if leaf.trainable]
    grads = {path: grad.clone() for path, grad in zip(learning, sums.grads, strict=True)}
    state, metrics = update(optimizer, init_state(params, optimizer), sums, clip=CLIP, **options)
    assert metrics["grad_norm"] > CLIP
    return One(grads, tree.flatten(state.params), metrics)


def placed(
    name: str, mesh: Mesh, rules: Rules | None = None, *, strategy: Strategy | None = None, layers: int | None = None
) -> Any:
    """The same parameters as DTensors on the mesh; with `pp` those of this rank's stages."""
    config = config_of(name, layers)
    placements = plan(spec_of(name, layers), rules or rules_of(mesh, config), devices(mesh))
    if mesh.pp > 1:
        placements = stage_plan(placements, config, devices(mesh), strategy or Strategy())
    whole = tree.flatten(weights_of(config))
    made = iter(
        [how.distribute(whole[path][how.local_box()].clone()) for path, how in tree.flatten(placements).items()]
    )
    return tree.map(lambda _: next(made), placements)


# ------------------------------------------------------------------------------------------------ how far it is from it


def errors_of(
    name: str,
    mesh_text: str,
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    layers: int | None = None,
) -> Errors:
    """{name: error against one process} of a step: this rank's gradients and parameters, loss, count, gradient norm.

    A gradient shard is compared with that shard of the full gradient, relative to the full one's largest element, or to
    that of all gradients where it is rounding noise. options: the step's, and "lengths" of microbatches.
    """
    mesh, how, one = Mesh.parse(mesh_text), Strategy(**strategy or {}), one_process(name, layers)
    optimizer, params = optimizer_of(name, layers), placed(name, mesh, strategy=how, layers=layers)
    given = OPTIONS.get(name, {}) | (options or {})
    whole = pieces(given.pop("lengths")) if "lengths" in given else batch_for(name)
    step = make_step(loss_of(name, layers), optimizer, clip=CLIP, mesh=mesh, strategy=how, **given)
    grads: list[Tensor] = []
    with watched(grads):
        state, metrics = step(init_state(params, optimizer), whole)
    shards, held = tree.flatten(shardings(state.params)), tree.flatten(local_tree(state.params))
    learning = [path for path in held if path in one.grads]
    found = gradient_errors(
        dict(zip(learning, grads, strict=True)), one, {p: how.local_box() for p, how in shards.items()}
    )
    found |= {f"{path} after a step": error(p, one.after[path][shards[path].local_box()]) for path, p in held.items()}
    found |= {n: error(metrics[n].double(), one.metrics[n].double()) for n in ("loss", "count", "grad_norm")}
    if name == "llama":
        held_out = make_eval_step(loss_of(name, layers), mesh=mesh, strategy=how)(params, batch())
        found["held-out loss"] = error(held_out["loss"], one.metrics["loss"])
    if "aux" in metrics:  # of all layers, in every process
        assert metrics["aux"].keys() == one.metrics["aux"].keys()
        found |= {n: error(value.double(), one.metrics["aux"][n].double()) for n, value in metrics["aux"].items()}
    return found


@contextlib.contextmanager
def watched(grads: list[Tensor]) -> Iterator[None]:
    """Collects the step's gradients, summed over all tokens, before they are divided and clipped."""
    add_up = updates._global

    def run(sums: Sums, mesh: Any) -> Sums:
        grads.extend(grad.clone() for grad in sums.grads)
        return add_up(sums, mesh)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(updates, "_global", run)
        yield


def errors_of_modules(name: str, mesh_text: str, remat: str = "none") -> Errors:
    """The errors of FSDP2 on modules, with torch's own clipping and optimizer."""
    mesh, one = Mesh.parse(mesh_text), one_process(name)
    model = Model(tree.map(torch.clone, generic_params(config_of(name))), spec_of(name))
    shard(model, devices(mesh))
    total, count = model(loss_of(name), own_rows(batch(), devices(mesh)), layer_fn=layer_fn(remat, "none"))
    total.backward()
    total, count = (summed(x, *(devices(mesh).get_group(axis) for axis in ("dp", "fsdp"))) for x in (total, count))
    learning = {path: p for path, p in model.named_parameters() if p.requires_grad}
    found = gradient_errors({path: full(p.grad) for path, p in learning.items()}, one)
    leaves = tree.flatten(spec_of(name))
    groups = [
        {"params": [p for path, p in learning.items() if leaves[path].decay is decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    for p in learning.values():
        p.grad.div_(count)  # type: ignore[union-attr]
    norm = torch.nn.utils.clip_grad_norm_(learning.values(), CLIP)
    torch.optim.AdamW(groups, lr=1e-2, eps=1e-3).step()
    copies.check([p.detach() for _, p in model.named_parameters()], devices(mesh))
    before = tree.flatten(generic_params(config_of(name)))
    for path, p in model.named_parameters():
        expected = one.after[path] if path in learning else before[path]
        found[f"{path} after a step"] = error(full(p.detach()), expected)
    metrics = {"loss": total.detach() / count, "count": count, "grad_norm": full(norm)}
    return found | {n: error(x.double(), one.metrics[n].double()) for n, x in metrics.items()}


def full(leaf: Any) -> Tensor:
    whole: Tensor = leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf
    return whole


def gradient_errors(found: Mapping[str, Tensor], one: One, mine: Mapping[str, Any] | None = None) -> Errors:
    """Relative errors of gradients. mine: {path: the slices of the full gradient that `found` holds}."""
    sizes = {path: float(grad.abs().max()) for path, grad in one.grads.items()}
    largest = max(sizes.values())
    off: Errors = {}
    for path, grad in found.items():
        whole = one.grads[path] if mine is None else one.grads[path][mine[path]]
        assert grad.shape == whole.shape, path
        size = sizes[path] if sizes[path] > 1e-5 * largest else largest
        off[f"gradient of {path}"] = float((grad - whole).abs().max()) / size if grad.numel() else 0.0
    return off


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest element."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)) if found.numel() else 0.0


def worst(found: list[Errors], start: str = "") -> tuple[float, str]:
    """The largest error of all ranks and its name; NaN counts as the largest."""
    every = [(value, what) for errors in found for what, value in errors.items() if what.startswith(start)]
    return max(every, key=lambda pair: (pair[0] != pair[0], pair[0]))
