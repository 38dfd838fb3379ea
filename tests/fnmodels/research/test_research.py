"""Each function of `fnmodels.research` against a plain loop of forward passes, or against what the paper defines."""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fnmodels
from fnmodels import research
from fnmodels.models.common.decoder import head
from fnmodels.research.continued import given_run
from tests.support.cases import (
    Case,
    batch_of,
    cases,
    causal,
    covering,
    generic_params,
    off,
    segments,
    short,
    tap_names,
)

LLAMA = next(case.config for case in cases() if case.name == "llama")
PARAMS = generic_params(LLAMA)
LAYERS = LLAMA.num_hidden_layers
CLEAN = batch_of(LLAMA, segments((6,), (6,)), seed=1).prepared()
CORRUPT = batch_of(LLAMA, segments((6,), (6,)), seed=2).prepared()
run = functools.partial(fnmodels.forward, PARAMS, config=LLAMA, kernel="math")


def metric(logits: Tensor) -> Tensor:
    """A difference of two logits at the last token, the mean over rows."""
    return (logits[:, -1, 3] - logits[:, -1, 5]).mean()


def test_logit_lens() -> None:
    _, tapped = run(*CLEAN, taps=("embed", "layers.*.output"))
    found = research.logit_lens(PARAMS, CLEAN, config=LLAMA, kernel="math")
    assert found.shape[0] == LAYERS + 1 and off(found[-1], run(*CLEAN)) < 1e-5
    for logits, x in zip(found, [tapped["embed"], *(tapped[f"layers.{i}.output"] for i in range(LAYERS))], strict=True):
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + LLAMA.rms_norm_eps) * PARAMS["norm"]
        assert off(logits, F.linear(normed, head(PARAMS, LLAMA))) < 1e-5


def test_a_tuned_lens_begins_as_the_logit_lens_and_learns() -> None:
    lens = research.init_tuned_lens(LLAMA)
    plain = research.logit_lens(PARAMS, CLEAN, config=LLAMA)
    assert torch.equal(research.tuned_lens(lens, PARAMS, CLEAN, config=LLAMA), plain)
    batches = [batch_of(LLAMA, segments((6, 2), (-3, 5)), seed=seed).prepared() for seed in range(4)] * 8
    trained, losses = research.train_tuned_lens(lens, PARAMS, batches, config=LLAMA, rate=2e-3)
    assert losses[-1] < 0.8 * losses[0] and not lens["matrix"].any()
    assert torch.equal(research.tuned_lens(trained, PARAMS, CLEAN, config=LLAMA)[-1], plain[-1])
    found = research.tuned_lens(trained, PARAMS, CLEAN, config=LLAMA)[0]
    _, tapped = run(*CLEAN, taps=("embed",))
    x = tapped["embed"] + tapped["embed"] @ trained["matrix"][0].T + trained["bias"][0]
    assert off(found, fnmodels.llama.unembed(PARAMS, x, config=LLAMA)) < 1e-5


