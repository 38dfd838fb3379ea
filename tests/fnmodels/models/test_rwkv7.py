"""RWKV-7, which transformers lacks: each document alone in a written-out model, from a file's tensors."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import rwkv7
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.context import Context
from fnmodels.ops.recurrent.token_shift import token_shift
from fnmodels.ops.recurrent.two_keys import two_key_rule
from tests.support.cases import generic_params, positions_of, segments
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.rwkv7 import TINY

ROWS = segments((-2, 7, 4), (6, 6, -1))
FILES = {
    "usual": TINY,
    "bare": TINY | {"norm_first": False, "norm_bias": False, "tie_word_embeddings": True, "hidden_act": "silu"},
}
EPS = 1e-2
Tensors = dict[str, Tensor]


def part(state: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def norm(x: Tensor, own: Tensors) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], own["weight"], own.get("bias"), EPS)


def mixed(x: Tensor, shares: Tensor) -> Tensor:
    """A share of the token before, in each channel; there is none before the first."""
    before = torch.cat((torch.zeros_like(x[:1]), x[:-1]))
    return x + (before - x) * shares.flatten()


def low_rank(x: Tensor, own: Tensors, inner: Any = lambda t: t) -> Tensor:
    return F.linear(inner(x @ own["lora.0.weight"].T), own["lora.2.weight"], own.get("lora.2.bias"))


def time_mix(x: Tensor, own: Tensors, first: Tensor | None, d: int) -> tuple[Tensor, Tensor]:
    """(the sublayer's output, the values of the first layer): one token after the other."""
    r, k, v = (mixed(x, own[f"x_{n}"]) @ own[f"{n}_proj.weight"].T for n in "rkv")
    decay = torch.exp(
        -(torch.tensor(-0.5).exp()) * low_rank(mixed(x, own["x_w"]), part(own, "w_lora."), torch.tanh).sigmoid()
    )
    rate = low_rank(mixed(x, own["x_a"]), part(own, "a_lora.")).sigmoid()
    gate = low_rank(mixed(x, own["x_g"]), part(own, "g_lora."), torch.sigmoid)
    if first is not None:
        v = v + (first - v) * low_rank(mixed(x, own["x_v"]), part(own, "v_lora.")).sigmoid()
    heads = [t.unflatten(-1, (-1, d)) for t in (r, k * (1 + (rate - 1) * own["k_a"]), v, decay, rate, k * own["k_k"])]
    outputs = []
    for h in range(heads[0].shape[1]):
        state = torch.zeros(d, d)  # [values, keys]
        for r_t, k_t, v_t, w_t, a_t, key in zip(*(t[:, h] for t in heads), strict=True):
            key = key / key.norm()
            state = state * w_t - torch.outer(state @ key, key * a_t) + torch.outer(v_t, k_t)
            outputs.append((state @ r_t, (r_t * k_t * own["r_k"][h]).sum() * v_t))
    read, beside = (torch.stack(t).unflatten(0, (-1, len(x))).transpose(0, 1) for t in zip(*outputs, strict=True))
    read = F.group_norm(read.flatten(1), read.shape[1], own["g_norm.weight"], own["g_norm.bias"], d * EPS)
    return (read + beside.flatten(1)) * gate @ own["o_proj.weight"].T, v if first is None else first


def reference(tokens: Tensor, state: Tensors, d: int, act: Any) -> Tensor:
    """Logits [S, V] of one document, from the tensors of its file."""
    embeddings, model = state["model.embeddings.weight"], part(state, "model.")
    x, first = embeddings[tokens], None
    if "layers.0.pre_norm.weight" in model:
        x = norm(x, part(model, "layers.0.pre_norm."))
    for i in range(3):
        own = part(model, f"layers.{i}.")
        added, first = time_mix(norm(x, part(own, "attn_norm.")), part(own, "attn."), first, d)
        x = x + added
        read = mixed(norm(x, part(own, "ffn_norm.")), own["ffn.x_k"])
        x = x + act(read @ own["ffn.key.weight"].T) @ own["ffn.value.weight"].T
    return norm(x, part(model, "norm.")) @ state.get("lm_head.weight", embeddings).T


def check_logits(name: str, folder: Path) -> Tensors:
    """Logits of packed documents are those of each alone; the tensors of the file."""
    config = rwkv7.Config.from_hf(FILES[name])
    P.save_pretrained(folder, config, generic_params(config))
    state = load_file(folder / "model.safetensors")
    again, params = P.load_pretrained(folder)
    assert again == config
    tokens = torch.randint(61, ROWS.shape, generator=torch.Generator().manual_seed(0))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config)
    act = F.silu if name == "bare" else lambda t: F.relu(t).square()
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = ROWS[row] == segment
        assert_close(got[row, own], reference(tokens[row, own], state, 8, act))
    return state


