"""D1 of the families with recurrent layers, convolutions, chosen or borrowed keys: each way to share the work, alone.

Pairs of ways are in `test_compositions` too; methods of context parallelism, and what they hand on, in `test_context`.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import parsed
from tests.support.copies import may_differ
from tests.support.one_process import (
    GATHERED,
    HYBRIDS,
    NAMED,
    NORMED,
    SEQUENTIAL,
    config_of,
    error,
    errors_of,
    one_process,
    placed,
    spec_of,
    weights_of,
    worst,
)
from tests.support.ranks_pool import Ranks
from tests.support.status import Shows
from tests.train.parallel.test_tensor import few_types
from train.comm.dtensor import full_tensor
from train.parallel import Mesh, fsdp
from train.parallel.ngram_tables import TableRows, is_table
from train.parallel.pipeline import gradients, staged_loss
from train.parallel.tensor import leaf_wrappers

LIMIT = 1e-5
FAMILIES = (*HYBRIDS, *SEQUENTIAL, *NORMED)
# {mesh: the step's options}
ALONE: dict[str, dict[str, Any]] = {
    "fsdp=2": {"remat": "full"},
    "tp=2": {},
    "cp=2": {},
    "cp=4": {"remat": "full"},
    "pp=2": {"accumulate": 2},
    "ep=2": {},
}


def kinds_of(name: str) -> tuple[str, ...]:
    return fnmodels.family_of(config_of(name)).kinds(config_of(name))


def has_experts(name: str) -> bool:
    return any(kind.routed for kind in parsed(kinds_of(name)))


def checked(found: list[dict[str, float]], name: str) -> None:
    """Every leaf is compared, in one stage at least, by its gradient and after a step."""
    spec = tree.flatten(spec_of(name))
    every = {f"gradient of {path}" for path, leaf in spec.items() if leaf.trainable}
    assert {what for errors in found for what in errors} >= every | {f"{path} after a step" for path in spec}
    assert worst(found)[0] < LIMIT, worst(found)


# Shards know no family: each third one has fsdp=2. Experts are sent by one function: each second family that has
# them, and what each expert returns normed, has ep=2. test_tensor has the gradients over tp=2 of each family. Over
# four ranks the middle ones pass on what they got: a family of each form of state and of chosen keys has cp=4, not
# cp=2, or four ranks in test_context.
FARTHER = ("kimi_linear", "rwkv7", "glm5_next", "gemma4_e")
STEPPED = (*FARTHER, "qwen3_next", "lfm2", "mamba2", "falcon_h1", "glm_moe_dsa")  # over tp=2 too
TYPES = {case.name for case in few_types()}
# Second variants of a family, whose layers hand on what the first one's do, have cp and pp in turn.
SECOND = {"qwen3_5": "cp=2", "qwen3_5_moe": "pp=2", "lfm2_moe": "cp=2", "falcon_h1_norm": "pp=2"}
SECOND |= {"granitemoehybrid_dense_tied": "cp=2", "nemotron_h_latent_bias": "pp=2"}
EXPERTS = {*[name for name in FAMILIES if has_experts(name)][::2], *NORMED}
EACH = [
    (name, mesh)
    for index, name in enumerate(FAMILIES)
    for mesh in ALONE
    if (mesh != "fsdp=2" or index % 3 == 0)
    and (mesh != "tp=2" or name in STEPPED or NAMED[name] not in TYPES)
    and (mesh != ("cp=2" if name in FARTHER else "cp=4"))
    and (mesh != "ep=2" or name in EXPERTS)
    and (mesh not in ("cp=2", "pp=2") or SECOND.get(name, mesh) == mesh)
]


@pytest.mark.parametrize(("name", "mesh"), EACH)
def test_a_step_is_that_of_one_process(ranks: Ranks, name: str, mesh: str) -> None:
    strategy = {"schedule": "1F1B"} if "pp" in mesh else {}
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, ALONE[mesh]), name)


# (model, mesh, strategy, microbatches): choices, and keys and values, cross one border, or pass through a stage
BORDERS = [
    ("glm_moe_dsa", "pp=4", {"schedule": "1F1B"}, 4),
    ("glm_moe_dsa", "pp=2", {"schedule": "ZBVZeroBubble"}, 4),
    ("glm_moe_dsa", "pp=2,cp=2", {"split": (1, 3)}, 2),
    ("glm_moe_dsa", "pp=2,tp=2", {"split": (1, 3), "sequence": True}, 2),
    ("axk2", "pp=2,tp=2", {"sequence": True}, 2),  # gates of norms read and write the residual stream
    ("qwen4_exp", "pp=2,tp=2", {"sequence": True}, 2),  # streams that are mixed by gates
    # streams that are not mixed, and choices, cross a border together
    ("hy_v4", "pp=2,tp=2", {"sequence": True}, 2),
    ("hy_v4", "pp=2,cp=2", {"split": (2, 1)}, 2),
    # streams that are mixed, and choices of blocks of keys
    ("glm5_next", "pp=2,tp=2", {"split": (2, 1), "sequence": True}, 2),
    ("glm5_next", "pp=2,cp=2", {"split": (2, 1)}, 2),
    ("glm5_next", "pp=2,ep=2", {"split": (2, 1)}, 2),
    ("gemma4_e", "pp=4", {"schedule": "1F1B"}, 4),
    ("gemma4_e", "pp=2", {"schedule": "ZBVZeroBubble"}, 4),
    ("gemma4_e", "pp=2", {"schedule": "InterleavedZeroBubble"}, 4),
    ("gemma4_e", "pp=2,cp=2", {}, 2),
    ("gemma4_e", "pp=2,tp=2", {"sequence": True}, 2),
    ("gemma4_moe", "pp=2,ep=2", {}, 2),
    ("mistral_large4", "pp=2,tp=2", {"sequence": True}, 2),  # tables of learned frequencies, on each stage
    ("mistral_large4", "cp=2,tp=2", {}, 1),
    ("rwkv7", "pp=2,tp=2", {}, 2),  # the values of the first layer, of heads
    ("rwkv7", "pp=2,cp=2", {}, 2),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "parts"), BORDERS)
def test_what_later_stages_read_crosses_borders(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], parts: int
) -> None:
    kinds = parsed(kinds_of(name))
    assert any(kind.source or kind.indexed or kind.joins for kind in kinds) or name == "gemma4_moe"
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, {"accumulate": parts}), name)


# residual streams of several rows, keys of windows of tokens, and experts by token id: both models over cp, tp and pp,
# and what knows no layer, or is a pair of these, in turn; {models: [(mesh, strategy, options)]}
STREAMS: dict[tuple[str, ...], list[tuple[str, dict[str, Any], dict[str, Any]]]] = {
    ("deepseek_v4", "deepseek_v41"): [
        ("tp=2", {"sequence": True}, {"remat": "full"}),
        ("cp=2", {}, {}),
        ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ],
    ("deepseek_v4",): [
        ("fsdp=2", {}, {"remat": "full"}),
        ("tp=2", {}, {}),
        ("cp=2,tp=2", {}, {}),
    ],
    ("deepseek_v41",): [
        ("ep=2", {}, {}),
        ("pp=2", {"schedule": "ZBVZeroBubble"}, {"accumulate": 4}),
    ],
    ("deepseek_v41", "deepseek_v41_plain"): [("pp=2,tp=2", {"sequence": True}, {"accumulate": 2})],
    ("deepseek_v41_plain",): [("cp=2", {}, {})],
}


# tables of n-grams that the embedding or layers read, and what half of a layer leaves for the other
NGRAMS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp=2", {}, {"remat": "full"}),
    ("fsdp=4", {}, {}),
    ("dp=2,fsdp=2", {}, {}),
    ("tp=2", {}, {}),
    ("tp=2", {"sequence": True}, {}),
    ("cp=2", {}, {}),
    ("ep=2", {}, {}),
    ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ("pp=2,tp=2", {"sequence": True}, {"accumulate": 2}),
    ("fsdp=2,tp=2", {}, {"remat": "full"}),
    ("fsdp=2,tp=2", {"sequence": True}, {}),
    ("cp=2,tp=2", {"sequence": True}, {}),
]


TABLES = ("longcat_flash_ngram", "qwen4_exp_ngrams")
# both over two ranks, and over four in turn
NGRAMS_OF = [
    (name, *way)
    for first, name in enumerate(TABLES)
    for index, way in enumerate(NGRAMS)
    if Mesh.parse(way[0]).world == 2 or index % 2 == first
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "options"), NGRAMS_OF)
def test_ngrams_and_a_summand_of_the_layer_before(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any]
) -> None:
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options), name)


LOOPS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp=2", {}, {"remat": "full"}),
    ("tp=2", {"sequence": True}, {}),
    ("cp=2", {}, {}),
    ("pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ("pp=2", {"schedule": "Interleaved1F1B"}, {"accumulate": 2, "remat": "full"}),
    ("fsdp=2,pp=2", {}, {"accumulate": 2}),
]


# over two ranks each way, over four and with several stages to a rank one model in turn
LOOPED = ("hrm_text", "zamba2", "ouro")
LOOPS_OF = [
    (name, *way)
    for i, name in enumerate(LOOPED)
    for j, way in enumerate(LOOPS)
    if j < len(LOOPS) - 2 or i == (j + 1) % len(LOOPED)
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "options"), LOOPS_OF)
def test_layers_that_run_several_times(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any], shows: Shows
) -> None:
    shows(config_of(name).model_type, "parallel")
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options), name)


# states of blocks that layers leave, biases of scores by distance, sinks of tokens and convolutions
DEPTH: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    # each way alone, where layers also run several times; the same block without loops has pairs of ways
    ("inkling2_loop", "fsdp=2", {}, {"remat": "full"}),
    ("inkling2_loop", "ep=2", {}, {}),
    ("inkling2_loop", "cp=2", {}, {"remat": "full"}),
    ("inkling2_loop", "tp=2", {"sequence": True}, {}),
    ("inkling2_loop", "pp=2", {"schedule": "1F1B"}, {"accumulate": 2}),
    ("inkling2_loop", "pp=2,tp=2", {"sequence": True}, {"accumulate": 2}),
    ("inkling2", "cp=2,tp=2", {"sequence": True}, {"remat": "full"}),
    ("inkling2", "pp=2,cp=2", {}, {"accumulate": 2}),
    ("inkling2", "fsdp=2,tp=2", {}, {}),
    ("kimi_k3", "tp=2", {"sequence": True}, {}),
    ("kimi_k3", "ep=2,tp=2", {}, {}),
    ("kimi_k3", "pp=2,cp=2", {}, {"accumulate": 2}),
]


@pytest.mark.parametrize(("name", "mesh", "strategy", "options"), DEPTH)
def test_attention_over_depth(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any], shows: Shows
) -> None:
    shows(config_of(name).model_type, "parallel")
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options), name)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "sentence"),
    [
        ("inkling2", "cp=2", {"context": "ring"}, 'take method="gather"'),
        ("inkling2", "cp=2", {"context": "ulysses"}, 'take method="gather"'),
    ],
)
def test_what_attention_over_depth_refuses(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(Exception, match=sentence):
        checked(ranks(2)(errors_of, name, mesh, strategy, {}), name)


def test_counts_of_experts_of_loops_over_stages_are_refused(ranks: Ranks) -> None:
    with pytest.raises(Exception, match="leave aux and balance_rate out, or pp"):
        ranks(2)(errors_of, "inkling2_loop", "pp=2", {}, {"accumulate": 2, "balance_rate": 0.1})


def shapes_gathered(name: str, mesh: str) -> list[tuple[int, ...]]:
    """The shapes of all parameters that a step gathers."""
    seen: set[tuple[int, ...]] = set()
    right = fsdp.gather

    def gather(shards: Any) -> Any:
        seen.update(tuple(shard.sharding.shape) for shard in shards)
        return right(shards)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fsdp, "gather", gather)
        errors_of(name, mesh, {}, {})
    return sorted(seen)


def tables_of(name: str) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in tree.flatten(spec_of(name)).items() if is_table(path)}


@pytest.mark.parametrize("name", ["longcat_flash_ngram", "qwen4_exp_ngrams"])
def test_tables_of_ngrams_are_read_where_they_are(ranks: Ranks, name: str) -> None:
    """Rows are sharded, odd numbers of them too, and no rank ever has a whole table."""
    tables = set(tables_of(name).values())
    assert len(tables) > 1 and all(rows % 2 for rows, _ in tables) == (name == "longcat_flash_ngram")
    for seen in ranks(2)(shapes_gathered, name, "fsdp=2"):
        assert seen and not set(map(tuple, seen)) & tables


def table_shards(name: str, mesh: str) -> dict[str, tuple[tuple[int, ...], float]]:
    """{table: (the shape of this rank's shard, how far the table is from the original once it is gathered)}."""
    params, whole = tree.flatten(placed(name, Mesh.parse(mesh))), tree.flatten(weights_of(config_of(name)))
    paths = [path for path in params if is_table(path)]
    return {p: (tuple(params[p].to_local().shape), error(full_tensor(params[p]), whole[p])) for p in paths}


@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "fsdp=2,tp=2", "fsdp=4"])
@pytest.mark.parametrize("name", ["longcat_flash_ngram", "qwen4_exp_ngrams"])
def test_ranges_of_rows_are_shards_of_tables(ranks: Ranks, name: str, mesh: str) -> None:
    """Each rank has its rows, none twice and none of padding; with tp, of which fsdp shards the columns."""
    sizes = Mesh.parse(mesh)
    every = ranks(sizes.world)(table_shards, name, mesh)
    by_columns = sizes.fsdp if sizes.tp > 1 else 1
    for path, (rows, columns) in tables_of(name).items():
        shapes = [shards[path][0] for shards in every]
        assert sum(shape[0] for shape in shapes) == rows * by_columns
        assert {shape[1] for shape in shapes} == {columns // by_columns}
        assert max(shape[0] for shape in shapes) == -(-rows // (sizes.world // by_columns))
        assert all(shards[path][1] == 0 for shards in every)


def own_positions_alone(
    weight: Any, convolve: Callable[..., Any], x: Tensor, segment_ids: Tensor, *given: Any, **how: Any
) -> Any:
    """A convolution that does not see the positions of other ranks."""
    rank, length = weight.entry.region.rank, x.shape[1]
    return convolve(x, weight.weight, segment_ids[:, rank * length : (rank + 1) * length], *given, **how)


def errors_with_piecewise_conv() -> dict[str, float]:
    one_process("qwen4_exp_ngrams")  # before it is spoiled
    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(leaf_wrappers._Along, "along_rows", own_positions_alone)
        return errors_of("qwen4_exp_ngrams", "tp=2", {"sequence": True}, {})


def errors_with_shifted_rows() -> dict[str, float]:
    """Ranges of rows that begin one row too late."""
    one_process("longcat_flash_ngram")
    right = TableRows.look_up

    def look_up(table: TableRows, ids: Tensor) -> Tensor:
        return right(table, (ids + 1) % table.rows)

    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(TableRows, "look_up", look_up)
        return errors_of("longcat_flash_ngram", "tp=2", {}, {})


@pytest.mark.parametrize("spoiled", [errors_with_piecewise_conv, errors_with_shifted_rows])
def test_mistakes_of_sharded_ngrams_are_seen(ranks: Ranks, spoiled: Callable[[], dict[str, float]]) -> None:
    assert worst(ranks(2)(spoiled), "gradient")[0] > 100 * LIMIT


# choices of blocks of keys, of which each rank of tp makes those of its heads; of more ranks than heads, one
BLOCKS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("fsdp=2", {}, {"remat": "full"}),
    ("tp=2", {}, {}),
    ("tp=4", {"sequence": True}, {"remat": "full"}),
    ("cp=2", {}, {}),
    ("ep=2", {}, {}),
    ("pp=2,tp=2", {"sequence": True}, {"accumulate": 2}),
    ("cp=2,tp=2", {}, {}),
]


@pytest.mark.parametrize(("mesh", "strategy", "options"), BLOCKS)
def test_choices_by_head_of_keys(ranks: Ranks, mesh: str, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    checked(ranks(Mesh.parse(mesh).world)(errors_of, "minimax_m3", mesh, strategy, options), "minimax_m3")


@pytest.mark.parametrize("mesh", ["tp=2", "cp=2,tp=2"])
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_keys(ranks: Ranks, name: str, mesh: str) -> None:
    """kernel="sparse" on the heads of each rank, and with cp on keys of all ranks."""
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, {}, {}), name)


