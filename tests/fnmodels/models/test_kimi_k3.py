"""Kimi K3, which transformers lacks: a written-out model in loops, planted bugs, what layers leave, files, refusals."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import kimi_k3, kimi_linear, tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common import storage
from fnmodels.ops.norm import rms_norm
from fnmodels.ops.streams.depth import mix_depth
from tests.support.cases import batch_of, generic_params, positions_of, segments
from tests.support.status import Shows
from tests.variants.kimi_k3 import DELTA, FILES, GROUPS, TEXT, TINY

ROWS = segments((-2, 7, 4), (6, 6, -1))
DOCUMENTS = ((0, 1), (0, 2), (1, 1), (1, 2))
TOKENS = torch.randint(3, 61, ROWS.shape, generator=torch.Generator().manual_seed(0))
EPS = TEXT["rms_norm_eps"]
State = dict[str, Tensor]


def norm(x: Tensor, weight: Tensor, eps: float = EPS) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def project(x: Tensor, state: State, name: str) -> Tensor:
    return x @ state[f"{name}.weight"].T


def mlp(x: Tensor, state: State, names: tuple[str, str, str], text: Any) -> Tensor:
    """down(beta tanh(gate / beta) sigmoid(gate) beta' tanh(up / beta'))."""
    beta, other = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    gate, up = project(x, state, names[0]), project(x, state, names[1])
    inner = beta * (gate / beta).tanh() * gate.sigmoid() * other * (up / other).tanh()
    return project(inner, state, names[2])


def read(states: list[Tensor], state: State, name: str) -> Tensor:
    """What each token [S, D] reads of its states: token by token, the states themselves by scores of their norms."""
    query, rows = state[f"{name}_proj.weight"][0] * state[f"{name}_norm.weight"], []
    for t in range(len(states[0])):
        scores = torch.stack([query @ norm(one[t], torch.ones(())) for one in states]).softmax(0)
        rows.append(sum(score * one[t] for score, one in zip(scores, states, strict=True)))
    return torch.stack(rows)


def delta_attention(x: Tensor, state: State, at: str, text: Any) -> Tensor:
    """Token by token and head by head."""
    own = text["linear_attn_config"]
    heads, d, taps, bound = (
        own[name] for name in ("num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound")
    )
    convolved = {}
    for name in "qkv":
        p, weight = project(x, state, f"{at}.{name}_proj"), state[f"{at}.{name}_conv1d.weight"][:, 0]
        sums = [sum(weight[:, taps - 1 - j] * p[t - j] for j in range(min(taps, t + 1))) for t in range(len(x))]
        convolved[name] = F.silu(torch.stack(sums)).view(len(x), heads, d)
    f = project(project(x, state, f"{at}.f_a_proj"), state, f"{at}.f_b_proj") + state[f"{at}.dt_bias"]
    gate, beta = project(x, state, f"{at}.g_proj").view(-1, heads, d), project(x, state, f"{at}.b_proj").sigmoid()
    rows = []
    for h in range(heads):
        S, rate, outputs = torch.zeros(d, d, dtype=x.dtype), state[f"{at}.A_log"][h].exp(), []
        for t in range(len(x)):
            q, k, v = (convolved[name][t, h] for name in "qkv")
            q, k = (one / (one.square().sum() + 1e-6).sqrt() for one in (q, k))
            S = (bound * (rate * f[t].view(heads, d)[h]).sigmoid()).exp()[:, None] * S
            S = S + beta[t, h] * k[:, None] * (v - k @ S)
            outputs.append(norm(d**-0.5 * q @ S, state[f"{at}.o_norm.weight"]) * gate[t, h].sigmoid())
        rows.append(torch.stack(outputs))
    return project(torch.stack(rows, 1).flatten(1), state, f"{at}.o_proj")


def latent_attention(x: Tensor, state: State, at: str, text: Any) -> Tensor:
    heads, nope, rank = text["num_attention_heads"], text["qk_nope_head_dim"], text["kv_lora_rank"]
    if text["q_lora_rank"]:
        q = project(
            norm(project(x, state, f"{at}.q_a_proj"), state[f"{at}.q_a_layernorm.weight"], 1e-6),
            state,
            f"{at}.q_b_proj",
        )
    else:
        q = project(x, state, f"{at}.q_proj")
    joint, gate = project(x, state, f"{at}.kv_a_proj_with_mqa"), project(x, state, f"{at}.g_proj")
    kv = project(norm(joint[:, :rank], state[f"{at}.kv_a_layernorm.weight"], 1e-6), state, f"{at}.kv_b_proj")
    q, kv, gate = (t.view(len(x), heads, -1) for t in (q, kv, gate))
    rows = []
    for h in range(heads):
        keys, values = torch.cat((kv[:, h, :nope], joint[:, rank:]), -1), kv[:, h, nope:]
        outputs = []
        for t in range(len(x)):
            weights = (keys[: t + 1] @ q[t, h] * q.shape[-1] ** -0.5).softmax(0)
            outputs.append(weights @ values[: t + 1] * gate[t, h].sigmoid())
        rows.append(torch.stack(outputs))
    return project(torch.stack(rows, 1).flatten(1), state, f"{at}.o_proj")


def mixture(x: Tensor, state: State, at: str, text: Any) -> Tensor:
    """Token by token; a group's score is the sum of its two best experts'."""
    groups, rows = text.get("num_expert_group", 1), []
    for token in x:
        share = project(token, state, f"{at}.gate").sigmoid()
        biased = (share + state[f"{at}.gate.e_score_correction_bias"]).view(groups, -1)
        best = biased.topk(min(2, biased.shape[1])).values.sum(-1).topk(text.get("topk_group", 1)).indices
        chosen = torch.full_like(biased, -torch.inf).index_copy(0, best, biased[best])
        experts = chosen.flatten().topk(text["num_experts_per_token"]).indices
        weights = share[experts]
        weights = weights / weights.sum() if text.get("moe_renormalize", True) else weights
        narrow, total = project(token, state, f"{at}.routed_expert_down_proj"), torch.zeros(())
        for weight, expert in zip(weights * text["routed_scaling_factor"], experts.tolist(), strict=True):
            names = tuple(f"{at}.experts.{expert}.{name}" for name in ("w1", "w3", "w2"))
            total = total + weight * mlp(narrow, state, names, text)
        rows.append(
            project(norm(total, state[f"{at}.routed_expert_norm.weight"]), state, f"{at}.routed_expert_up_proj")
        )
    names = tuple(f"{at}.shared_experts.{name}_proj" for name in ("gate", "up", "down"))
    return torch.stack(rows) + mlp(x, state, names, text)


def reference(tokens: Tensor, state: State, text: Any) -> Tensor:
    """Logits [S, V] of one document, from the tensors of its file."""
    x, begun = state["model.embed_tokens.weight"][tokens], list[Tensor]()
    for i in range(text["num_hidden_layers"]):
        at = f"model.layers.{i}"
        value = read([*begun, x], state, f"{at}.self_attention_res") if begun else x
        normed = norm(value, state[f"{at}.input_layernorm.weight"])
        attend = delta_attention if i + 1 in text["linear_attn_config"]["kda_layers"] else latent_attention
        added = attend(normed, state, f"{at}.self_attn", text)
        if i % text["attn_res_block_size"] == 0:
            begun.append(x)
            x = added
        else:
            x = x + added
        normed = norm(read([*begun, x], state, f"{at}.mlp_res"), state[f"{at}.post_attention_layernorm.weight"])
        dense = tuple(f"{at}.mlp.{name}_proj" for name in ("gate", "up", "down"))
        routed = i >= text["first_k_dense_replace"]
        x = x + (mixture(normed, state, f"{at}.block_sparse_moe", text) if routed else mlp(normed, state, dense, text))
    x = norm(read([*begun, x], state, "model.output_attn_res"), state["model.norm.weight"])
    return project(x, state, "lm_head")


def made(text: Any, folder: Path) -> Any:
    """Parameters in fp64, which require gradients, as a file in the folder has them."""
    config = kimi_k3.Config.from_hf(TINY | {"text_config": text})
    P.save_pretrained(folder, config, generic_params(config))
    again, loaded = P.load_pretrained(folder)
    assert again == config
    return tree.map(lambda leaf: leaf.double().requires_grad_(), loaded)


def state_of(folder: Path) -> State:
    """The tensors of the file, whose names all begin alike."""
    found = load_file(folder / "model.safetensors")
    assert all(name.startswith("language_model.") for name in found)
    return {name.removeprefix("language_model."): t.double().requires_grad_() for name, t in found.items()}


@pytest.mark.parametrize("text", [TEXT, GROUPS], ids=["usual", "groups"])
def test_logits_and_gradients_are_those_of_a_written_out_model(text: Any, tmp_path: Path, shows: Shows) -> None:
    """Each document alone, with gradients of every parameter that has one."""
    shows("kimi_k3", "loops")
    config, params = kimi_k3.Config.from_hf(TINY | {"text_config": text}), made(text, tmp_path)
    prepared = fnmodels.prepare(config, TOKENS, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config)
    state, total = state_of(tmp_path), torch.zeros((), dtype=torch.float64)
    for row, segment in DOCUMENTS:
        own = ROWS[row] == segment
        theirs = reference(TOKENS[row, own], state, text)
        torch.testing.assert_close(got[row, own], theirs, rtol=1e-9, atol=1e-9)
        total = total + theirs.square().sum()
    got[ROWS > 0].square().sum().backward()
    total.backward()
    without = set[str]()
    for path, stored in kimi_k3.hf_names(config).items():
        leaf, names = (
            tree.flatten(params)[path],
            [n.removeprefix("language_model.") for n in storage.disk_names(stored)],
        )
        grads = {f"language_model.{n}": grad for n in names if (grad := state[n].grad) is not None}
        if not grads:
            without.add(path)
            assert leaf.grad is None or not bool(leaf.grad.any()), path
            continue
        for n in names:  # an expert without a token
            grads.setdefault(f"language_model.{n}", torch.zeros_like(state[n]))
        wanted = storage.extract_parameter(stored, grads)
        assert leaf.grad is not None
        assert (leaf.grad - wanted).abs().max() <= 1e-8 * max(1.0, float(wanted.abs().max())), path
    fixed = {path for path in kimi_k3.hf_names(config) if path.endswith("selection_bias")}
    assert without == fixed | {f"layers.0.attention_read.{name}" for name in ("proj", "norm")}


def normed_values(query: Tensor, blocks: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """The norms of the states are mixed, as in Inkling 2."""
    return mix_depth(query, rms_norm(blocks, None, eps=eps), rms_norm(x, None, eps=eps), eps=eps)


def without_the_first(query: Tensor, blocks: Tensor, x: Tensor, *, eps: float) -> Tensor:
    return mix_depth(query, blocks[..., 1:, :], x, eps=eps)


def off_by_one(config: Any) -> tuple[str, ...]:
    """Blocks are a layer longer."""
    return KINDS(dataclasses.replace(config, layers_per_block=config.layers_per_block + 1))


KINDS = kimi_k3.kinds
BUGS: dict[str, tuple[str, Any]] = {
    "normed values": ("mix_depth", normed_values),
    "a state is missing": ("mix_depth", without_the_first),
    "the border of a block is off by one": ("kinds", off_by_one),
    "values are not capped": ("softcapped_swiglu", lambda gate, up, **_: F.silu(gate) * up),
    "heads have no gate": ("split_heads", lambda x, size: x.unflatten(-1, (-1, size)) * 0),
}


def logits(params: Any) -> Tensor:
    """Those of the first document of the second row, which is packed."""
    config = kimi_k3.Config.from_hf(TINY)
    prepared = fnmodels.prepare(config, TOKENS, positions=positions_of(ROWS), segment_ids=ROWS)
    found: Any = fnmodels.forward(params, *prepared, config=config)
    return found[1, ROWS[1] == 1]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Tensor]:
    """Parameters, and the logits of the written-out model."""
    folder = tmp_path_factory.mktemp("right")
    params = made(TEXT, folder)
    with torch.no_grad():
        return params, reference(TOKENS[1, ROWS[1] == 1], state_of(folder), TEXT)


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, right: tuple[Any, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    params, wanted = right
    with torch.no_grad():
        torch.testing.assert_close(logits(params), wanted, rtol=1e-9, atol=1e-9)
        name, wrong = BUGS[bug]
        monkeypatch.setattr(kimi_k3, name, wrong)
        assert float((logits(params) - wanted).abs().max()) > 1e-2


def test_a_layer_adds_to_the_state_of_its_block() -> None:
    config = kimi_k3.Config.from_hf(TINY)
    batch, names = batch_of(config, ROWS), ("input", "attention", "middle", "mlp", "output")
    _, found = batch.forward(generic_params(config), kernel="math", taps=tuple(f"layers.*.{name}" for name in names))
    for index, kind in enumerate(kimi_k3.kinds(config)):
        tap = {name: found[f"layers.{index}.{name}"][batch.valid] for name in names}
        torch.testing.assert_close(tap["middle"], (0 if "begins" in kind else tap["input"]) + tap["attention"])
        if "folds" not in kind:
            torch.testing.assert_close(tap["output"], tap["middle"] + tap["mlp"])


def test_kinds_and_what_layers_leave() -> None:
    config = kimi_k3.Config.from_hf(FILES["kimi-k3"])
    begins = [i for i, kind in enumerate(kimi_k3.kinds(config)) if "begins" in kind]
    assert begins == [*range(0, 93, 12)]
    assert [i for i, kind in enumerate(config.layer_kinds) if kind == "full_moe"] == [*range(3, 93, 4), 92]
    tiny = kimi_k3.Config.from_hf(TINY)
    assert [kimi_k3.left_shape(tiny, index) for index in range(1, 5)] == [(1, 32), (1, 32), (2, 32), (2, 32)]


CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_experts_in_mxfp4_are_read(tmp_path: Path) -> None:
    """As published: bytes of two codes and a power of two for 32 of them, declared within `text_config`."""
    text = TEXT | {"routed_expert_hidden_size": 32, "moe_intermediate_size": 64}
    config = kimi_k3.Config.from_hf(TINY | {"text_config": text})
    P.save_pretrained(tmp_path, config, generic_params(config))
    state, draw = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(3)
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["quantization_config"] = FILES["kimi-k3"]["text_config"]["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    wanted = {}
    for name in [name for name in state if ".experts." in name]:
        rows, columns = state.pop(name).shape
        codes = torch.randint(16, (rows, columns), generator=draw)
        scales = torch.randint(122, 130, (rows, columns // 32), generator=draw)
        state[f"{name}_packed"] = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        state[f"{name}_scale"] = scales.to(torch.uint8)
        table = torch.tensor(CODES + tuple(-code for code in CODES))
        wanted[name] = table[codes] * 2.0 ** (scales - 127).repeat_interleave(32, 1)
    save_file(state, tmp_path / "model.safetensors")
    _, params = P.load_pretrained(tmp_path)
    for path, stored in kimi_k3.hf_names(config).items():
        if ".experts." in path:
            leaf = tree.flatten(params)[path].float()
            assert torch.equal(leaf, torch.stack([wanted[name] for name in storage.disk_names(stored)]))


def test_a_tower_is_refused_or_left_out(tmp_path: Path) -> None:
    config = kimi_k3.Config.from_hf(TINY)
    P.save_pretrained(tmp_path, config, generic_params(config))
    state = load_file(tmp_path / "model.safetensors")
    for name in ("vision_tower.patch_embed.proj.weight", "mm_projector.post_norm.weight"):
        state[name] = torch.zeros(3)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="vision"):
        P.load_pretrained(tmp_path)
    for how in ({"part": "text"}, {"drop": ("vision",)}):
        again, params = P.load_pretrained(tmp_path, **how)
        assert again == config and tree.flatten(params).keys() == tree.flatten(generic_params(config)).keys()


def test_heads_of_delta_layers_are_padded_with_zeros(tmp_path: Path) -> None:
    config = kimi_k3.Config.from_hf(TINY)
    P.save_pretrained(tmp_path, config, generic_params(config))
    A_log = load_file(tmp_path / "model.safetensors")["language_model.model.layers.0.self_attn.A_log"]
    assert A_log.shape == (128,) and bool((A_log[:2] != 0).all()) and not bool(A_log[2:].any())


def test_the_fields_of_the_text_may_stand_beside_the_type() -> None:
    assert kimi_k3.Config.from_hf(TEXT | {"model_type": "kimi_k3"}) == kimi_k3.Config.from_hf(TINY)


# The fields of the text that Kimi Linear, whose name `text_config` has, does not know.
NEW = ("mla_use_output_gate", "routed_expert_hidden_size", "latent_moe_use_norm", "attn_res_block_size")
NEW += ("activation_situ_beta", "activation_situ_linear_beta")
NEW_OF_DELTA = ("gate_lower_bound", "use_full_rank_gate")
PLAIN = {name: value for name, value in TEXT.items() if name not in (*NEW, "hidden_act")}
PLAIN["linear_attn_config"] = {name: value for name, value in DELTA.items() if name not in NEW_OF_DELTA}


@pytest.mark.parametrize("name", [*NEW, *NEW_OF_DELTA, "hidden_act"])
def test_a_bare_text_is_not_read_as_kimi_linear(name: str) -> None:
    """Each field alone is refused by its name, and without them all the file is one of Kimi Linear."""
    assert kimi_linear.Config.from_hf(PLAIN).model_type == "kimi_linear"
    delta = PLAIN["linear_attn_config"] | {name: DELTA.get(name)}
    changes = {"linear_attn_config": delta} if name in NEW_OF_DELTA else {name: TEXT[name]}
    with pytest.raises((ConfigError, UnsupportedError), match=name):
        kimi_linear.Config.from_hf(PLAIN | changes)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_act": "silu"}, "'hidden_act' is"),
        ({"mla_use_output_gate": False}, "'mla_use_output_gate' is"),
        ({"latent_moe_use_norm": False}, "'latent_moe_use_norm' is"),
        ({"mla_use_nope": False}, "'mla_use_nope' is"),
        ({"tie_word_embeddings": True}, "'tie_word_embeddings' is"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func' is"),
        ({"num_nextn_predict_layers": 1}, "'num_nextn_predict_layers' is"),
        ({"attn_res_block_size": None}, "'attn_res_block_size'"),
        ({"activation_situ_linear_beta": None}, "'activation_situ_linear_beta'"),
        ({"linear_attn_config": DELTA | {"use_full_rank_gate": False}}, "'use_full_rank_gate' is"),
        ({"linear_attn_config": DELTA | {"gate_lower_bound": None}}, "'linear_lower_bound'"),
        ({"linear_attn_config": DELTA | {"kda_layers": [1, 2, 3, 4]}}, "each layer's number"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        kimi_k3.Config.from_hf(TINY | {"text_config": TEXT | changes})