def test_jacobian_lens_is_the_mean_derivative() -> None:
    """Of the last state, summed over tokens; padding counts for nothing, and the last entry is the directions."""
    batch = batch_of(LLAMA, segments((4, 2), (-3, 3)))
    params, prepared = generic_params(LLAMA, torch.float64), batch.prepared()
    valid = prepared[0]["valid"]
    lens = research.jacobian_lens(params, prepared, config=LLAMA, chunk=5)
    width, read = LLAMA.hidden_size, functools.partial(fnmodels.hidden, params, *prepared, config=LLAMA, kernel="math")
    assert lens.shape == (LAYERS + 1, width, width)
    torch.testing.assert_close(lens[-1], torch.eye(width, dtype=torch.float64))
    output = read(taps=("layers.0.output",))[1]["layers.0.output"]

    def moved(by: Tensor) -> Tensor:  # the same step at every token
        return read(edits={"layers.0.output": output + by * valid[..., None]})[valid].sum(0) / valid.sum()

    wanted = torch.func.jacfwd(moved)(torch.zeros(width, dtype=torch.float64))
    torch.testing.assert_close(lens[1], wanted, rtol=1e-9, atol=1e-9)
    some = torch.randn(3, width, dtype=torch.float64)
    found = research.jacobian_lens(params, prepared, config=LLAMA, directions=some)
    torch.testing.assert_close(found[1], some @ wanted, rtol=1e-9, atol=1e-9)
    logits = research.jacobian_lens_logits(lens, params, prepared, config=LLAMA, kernel="math")
    torch.testing.assert_close(logits[-1], batch.forward(params, kernel="math"))
    want = fnmodels.llama.unembed(params, output @ wanted.T, config=LLAMA)
    torch.testing.assert_close(logits[1], want)


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "olmo2", "falcon_h1", "mixtral", "cohere2", "gemma4_text_e", "gemma4_text_moe"]
)
def test_contributions_add_up_to_the_logit(name: str) -> None:
    """E2: embed + all that layers add is the logit; heads and neurons are what is lost where one is removed alone."""
    config = next(case.config for case in cases() if case.name == name)
    if name.startswith("gemma4"):  # a soft-capped logit is no sum; layers multiply the stream by a scalar
        config = dataclasses.replace(config, final_softcap=None)
    params, batch = generic_params(config), batch_of(config, segments((5,), (5,)))
    prepared, targets = batch.prepared(), batch.tokens.roll(1, 1)
    added = research.direct_logit_attribution(params, prepared, targets, config=config)
    logits, tapped = fnmodels.forward(
        params, *prepared, config=config, kernel="math", taps=("hidden", "final.norm.scale", "layers.*.attention")
    )
    scale = {"final.norm.scale": tapped["final.norm.scale"]}
    at_zero = fnmodels.forward(
        params, *prepared, config=config, kernel="math", edits=scale | {"hidden": lambda value, name: 0 * value}
    )
    whole = sum(value for tap, value in added.items() if not tap.endswith((".z", ".neurons")))
    wanted = (logits - at_zero).gather(-1, targets[..., None])[..., 0]
    assert off(whole, wanted) < 1e-5
    for tap, value in added.items():
        if tap.endswith(".z") and name in ("llama", "mixtral", "cohere2"):
            assert off(value.sum(-1), added[tap.removesuffix(".z")]) < 1e-5, "without biases the heads are all of it"
        if tap.endswith(".neurons") and name == "llama":
            assert off(value.sum(-1), added[tap.removesuffix(".neurons")]) < 1e-5
    if name != "llama":
        return
    against = batch.tokens.roll(2, 1)
    other = research.direct_logit_attribution(params, prepared, against, config=config)
    both = research.direct_logit_attribution(params, prepared, targets, config=config, against=against)
    assert all(off(both[tap], added[tap] - other[tap]) < 1e-5 for tap in added)


def test_neurons_are_parts_of_their_own_mlp() -> None:
    """The per-layer embeddings of Gemma 4 are added after the MLP, which does not contribute them."""
    config = short(next(case for case in cases() if case.name == "gemma4_text_e")).config
    params, batch = generic_params(config, torch.float64), batch_of(config, segments((5,), (5,)))
    added = research.direct_logit_attribution(params, batch.prepared(), batch.tokens, config=config)
    neurons = [name for name in added if name.endswith(".mlp.neurons")]
    assert neurons
    for name in neurons:
        assert off(added[name].sum(-1), added[name.removesuffix(".neurons")]) < 1e-9, name


def test_patch_grid_and_causal_trace() -> None:
    _, clean = run(*CLEAN, taps=("layers.*.output",))
    grid = research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA)
    chunked = research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, chunk=4)
    assert grid.shape == (LAYERS, 6) and off(chunked, grid) < 1e-6
    noise = torch.zeros(2, 6, LLAMA.hidden_size).index_fill(1, torch.tensor([1]), 2.0)
    trace = research.causal_trace(PARAMS, CLEAN, noise, metric, config=LLAMA)
    noisy = {"embed": lambda value, name: value + noise}
    for layer in range(LAYERS):
        for position in range(6):

            def patch(value: Tensor, name: str, position: int = position) -> Tensor:
                value = value.clone()
                value[:, position] = clean[name][:, position]
                return value

            edit = {f"layers.{layer}.output": patch}
            assert abs(metric(run(*CORRUPT, edits=edit)) - grid[layer, position]) < 1e-5
            assert abs(metric(run(*CLEAN, edits=edit | noisy)) - trace[layer, position]) < 1e-5
    assert (
        abs(grid[-1, -1] - metric(run(*CLEAN))) < 1e-5
        and off(trace[:, 0], metric(run(*CLEAN, edits=noisy)).expand(LAYERS)) < 1e-5
    )