@pytest.mark.parametrize(
    ("name", "mesh", "strategy", "options"),
    [(name, *given) for names, ways in STREAMS.items() for name in names for given in ways],
)
def test_streams_and_keys_of_windows(
    ranks: Ranks, name: str, mesh: str, strategy: dict[str, Any], options: dict[str, Any], shows: Shows
) -> None:
    shows(config_of(name).model_type, "parallel")
    checked(ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, strategy, options), name)


def another_choice(carried: dict[str, Any]) -> dict[str, Any]:
    """Without the latest key."""
    chosen = carried["chosen"]
    return carried | {"chosen": chosen.where(chosen != chosen.amax(-1, keepdim=True), -1)}


def no_gradient(carried: dict[str, Any]) -> dict[str, Any]:
    return tree.map(Tensor.detach, carried)


def of_another_kind(carried: dict[str, Any]) -> dict[str, Any]:
    """Keys as values."""
    return carried | {"kv": {kind: {"k": kv["v"], "v": kv["k"]} for kind, kv in carried["kv"].items()}}


def first_layers_inputs(beside: Tensor) -> Tensor:
    return beside.flip(2)


# {what is wrong: (model, keyword of run_layers, change of it in the second stage)}
MISTAKES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "another choice": ("glm_moe_dsa", "carried", another_choice),
    "keys and values without a gradient": ("gemma4_e", "carried", no_gradient),
    "keys as values": ("gemma4_e", "carried", of_another_kind),
    "inputs of other layers": ("gemma4_e", "layer_inputs", first_layers_inputs),
    "inputs of layers without a gradient": ("gemma4_e", "layer_inputs", Tensor.detach),
}


