"""DeepSeek V4.1, which transformers lacks: a written-out model in loops, planted bugs, caches, files, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import deepseek_v41, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.inputs.windows import Windows, build_windows
from fnmodels.models.common import storage
from fnmodels.models.common.deepseek_v41 import drawn, ngrams, windows
from fnmodels.ops.indexers import shared_windows
from fnmodels.ops.indexers.shared_windows import SharedKeys
from fnmodels.ops.streams import hyper
from fnmodels.stack.loop import LayerSideInputs
from tests.support.cases import batch_of, generic_params, positions_of, segments
from tests.support.status import Shows
from tests.variants.deepseek_v41 import FILES, PLAIN, TEXT, TINY

ROWS = segments((-2, 9, 4), (1, 13, -1))
DOCUMENTS = ((0, 1), (0, 2), (1, 1), (1, 2))
TOKENS = torch.randint(3, 61, ROWS.shape, generator=torch.Generator().manual_seed(0))
EPS = TEXT["rms_norm_eps"]
State = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(x: Tensor, position: int, theta: float, *, back: bool = False) -> Tensor:
    """The last 6 dimensions of x [.., H], pair by pair."""
    rotary, parts = TEXT["qk_rope_head_dim"], [x[..., : -TEXT["qk_rope_head_dim"]]]
    tail = x[..., -rotary:]
    for i in range(rotary // 2):
        angle = torch.tensor(position * theta ** (-2 * i / rotary)).float().double() * (-1 if back else 1)
        a, b = tail[..., 2 * i], tail[..., 2 * i + 1]
        parts.append(torch.stack((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1))
    return torch.cat(parts, -1)


def swiglu(x: Tensor, state: State, at: str, limit: float) -> Tensor:
    gate, up = (x @ state[f"{at}.{name}.weight"].T for name in ("w1", "w3"))
    return (F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)) @ state[f"{at}.w2.weight"].T


def mixture(x: Tensor, state: State, at: str, text: Any) -> Tensor:
    scores = F.softplus(x @ state[f"{at}.gate.weight"].T).sqrt()
    chosen = (scores + state[f"{at}.gate.bias"]).topk(text["num_experts_per_tok"]).indices
    weights = scores[chosen] / scores[chosen].sum() * text["routed_scaling_factor"]
    y = swiglu(x, state, f"{at}.shared_experts", text["swiglu_limit"])
    for weight, expert in zip(weights, chosen.tolist(), strict=True):
        y = y + weight * swiglu(x, state, f"{at}.experts.{expert}", text["swiglu_limit"])
    return y


def maps(streams: Tensor, state: State, at: str, text: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post, comb) of one token's streams [n, D]."""
    n, (scale, base) = text["hc_mult"], (state[f"{at}_{name}"] for name in ("scale", "base"))
    raw = state[f"{at}_fn"] @ norm(streams.flatten())
    pre = (raw[:n] * scale[0] + base[:n]).sigmoid() + text["hc_eps"]
    post = 2 * (raw[n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    comb = (raw[2 * n :] * scale[2] + base[2 * n :]).view(n, n).softmax(-1) + text["hc_eps"]
    for i in range(text["hc_sinkhorn_iters"]):
        comb = comb / (comb.sum(1, keepdim=True) + text["hc_eps"]) if i else comb
        comb = comb / (comb.sum(0, keepdim=True) + text["hc_eps"])
    return pre, post, comb


def memory(tokens: list[int], t: int, state: State, at: str, table: int, text: Any) -> Tensor:
    """The rows of the n-grams that end at token t, side by side."""
    ids = [int(state[f"{at}.token_map"][token, 0]) for token in tokens]
    padding = int(state[f"{at}.token_map"][text["engram_pad_token_id"], 0])
    heads, size, layer = text["engram_n_heads"], text["engram_max_ngram_size"], text["engram_layer_ids"][table]
    multipliers = ngrams._multipliers(layer, size, text["engram_compressed_vocab_size"])
    primes = [p for p in range(20, 60) if all(p % d for d in range(2, p))][table * heads * (size - 1) :]
    mixed, start, rows = ids[t] * multipliers[0], 0, []
    for order in range(1, size):
        mixed ^= (ids[t - order] if t >= order else padding) * multipliers[order]
        for _ in range(heads):
            prime = primes.pop(0)
            rows.append(state[f"{at}.embed.weight"][start + mixed % prime])
            start += prime
    return torch.cat(rows)


def with_memory(x: Tensor, e: Tensor, state: State, at: str) -> Tensor:
    """The streams [n, D] of one token."""
    n, D = x.shape
    *keys, value = (state[f"{at}.wkv.weight"] @ e).view(n + 1, D)
    rows = []
    for j in range(n):
        g = (norm(keys[j]) * norm(x[j]) * state[f"{at}.k_weight"][j] * state[f"{at}.q_weight"][j]).sum() / D**0.5
        rows.append(x[j] + (g.sign() * g.abs().clamp(min=1e-6).sqrt()).sigmoid() * value)
    return torch.stack(rows)


class Shared:
    """What layers of one document have left: keys and index keys of windows, choices and candidates of each token."""

    keys: list[Tensor]
    index: list[Tensor]
    choices: list[list[int]]
    candidates: list[set[int]] | None = None


def choose(x: Tensor, latent: Tensor, state: State, at: str, shared: Shared, layer: int, text: Any) -> None:
    ratio, heads, width = text["compress_ratios"][layer], text["index_n_heads"], text["index_head_dim"]
    shared.choices, found = [], []
    for t in range(len(x)):
        q = turned((state[f"{at}.wq_b.weight"] @ latent[t]).view(heads, width), t, text["compress_rope_theta"])
        share = state[f"{at}.weights_proj.weight"] @ x[t]
        scores = {c: float(share @ F.relu(q @ shared.index[c])) for c in range((t + 1) // ratio)}
        among = [c for c in scores if shared.candidates is None or c in shared.candidates[t]]
        shared.choices.append(sorted(among, key=lambda c, s=scores: -s[c])[: text["index_topk"]])
        size, count = text.get("candidate_block_size", 8), text.get("candidate_topk_blocks", 2048)
        best = {b: max(scores[c] for c in scores if c // size == b) for b in {c // size for c in scores}}
        best |= {max(best): float("inf")} if best else {}
        kept = sorted(best, key=lambda b, s=best: -s[b])[:count]
        found.append({c for c in scores if c // size in kept})
    if layer == text.get("candidate_source_layer_id", -1):
        shared.candidates = found


def attention(x: Tensor, state: State, layer: int, shared: Shared, text: Any) -> Tensor:
    at, ratio, heads = f"layers.{layer}.attn", text["compress_ratios"][layer], text["num_attention_heads"]
    theta, scale = text["compress_rope_theta"] if ratio else text["rope_theta"], text["head_dim"] ** -0.5
    latent = norm(x @ state[f"{at}.wq_a.weight"].T, state[f"{at}.q_norm.weight"])
    kv = norm(x @ state[f"{at}.wkv.weight"].T, state[f"{at}.kv_norm.weight"])
    if layer in text["kv_source_layer_ids"]:
        shared.keys, shared.index = [], []
        for c in range(len(x) // ratio):
            tokens = x[c * ratio : (c + 1) * ratio]
            numbers = tokens @ state[f"{at}.compressor.wkv.weight"].T
            if ratio > 1:
                numbers = numbers * (tokens @ state[f"{at}.compressor.wgate.weight"].T).softmax(0)
            key = norm(numbers.sum(0), state[f"{at}.compressor.norm.weight"])
            index = norm(state[f"{at}.indexer.wk.weight"] @ key.detach(), state[f"{at}.indexer.k_norm.weight"])
            shared.keys.append(turned(key, c * ratio, theta))
            shared.index.append(turned(index, c * ratio, theta))
    if layer in text["index_source_layer_ids"]:
        choose(x, latent, state, f"{at}.indexer", shared, layer, text)
    rows = []
    for t in range(len(x)):
        first = max(0, t + 1 - text["sliding_window"])
        near = [turned(kv[s], s, theta) for s in range(first, t + 1)]
        read = torch.stack(near + ([shared.keys[c] for c in shared.choices[t]] if ratio else []))
        q = turned((state[f"{at}.wq_b.weight"] @ latent[t]).view(heads, -1), t, theta)
        scores = torch.cat((q @ read.T * scale, state[f"{at}.attn_sink"][:, None]), 1).softmax(-1)[:, :-1]
        z = turned(scores @ read, t, theta, back=True).flatten().view(text["o_groups"], -1)
        inner = [w @ part for w, part in zip(state[f"{at}.wo_a.weight"].chunk(len(z)), z, strict=True)]
        rows.append(state[f"{at}.wo_b.weight"] @ torch.cat(inner))
    return torch.stack(rows)


def reference(tokens: Tensor, state: State, text: Any) -> Tensor:
    """Logits [S, V] of one document, from the tensors of its file."""
    n, shared, tables = text["hc_mult"], Shared(), text.get("engram_layer_ids", [])
    x = [state["embed.weight"][token].expand(n, -1) for token in tokens.tolist()]
    pre = [torch.eye(n, dtype=torch.float64)[0] for _ in x]
    for layer in range(text["num_hidden_layers"]):
        at = f"layers.{layer}"
        if layer in tables:
            where = f"{at}.engram", tables.index(layer), text
            embedded = [memory(tokens.tolist(), t, state, where[0], *where[1:]) for t in range(len(x))]
            x = [with_memory(one, e, state, where[0]) for one, e in zip(x, embedded, strict=True)]
        for name in ("attn", "ffn"):
            given = [maps(one, state, f"{at}.hc_{name}", text) for one in x]
            read = torch.stack([p @ one for p, one in zip(pre, x, strict=True)])
            read = norm(read, state[f"{at}.{name}_norm.weight"])
            if name == "attn":
                y = attention(read, state, layer, shared, text)
            else:
                y = torch.stack([mixture(one, state, f"{at}.ffn", text) for one in read])
            x = [post[:, None] * own + comb.T @ one for (_, post, comb), own, one in zip(given, y, x, strict=True)]
            pre = [one[0] for one in given]
    folded = torch.stack([p @ one for p, one in zip(pre, x, strict=True)])
    return norm(folded, state["norm.weight"]) @ state["head.weight"].T


def made(text: Any, folder: Path) -> Any:
    """Parameters in fp64, which require gradients, as a file in the folder has them."""
    config = deepseek_v41.Config.from_hf(text)
    P.save_pretrained(folder, config, generic_params(config))
    again, loaded = P.load_pretrained(folder)
    assert again == config
    return tree.map(lambda leaf: leaf.double().requires_grad_(), loaded)


def state_of(folder: Path) -> State:
    return {n: t.double().requires_grad_() for n, t in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("values", [TINY, PLAIN], ids=["usual", "plain"])
def test_logits_and_gradients_are_those_of_a_written_out_model(values: Any, tmp_path: Path, shows: Shows) -> None:
    """Each document alone, packed and padded rows, with gradients of every parameter that has one."""
    config, params, text = (
        deepseek_v41.Config.from_hf(values),
        made(values, tmp_path),
        values.get("text_config", values),
    )
    shows(config.model_type, "loops")
    prepared = fnmodels.prepare(config, TOKENS, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config)
    state, total = state_of(tmp_path), torch.zeros((), dtype=torch.float64)
    for row, segment in DOCUMENTS:
        own = ROWS[row] == segment
        theirs = reference(TOKENS[row, own], state, text)
        torch.testing.assert_close(got[row, own], theirs, rtol=1e-6, atol=1e-6)
        total = total + theirs.square().sum()
    got[ROWS > 0].square().sum().backward()
    total.backward()
    without = set[str]()
    for path, stored in deepseek_v41.hf_names(config).items():
        leaf, names = tree.flatten(params)[path], storage.disk_names(stored)
        grads = {name: grad for name in names if (grad := state[name].grad) is not None}
        if not grads:
            without.add(path)
            assert leaf.grad is None or not bool(leaf.grad.any()), path
            continue
        for name in names:  # an expert without a token
            grads.setdefault(name, torch.zeros_like(state[name]))
        wanted = storage.extract_parameter(stored, grads)
        assert leaf.grad is not None
        assert (leaf.grad - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max())), path
    assert all(p.endswith(("selection_bias", "token_map")) or ".indexer." in p for p in without)


def logits(params: Any) -> Tensor:
    """Those of the second document of the second row, which is packed."""
    config = deepseek_v41.Config.from_hf(TEXT)
    prepared = fnmodels.prepare(config, TOKENS, positions=positions_of(ROWS), segment_ids=ROWS)
    found: Any = fnmodels.forward(params, *prepared, config=config)
    return found[1, ROWS[1] == 2]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tensor]:
    """Parameters, and the logits of the written-out model."""
    folder = tmp_path_factory.mktemp("right")
    params = made(TEXT, folder)
    with torch.no_grad():
        return params, reference(TOKENS[1, ROWS[1] == 2], state_of(folder), TEXT)


def own_maps(weights: Any, x: Tensor, pre: Tensor, sublayer: Any, how: Any) -> tuple[Tensor, Tensor]:
    """Sublayers read by maps of their own, as in DeepSeek V4."""
    given = hyper.maps(weights, x, how)
    return hyper.connect(x, sublayer(hyper.collapse(x, given.pre)), given), given.pre


def without_candidates(*given: Any, **how: Any) -> SharedKeys:
    return shared_windows.choose_shared(*given, **how | {"blocks": None})


def mixed_documents(ids: Tensor, near: Tensor, *rest: Any) -> Tensor:
    """N-grams read the tokens of the row before each one."""
    before = torch.stack([ids.roll(n + 1, 1) for n in range(near.shape[-1])], -1)
    return ROWS_OF(ids, before, *rest)


def across(positions: Tensor, segment_ids: Tensor, ratio: int) -> Windows:
    row = torch.arange(positions.shape[1]).expand_as(segment_ids)
    return replace(build_windows(row, torch.ones_like(segment_ids), ratio), positions=positions, segments=segment_ids)


def first_choice(self: Any, kind: str, aux: Any) -> None:
    """Layers that share a choice take the first one of the stack."""
    KEEP(self, kind, aux if self.chosen is None else aux | {"chosen": self.chosen})


def unrotated(z: Tensor, table: Any) -> Tensor:
    return z


ROWS_OF, SINKHORN, KEEP = ngrams.engram_rows, hyper.sinkhorn, LayerSideInputs.keep
BUGS: dict[str, tuple[Any, str, Any]] = {
    "maps of a sublayer's own": (hyper, "connect_late", own_maps),
    "a window across documents": (deepseek_v41, "build_windows", across),
    "a choice applied to the wrong layer": (LayerSideInputs, "keep", first_choice),
    "choices among all windows": (windows, "choose_shared", without_candidates),
    "documents mixed in an n-gram": (ngrams, "engram_rows", mixed_documents),
    "Sinkhorn iterations off by one": (hyper, "sinkhorn", lambda comb, n, eps: SINKHORN(comb, n - 1, eps)),
    "heads are not rotated back": (deepseek_v41, "rotated_back", unrotated),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, right: tuple[Any, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    params, wanted = right
    with torch.no_grad():
        torch.testing.assert_close(logits(params), wanted, rtol=1e-6, atol=1e-6)
        where, name, wrong = BUGS[bug]
        monkeypatch.setattr(where, name, wrong)
        assert float((logits(params) - wanted).abs().max()) > 1e-3


def test_choices_are_taps_and_are_replayed() -> None:
    """A choice of another seed's gives other logits; a layer that shares one has none of its own."""
    config = deepseek_v41.Config.from_hf(TEXT)
    params, batch = generic_params(config), batch_of(config, ROWS)
    names = ("layers.1.choices", "layers.2.choices", "layers.4.choices")
    got, found = batch.forward(params, kernel="math", taps=names)
    assert [*found] == [*names] and {t.shape for t in found.values()} == {(*ROWS.shape, config.index_topk)}
    choices = torch.stack([found[name] for name in names], 2)
    inputs, *rest = batch.prepared()

    def replayed(choices: Tensor) -> Any:
        return fnmodels.forward(params, {**inputs, "choices": choices}, *rest, config=config, kernel="math")

    torch.testing.assert_close(replayed(choices), got, rtol=0, atol=0)
    other = replayed(choices.where(choices != 0, -1))
    assert float((other - got)[batch.valid].abs().max()) > 1e-3
    with pytest.raises(ValueError, match=r"layers\.5\.choices|Nothing|no tap"):
        batch.forward(params, taps=("layers.5.choices",))


def test_kinds_of_the_published_layers() -> None:
    config = deepseek_v41.Config.from_hf(FILES["deepseek-v4.1-flash"])
    kinds = config.layer_kinds
    assert kinds[:4] == (
        "sliding_moe",
        "sliding_moe_ngrams",
        "indexed_by2_moe",
        "indexed_shared_by2_reads_moe",
    )
    assert kinds[14] == "indexed_by2_moe_ngrams" and kinds[20] == "indexed_by1_finds_moe"
    assert {kinds[i] for i in (24, 28, 32, 36)} == {"indexed_by1_finds_reads_moe"}
    assert sum(kind == "indexed_shared_by1_finds_reads_moe" for kind in kinds) == 15
    again = deepseek_v41.layer_kinds_to_hf(config)
    assert again["compress_ratios"] == FILES["deepseek-v4.1-flash"]["text_config"]["compress_ratios"][:40]


REFUSED = {
    "another window": ({"compress_ratios": [0, 2, 1, 1, 1, 4]}, "a list of 0, 1 or 2 for each of 6"),
    "keys without a choice": ({"index_source_layer_ids": [1, 4]}, "only layers that choose make keys"),
    "candidates of no keys": ({"candidate_source_layer_id": 4}, "4 finds candidates"),
    "keys behind candidates": (
        {"kv_source_layer_ids": [1, 2, 4], "index_source_layer_ids": [1, 2, 4]},
        "layer 4 makes keys after layer 2, which finds candidates",
    ),
    "no keys": ({"kv_source_layer_ids": [2]}, "no layer before 1 makes keys of windows of 2 tokens"),
    "keys of another window": ({"compress_ratios": [0, 2, 1, 2, 1, 1]}, "no layer before 3 makes keys of windows of 2"),
    "rows": ({"engram_num_embeddings": [120, 185]}, "'engram_num_embeddings' is"),
    "a choice of no windows": ({"index_source_layer_ids": [0, 1, 2, 4]}, "layer 0 chooses windows"),
    "a layer that is none": ({"engram_layer_ids": [1, 6]}, "layers are numbers from 0 to 5"),
    "a temperature": ({"gate_temp": 2.0}, "'gate_temp' is 2.0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    changes, words = REFUSED[name]
    with pytest.raises((ConfigError, UnsupportedError), match=words):
        deepseek_v41.Config.from_hf(TINY | {"text_config": TEXT | changes})


def test_layers_that_read_keys_which_no_layer_made_are_refused() -> None:
    config = deepseek_v41.Config.from_hf(PLAIN)
    kinds = ("sliding_moe", "indexed_by2_moe", "indexed_by1_reads_moe", "sliding_moe")
    with pytest.raises(ConfigError, match="Layer 2 is 'indexed_by1_reads_moe', and the last layer before it"):
        replace(config, layer_kinds=kinds)
    with pytest.raises(ConfigError, match="ngram_size is 0, and 1 of layer_kinds have tables"):
        replace(config, layer_kinds=("sliding_moe_ngrams", *kinds[:2], "sliding_moe"))


def test_a_tower_and_drafting_heads_are_refused_or_left_out(tmp_path: Path) -> None:
    config = deepseek_v41.Config.from_hf(TINY)
    P.save_pretrained(tmp_path, config, generic_params(config))
    state = load_file(tmp_path / "model.safetensors")
    state |= {name: torch.zeros(3) for name in ("mtp.0.main_norm.weight", "layers.0.ffn.gate.bias_vl")}
    save_file(state, tmp_path / "model.safetensors")
    save_file(state | {"vision.norm.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="vision"):
        P.load_pretrained(tmp_path, drop=("mtp",))
    with pytest.raises(UnsupportedError, match="an MTP part, 1 tensors"):
        P.load_pretrained(tmp_path, part="text")
    again, params = P.load_pretrained(tmp_path, drop=("vision", "mtp"))
    assert again == config and tree.flatten(params).keys() == tree.flatten(generic_params(config)).keys()


@pytest.mark.parametrize("kernel", ["invariant", "blocks"])
def test_kernels_without_keys_of_windows_are_refused(kernel: Any) -> None:
    config = deepseek_v41.Config.from_hf(PLAIN)
    with pytest.raises(ValueError, match="keys of windows"):
        batch_of(config, ROWS).forward(generic_params(config), kernel=kernel)


@pytest.mark.parametrize("seed", [0, 1, 10007, 10007 * 14, 2**32 - 1])
@pytest.mark.parametrize("high", [2**33, (2**63 - 1) // 99092 // 2, 2**63 - 1])
def test_multipliers_are_drawn_as_numpy_draws_them(seed: int, high: int) -> None:
    """So many that some products are refused."""
    wanted = np.random.default_rng(seed).integers(0, high, 200, dtype=np.int64)
    assert drawn.integers(seed, high, 200) == wanted.tolist()