@pytest.mark.parametrize("name", FILES)
def test_logits_are_those_of_a_written_out_model(name: str, tmp_path: Path, shows: Shows) -> None:
    shows("rwkv7", "loops")
    state = check_logits(name, tmp_path)
    assert state["model.layers.1.attn.x_r"].shape == (1, 1, 32)
    assert "model.layers.0.attn.v_lora.lora.0.weight" not in state


def one_document(function: Any) -> Any:
    """The function of segment ids that say nothing of documents."""

    def wrong(*tensors: Any, **options: Any) -> Any:
        given = [t.clamp(max=1) if isinstance(t, Tensor) and t.dtype == torch.int64 else t for t in tensors]
        ids = {"segment_ids": options["segment_ids"].clamp(max=1), "reads": None} if "segment_ids" in options else {}
        return function(*given, **options | ids)

    return wrong


def without_removal(r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, *rest: Any, **how: Any) -> Any:
    return two_key_rule(r, k, v, g, a, 0 * b, *rest, **how)


def removed_at_the_written_key(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, *rest: Any, **how: Any
) -> Any:
    return two_key_rule(r, k, v, g, a, k * b.norm(dim=-1, keepdim=True), *rest, **how)


def read_after_the_decay(
    r: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor, b: Tensor, *rest: Any, **how: Any
) -> Any:
    return two_key_rule(r, k, v, g, a * g.exp(), b, *rest, **how)


def values_of_the_layer_before(ctx: Any, value: Tensor) -> None:
    ctx.aux["left"] = value * 0.9


BUGS = {
    "the state of one document goes on in the next": ("rwkv7.two_key_rule", one_document(two_key_rule)),
    "the first token is mixed with one of another document": ("rwkv7.token_shift", one_document(token_shift)),
    "nothing is removed": ("rwkv7.two_key_rule", without_removal),
    "it is removed along the key of the value": ("rwkv7.two_key_rule", removed_at_the_written_key),
    "the state decays before it is read": ("rwkv7.two_key_rule", read_after_the_decay),
    "the fastest decay": ("rwkv7._FASTEST", -0.5),
    "what layers leave": ("Context.leave", values_of_the_layer_before),
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, wrong = BUGS[bug]
    owner, _, name = where.partition(".")
    monkeypatch.setattr({"rwkv7": rwkv7, "Context": Context}[owner], name, wrong)
    with pytest.raises(AssertionError):
        check_logits("usual", tmp_path)


def test_the_width_of_heads_says_how_many_there_are() -> None:
    """Published files have another number of heads beside it, which nothing reads."""
    assert rwkv7.Config.from_hf(TINY | {"num_heads": 3}).num_attention_heads == 4
    by_number = rwkv7.Config.from_hf(TINY | {"num_heads": 2, "head_dim": None})
    assert (by_number.num_attention_heads, by_number.head_dim) == (2, 16)
    assert rwkv7.Config.from_hf(TINY | {"intermediate_size": None, "hidden_ratio": 1.4}).intermediate_size == 64


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"attn": {"layers": [1], "num_heads": 4}}, "'attn' is .* only null is supported"),
        ({"value_dim": 64}, "'value_dim' is 64"),
        ({"use_l2warp": True}, "'use_l2warp' is true"),
        ({"head_dim": 12}, "divides hidden_size 32 among 2 heads"),
        ({"hidden_act": "gelu"}, "'hidden_act' is"),
        ({"decay_low_rank_dim": None}, "has no 'decay_low_rank_dim'"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        rwkv7.Config.from_hf(TINY | changes)