def errors_with(what: str) -> dict[str, float]:
    name, keyword, change = MISTAKES[what]
    one_process(name)  # before it is spoiled
    right = fnmodels.run_layers

    def run(params: Any, x: Tensor, masks: Any, freqs: Any, lo: int, hi: int, **how: Any) -> Any:
        how |= {keyword: change(how[keyword])} if lo else {}
        return right(params, x, masks, freqs, lo, hi, **how)

    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(staged_loss.fnmodels, "run_layers", run)
        split = {"split": (1, 3) if name == "glm_moe_dsa" else (2, 2)}
        return errors_of(name, "pp=2", split, {"accumulate": 2})


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_at_borders_are_seen(ranks: Ranks, what: str) -> None:
    assert worst(ranks(2)(errors_with, what), "gradient")[0] > 100 * LIMIT


def errors_of_looped_layers_alone() -> dict[str, float]:
    """Each stage keeps the gradients of its own passes of a layer."""
    one_process("hrm_text")
    with pytest.MonkeyPatch.context() as patch, may_differ():
        patch.setattr(gradients, "_sum_copies", lambda *_: None)
        return errors_of("hrm_text", "pp=2", {}, {"accumulate": 2})


def test_a_loop_whose_gradients_are_not_summed_is_seen(ranks: Ranks) -> None:
    assert worst(ranks(2)(errors_of_looped_layers_alone), "gradient")[0] > 100 * LIMIT