DECODERS = [case for case in covering() if causal(case)]
PATCHED = [(case, ("input", "mlp", "output")[index % 3]) for index, case in enumerate(DECODERS)]


@pytest.mark.parametrize(("case", "tap"), PATCHED, ids=[f"{case}-{tap}" for case, tap in PATCHED])
def test_a_patch_of_a_later_layer_equals_the_run_of_all(case: Case, tap: str) -> None:
    """Whatever layers read of earlier ones; with edits before, at and after the layer, and of the ends."""
    names = [name for name in tap_names(case.config) if name.startswith("layers.") and name.split(".", 2)[2] == tap]
    if not names:
        return
    params, rows = generic_params(case.config, torch.float64), segments((4,))
    clean, corrupt = (batch_of(case.config, rows, seed=seed).prepared() for seed in (0, 1))
    edits = {"embed": _scaled, "layers.*.middle": _scaled, "layers.*.input": _scaled, "hidden": _scaled}
    known = {name.split(".", 2)[-1] for name in tap_names(case.config)}
    edits = {name: edit for name, edit in edits.items() if name.split(".", 2)[-1] in known}
    edits = edits if tap != "input" else {"embed": _scaled} | ({"final.norm": _scaled} if "norm" in params else {})
    full = functools.partial(fnmodels.forward, params, config=case.config, kernel="math")
    grid = research.patch_grid(params, clean, corrupt, metric, config=case.config, tap=tap, edits=edits)
    _, values = full(*clean, taps=tuple(names))
    assert grid.shape == (len(names), 4)
    for row, name in zip(grid, names, strict=True):
        for position in (0, 2):
            put = functools.partial(_put_one, there=values[name], position=position)
            assert off(row[position], metric(full(*corrupt, edits={**edits, name: put}))) < 1e-10, (name, position)


TAPS = ("attention.k", "output", "attention", "mlp", "input", "attention.q")


@pytest.mark.parametrize(("index", "case"), list(enumerate(DECODERS)), ids=[str(case) for case in DECODERS])
def test_a_patch_of_later_positions_equals_the_run_of_all(index: int, case: Case) -> None:
    """Packed documents and padding on both sides, edited embeddings, all logits or some; at every second position of a
    layer, the others in the next one."""
    known = {name.split(".", 2)[2] for name in tap_names(case.config) if name.startswith("layers.")}
    tap = next(tap for tap in (*TAPS[index % 6 :], "output") if tap in known)
    params, rows = generic_params(case.config, torch.float64), segments((3, 2, -1), (-2, 4))
    clean, corrupt = (batch_of(case.config, rows, seed=seed).prepared() for seed in (0, 1))
    edits, read = {"embed": _scaled}, (None, (1, -1), (0, 3))[index % 3]
    full = functools.partial(fnmodels.forward, params, *corrupt, config=case.config, kernel="math")

    def sums(logits: Tensor) -> Tensor:  # reads every position that it is given
        shown = logits if logits.shape[1] != 6 or read is None else logits[:, read]
        weights = torch.arange(1, 1 + shown[0].numel(), dtype=shown.dtype).cos().view(shown.shape[1:])
        return (shown * weights).sum()

    names = [name for name in tap_names(case.config) if name.startswith("layers.") and name.split(".", 2)[2] == tap]
    _, values = fnmodels.forward(params, *clean, config=case.config, kernel="math", taps=tuple(names))
    more: dict[str, Any] = {"tap": tap, "edits": edits, "read": read, "chunk": (None, 4)[index % 2]}
    grid = research.patch_grid(params, clean, corrupt, sums, config=case.config, **more)
    for number, (row, name) in enumerate(zip(grid, names, strict=True)):
        for position in range((index + number) % 2, len(row), 2):
            found = row[position]
            put = functools.partial(_put_one, there=values[name], position=position)
            wanted = sums(full(edits=edits | {name: put}))
            assert off(found, wanted) < 1e-12 * max(1.0, float(wanted.abs())), (name, position)


def test_which_runs_begin_at_the_patched_position() -> None:
    """Those of causal attention; not of recurrent layers, of masks with a key behind its query, nor of other edits."""

    def continued(config: Any, prepared: Any, **edits: Any) -> bool:
        how: dict[str, Any] = {"config": config, "edits": edits, "read": [5]}
        return bool(given_run(generic_params(config), prepared, [0], **how).entries)

    by_name = {case.name: case.config for case in cases()}
    for name in ("llama", "gpt2", "mixtral", "deepseek_v3", "gemma3_text", "gpt_oss", "llama4_text"):
        assert continued(by_name[name], batch_of(by_name[name], segments((6,))).prepared()), name
    for name in ("mamba2", "falcon_h1", "lfm2"):
        assert not continued(by_name[name], batch_of(by_name[name], segments((6,))).prepared()), name
    assert continued(LLAMA, CORRUPT, embed=_scaled) and not continued(LLAMA, CORRUPT, hidden=_scaled)

    rule, spans = fnmodels.inputs.Causal() | fnmodels.inputs.SameSpan(), torch.tensor([[0, 1, 1, 1, 0, 0]]).expand(2, 6)
    inputs, masks, tables = CORRUPT
    ids = torch.ones(2, 6, dtype=torch.long)
    seen = {kind: fnmodels.inputs.build_mask(rule, inputs["positions"], ids, spans=spans) for kind in masks}
    prefix = inputs, seen, tables
    assert not continued(LLAMA, prefix)
    _, values = run(*CLEAN, taps=("layers.0.output",))
    put = functools.partial(_put_one, there=values["layers.0.output"], position=3)
    grid = research.patch_grid(PARAMS, CLEAN, prefix, lambda logits: logits[:, 1].sum(), config=LLAMA)
    wanted = run(*prefix, edits={"layers.0.output": put})[:, 1].sum()
    assert off(grid[0, 3], wanted) < 1e-5 and off(grid[0, 3], run(*prefix)[:, 1].sum()) > 1e-4


@pytest.mark.parametrize("read", [(), (2, 1), (1, 1), (6,), (-7,)])
def test_positions_to_read_that_do_not_fit_are_refused(read: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be increasing positions of a row of 6 tokens"):
        research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, read=read)


def test_a_grid_of_a_tap_that_no_layer_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"No layer has the tap 'mpl'\. There are embed"):
        research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, tap="mpl")


def test_chosen_layers_and_positions_are_cells_of_the_grid() -> None:
    grid = research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA)
    chosen: dict[str, Any] = {"layers": (1, 0), "positions": (0, 3, -1)}
    part = research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, **chosen)
    assert part.shape == (2, 3) and off(part, grid[[1, 0]][:, [0, 3, 5]]) < 1e-6
    noise = torch.ones(2, 6, LLAMA.hidden_size)
    trace = research.causal_trace(PARAMS, CLEAN, noise, metric, config=LLAMA)
    part = research.causal_trace(PARAMS, CLEAN, noise, metric, config=LLAMA, **chosen)
    assert off(part, trace[[1, 0]][:, [0, 3, 5]]) < 1e-6


class _Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation makes."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.found = max(self.found, *(leaf.untyped_storage().nbytes() for leaf in made), 0)
        return out


@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma4_text_e"])
def test_a_grid_holds_as_many_positions_as_fit_in_memory(name: str) -> None:
    """Runs from a position on, from a layer on, and of all layers."""
    config = short(next(case for case in cases() if case.name == name)).config
    params, rows, bound = generic_params(config), segments((16,)), 1 << 17
    clean, corrupt = (batch_of(config, rows, seed=seed).prepared() for seed in (0, 1))
    how: dict[str, Any] = {"config": config, "layers": (0,), "positions": range(12)}
    grids, largest = [], []
    for memory in (bound, 1 << 30):
        with _Largest() as watch:
            grids.append(research.patch_grid(params, clean, corrupt, metric, memory=memory, **how))
        largest.append(watch.found)
    assert off(*grids) < 1e-5
    assert largest[0] <= bound and largest[1] > 2 * largest[0]


def test_progress_of_a_grid_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    run_grid = functools.partial(research.patch_grid, PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, chunk=4)
    run_grid(progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6 * LAYERS, 6 * LAYERS) and seen == sorted({*seen}) and len(seen) >= 2 * LAYERS
    run_grid(progress=research.progress_bar())
    assert capsys.readouterr().err == f"{6 * LAYERS}/{6 * LAYERS} cells, 0 s left\n"


def test_progress_on_a_terminal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    report = research.progress_bar("rows")
    for done in (15, 30):
        report(done, 30)
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1 and shown.count("\r") == 2
    assert f"\r[{'#' * 15}{'.' * 15}] 15/30 rows, 0 s left" in shown and shown.endswith("0 s left\x1b[K\n")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"layers": (0, 9)}, r"layers=\[0, 9\] must be different layers with the tap 'output', .*; 9 is none\."),
        ({"layers": (0, 0)}, r"layers=\[0, 0\] must be different layers"),
        ({"layers": ()}, r"layers=\[\] must be different layers"),
        ({"positions": (3, 1)}, r"positions=\[3, 1\] must be increasing positions of a row of 6 tokens"),
        ({"positions": (6,)}, r"positions=\[6\] must be increasing positions of a row of 6 tokens"),
    ],
)
def test_layers_and_positions_that_do_not_fit_are_refused(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        research.patch_grid(PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, **given)


def _scaled(value: Tensor, name: str) -> Tensor:
    return 0.9 * value


def _put_one(value: Tensor, name: str, *, there: Tensor, position: int) -> Tensor:
    return torch.cat((value[:, :position], there[:, position : position + 1], value[:, position + 1 :]), 1)


def test_attribution_patching() -> None:
    """The change that a small step toward the clean value makes, divided by the step."""
    names = ("layers.0.attention.z", "layers.1.mlp", "layers.0.output")
    found = research.attribution_patching(PARAMS, CLEAN, CORRUPT, metric, names, config=LLAMA)
    wide = fnmodels.tree.map(Tensor.double, PARAMS)
    _, clean = run(*CLEAN, taps=names)
    for name in names:

        def at(step: float, name: str = name) -> Tensor:
            def toward(value: Tensor, _: str) -> Tensor:
                return value + step * (clean[name].double() - value)

            return metric(fnmodels.forward(wide, *CORRUPT, config=LLAMA, kernel="math", edits={name: toward}))

        assert abs((at(1e-4) - at(-1e-4)) / 2e-4 - found[name].sum()) < 1e-3 * max(1, abs(found[name].sum()))


def test_path_patching() -> None:
    """Head 1 of layer 0 to the queries of layer 1, by hand; and all paths to the logits of the last layer's MLP."""
    taps = ("layers.*.attention.z", "layers.*.mlp", "layers.*.input")
    (_, clean), (_, corrupt) = run(*CLEAN, taps=taps), run(*CORRUPT, taps=taps)
    mask = torch.arange(LLAMA.num_attention_heads)[:, None] == 1
    found = research.path_patching(
        PARAMS,
        CLEAN,
        CORRUPT,
        metric,
        config=LLAMA,
        senders={"layers.0.attention.z": mask},
        receivers=("layers.1.attention.q",),
    )
    z = "layers.0.attention.z"
    weight = PARAMS["layers"][0]["attention"]["o_proj"]
    moved = F.linear(torch.where(mask, corrupt[z] - clean[z], 0).flatten(2), weight)
    _, queries = fnmodels.run_layers(
        PARAMS,
        clean["layers.1.input"] + moved,
        *CLEAN[1:],
        1,
        2,
        config=LLAMA,
        kernel="math",
        taps=("layers.1.attention.q",),
    )
    assert off(found, metric(run(*CLEAN, edits=queries))) < 1e-5 and abs(found - metric(run(*CLEAN))) > 1e-4
    last = f"layers.{LAYERS - 1}.mlp"
    direct = research.path_patching(
        PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, senders={last: None}, receivers=("hidden",)
    )
    assert off(direct, metric(run(*CLEAN, edits={last: corrupt[last]}))) < 1e-5
    with pytest.raises(ValueError, match=r"The receiver 'layers\.1\.mlp' is held"):
        research.path_patching(
            PARAMS, CLEAN, CORRUPT, metric, config=LLAMA, senders={last: None}, receivers=("layers.1.mlp",)
        )


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma4_text_e"])
@pytest.mark.parametrize("sender", ["mlp", "attention", "mlp.neurons"])
def test_a_direct_path_moves_the_last_state_by_what_is_sent(name: str, sender: str) -> None:
    """Gates behind the heads, and inputs of each layer, read the residual stream too, and are held on the way."""
    case = short(next(case for case in cases() if case.name == name))
    config, params = case.config, generic_params(case.config, torch.float64)
    clean, corrupt = (batch_of(config, segments((6,), (6,)), seed=seed).prepared() for seed in (1, 2))
    full = functools.partial(fnmodels.forward, params, config=config, kernel="math")
    tap, added = f"layers.0.{sender}", f"layers.0.{sender.partition('.')[0]}"
    found = research.path_patching(
        params, clean, corrupt, metric, config=config, senders={tap: None}, receivers=("hidden",)
    )
    sent = full(*corrupt, taps=(tap,))[1]
    taps = full(*clean, taps=("hidden", added))[1]
    moved = full(*clean, taps=(added,), edits=sent)[1][added] - taps[added]
    for layer in params["layers"]:
        moved = moved * layer.get("layer_scalar", 1)
    wanted = metric(full(*clean, edits={"hidden": taps["hidden"] + moved}))
    assert off(found, wanted) < 1e-9 * max(1.0, float(wanted.abs())) and off(found, metric(full(*clean))) > 1e-6


def test_steering() -> None:
    name = "layers.0.output"
    padded = batch_of(LLAMA, segments((4, -2), (6,)), seed=3)
    vector = research.mean_difference(PARAMS, padded.prepared(), CORRUPT, name, config=LLAMA)
    rows = [fnmodels.hidden(PARAMS, *b, config=LLAMA, taps=(name,))[1][name] for b in (padded.prepared(), CORRUPT)]
    assert off(vector, rows[0][padded.valid].mean(0) - rows[1].flatten(0, 1).mean(0)) < 1e-6
    where = torch.arange(6).expand(2, 6) > 2
    strengths = torch.tensor([0.0, 1.0, -2.0])
    many = torch.func.vmap(lambda s: run(*CLEAN, edits=research.steered(name, vector, s, where)))(strengths)
    for strength, logits in zip(strengths, many, strict=True):
        added = where[..., None] * strength * vector
        assert off(logits, run(*CLEAN, edits={name: lambda value, _, added=added: value + added})) < 1e-5
    assert off(many[0], run(*CLEAN)) < 1e-5 and off(many[1], many[0]) > 1e-3


def test_heads() -> None:
    _, tapped = run(*CLEAN, taps=("layers.1.attention.z",))
    z = tapped["layers.1.attention.z"].clone()
    z[:, :, [0, 3]] = 0
    assert (
        off(run(*CLEAN, edits=research.ablate_heads({1: (0, 3)})), run(*CLEAN, edits={"layers.1.attention.z": z}))
        < 1e-6
    )
    mean = tapped["layers.1.attention.z"].mean((0, 1))
    z[:, :, [0, 3]] = mean[[0, 3]]
    edits = research.ablate_heads({1: (0, 3)}, mean={1: mean})
    assert off(run(*CLEAN, edits=edits), run(*CLEAN, edits={"layers.1.attention.z": z})) < 1e-6


def test_induction_scores() -> None:
    """By a loop; and 1 where a pattern put there is that of a perfect head."""
    scores = research.induction_scores(PARAMS, config=LLAMA, length=5, batch=2, seed=4)
    half = torch.randint(LLAMA.vocab_size, (2, 5), generator=torch.Generator().manual_seed(4))
    tokens = torch.cat((half, half), 1)
    _, tapped = run(*fnmodels.prepare(LLAMA, tokens), taps=("layers.*.attention.pattern",))
    assert scores.keys() == tapped.keys()
    for name, pattern in tapped.items():
        wanted = torch.zeros(LLAMA.num_attention_heads)
        for query in range(5, 10):
            key = next(k for k in range(1, 10) if tokens[0, k - 1] == tokens[0, query] and k - 1 == query - 5)
            wanted += pattern[:, :, query, key].mean(0) / 5
        assert off(scores[name], wanted) < 1e-6


def test_sparse_autoencoders(tmp_path: Path) -> None:
    """Harvested rows are those of a loop; training recovers sparse directions; a splice changes what it says."""
    name, packed = "layers.0.mlp", [batch_of(LLAMA, segments((4, 2), (-1, 5)), seed=s).prepared() for s in range(3)]
    rows = research.harvest(PARAMS, packed, tmp_path / "rows", name, config=LLAMA, rows=30)
    wanted = [fnmodels.hidden(PARAMS, *p, config=LLAMA, taps=(name,))[1][name][p[0]["valid"]] for p in packed]
    assert torch.equal(rows, torch.cat(wanted)[:30])
    again = torch.from_file(str(tmp_path / "rows"), size=rows.numel()).view_as(rows)
    assert torch.equal(again, rows)
    with pytest.raises(ValueError, match="The batches have 33 tokens that are no padding, and rows is 40"):
        research.harvest(PARAMS, packed, tmp_path / "more", name, config=LLAMA, rows=40)
    assert not (tmp_path / "more").exists()
    for wrong in (packed[0], [fnmodels.pack([torch.arange(5)], 8)]):
        with pytest.raises(TypeError, match="batches are a list of what"):
            research.harvest(PARAMS, wrong, tmp_path / "other", name, config=LLAMA, rows=40)
    with pytest.raises(ValueError, match="The activations have 3 numbers; the autoencoder was made for 5"):
        research.encode(research.init_sae(5, 7), torch.zeros(2, 3))
    with pytest.raises(FileExistsError, match="harvest writes a new file"):
        research.harvest(PARAMS, packed, tmp_path / "rows", name, config=LLAMA, rows=40)
    assert torch.equal(torch.from_file(str(tmp_path / "rows"), size=rows.numel()).view_as(rows), rows)

    generator = torch.Generator().manual_seed(0)
    true = F.normalize(torch.randn(16, 8, generator=generator), dim=0)
    active = torch.rand(4096, 8, generator=generator) * (torch.rand(4096, 8, generator=generator) < 0.1)
    sae = research.init_sae(16, 24, seed=1)
    trained, losses = research.train_sae(sae, active @ true.T, steps=600, batch=128, rate=3e-3, sparsity=0.1)
    assert losses[-1] < 0.3 * losses[0] and torch.equal(sae["bias"], torch.zeros(16))
    assert (F.normalize(trained["decoder"], dim=0).T @ true).amax(0).min() > 0.95
    assert off(trained["decoder"].norm(dim=0), torch.ones(24)) < 1e-5

    own = research.init_sae(LLAMA.hidden_size, 40)
    plain = run(*CLEAN)
    assert off(run(*CLEAN, edits=research.splice(own, name, error=True)), plain) < 1e-5
    _, tapped = run(*CLEAN, taps=(name,))
    features = research.encode(own, tapped[name])
    for keep in (None, torch.ones(40).index_fill(0, features.sum((0, 1)).argmax(), 0.0)):
        kept = features if keep is None else features * keep
        spliced = run(*CLEAN, edits=research.splice(own, name, keep=keep))
        assert off(spliced, run(*CLEAN, edits={name: research.decode(own, kept)})) < 1e-5
        assert off(spliced, plain) > 1e-3


def test_probes() -> None:
    """At the optimum the gradient, written out, is zero; and it finds what is linear in activations."""
    _, tapped = run(*batch_of(LLAMA, segments((16,), (16,), (16,), (16,))).prepared(), taps=("layers.0.output",))
    x = tapped["layers.0.output"].flatten(0, 1)
    labels = (x[:, :3]).argmax(1)
    probe: dict[str, Any] = research.fit_probe(x, labels, classes=3, decay=1e-2, steps=500)
    logits = research.probe_logits(probe, x)
    wrong = (F.softmax(logits, -1) - F.one_hot(labels, 3)) / len(x)
    assert (wrong.T @ x + 1e-2 * probe["weight"]).abs().max() < 1e-4 and wrong.sum(0).abs().max() < 1e-4
    assert (logits.argmax(-1) == labels).float().mean() > 0.9
