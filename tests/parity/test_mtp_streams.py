"""MTP heads that read residual streams equal a loop around layers of transformers 5.24, which has no such heads.

transformers runs the model, and as a model of one layer the block of each head with its fold, its norm and the output
head, from files that `params.save_pretrained` writes. Between them the loop has what vLLM's
vllm/model_executor/models/deepseek_v4_mtp.py and vllm/models/qwen4_exp/nvidia/mtp.py say: norms of the embedding and of
the streams before the fold, a projection of each, and their sum as each row that the block begins with.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import fnmodels
import params as P
from fnmodels import mtp
from fnmodels.models.common.family import traits_of
from fnmodels.models.common.mtp import blocks
from tests.support.cases import Case, cases, generic_params, off, tokens_of
from tests.support.mtp import mtp_cases, with_heads
from tests.support.oracle import assert_close

LENGTH = 20
FAMILIES = {case.family for case in mtp_cases() if traits_of(fnmodels.family_of(case.config)).mtp_reads == "streams"}
CASES = [case for case in cases() if case.family in FAMILIES and "wrapped" not in case.name]
# A model without a layer like the block of its head, as DeepSeek V4 Pro.
NO_SLIDING = dataclasses.replace(
    next(case.config for case in CASES if case.name == "deepseek_v4"),
    layer_kinds=("compressed_hash_moe", "indexed_moe", "compressed_moe", "indexed_moe"),
)
CASES += [Case("deepseek_v4", "deepseek_v4_no_sliding", None, NO_SLIDING)]
# {family: (what is added to the weight of a norm, whether one norm is over all rows of the streams)}
NORMS = {"deepseek_v4": (0.0, False), "qwen4_exp": (1.0, True)}


def loaded(folder: Path) -> Any:
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **eager).eval()


@contextmanager
def watched(layer: Any, begins: Tensor | None = None) -> Iterator[list[Tensor]]:
    """The results of a layer of transformers, which begins with other streams than the model gives it."""
    found: list[Tensor] = []

    def before(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = args[0] if begins is None else begins.reshape(args[0].shape)
        return (given, *args[1:]), named

    handles = (
        layer.register_forward_pre_hook(before, with_kwargs=True),
        layer.register_forward_hook(lambda _, args, result: found.append(result)),
    )
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


Begin = Callable[[Any, Tensor, Tensor], Tensor]


def begun(config: Any, family: str, *, other_norm: bool = False) -> Begin:
    """(head, embeddings [B, S, D], streams [B, S, n, D]) -> the streams with which its block begins."""
    one, together = NORMS[family]

    def norm(x: Tensor, weight: Tensor, *dims: int) -> Tensor:
        scale = (x.square().mean(dims, keepdim=True) + config.rms_norm_eps).rsqrt()
        return x * scale * (one + weight.reshape(-1, x.shape[-1]).squeeze(0))

    def begin(head: Any, token: Tensor, streams: Tensor) -> Tensor:
        streams = norm(streams, head["hnorm"], *((-2, -1) if together != other_norm else (-1,)))
        token = norm(token, head["enorm"], -1) @ head["e_proj"].T
        return torch.stack([row @ head["h_proj"].T + token for row in streams.unbind(2)], 2)

    return begin


def theirs(case: Case, config: Any, weights: Any, folder: Path, *, begin: Begin, shift: int = 1) -> list[Tensor]:
    """The logits of each head at the positions with a token ahead."""
    tokens, n = tokens_of(config, 1, LENGTH), config.residual_streams
    plain = {name: leaf for name, leaf in weights.items() if name != "mtp"}
    P.save_pretrained(folder / "model", case.config, plain)
    model, own = loaded(folder / "model"), blocks(config)[0]
    of_ngrams = {f.name: f.default for f in dataclasses.fields(own) if f.init and f.name.startswith("ngram_")}
    own = dataclasses.replace(own, **of_ngrams)  # which a block has none of
    with torch.no_grad(), watched(model.model.layers[-1]) as streams:
        model(tokens, use_cache=False)
    found = []
    for k, head in enumerate(weights["mtp"]):
        ends = {"norm": head["norm"]} if "norm" in head else {}
        P.save_pretrained(folder / f"head{k}", own, {**plain, "layers": [head["block"]], **ends})
        block, places = loaded(folder / f"head{k}"), LENGTH - k - 1
        with torch.no_grad():
            token = model.get_input_embeddings()(tokens.roll(-k - shift, 1)[:, :places])
            first = begin(head, token, streams[-1].reshape(1, -1, n, config.hidden_size)[:, :places])
            with watched(block.model.layers[0], first) as streams:
                found.append(block(tokens[:, :places], use_cache=False).logits)
    return found


def ours(config: Any, weights: Any) -> list[Tensor]:
    tokens, how = tokens_of(config, 1, LENGTH), {"config": config, "kernel": "math"}
    prepared, family = fnmodels.prepare(config, tokens), fnmodels.family_of(config)
    x, tapped = fnmodels.hidden(weights, *prepared, taps=mtp.source_taps(config), **how)
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), len(weights["mtp"]), fill=-1)
    states = mtp.hidden(weights, mtp.read(x, tapped, config), ahead, *prepared[1:], **how)
    logits = [family.unembed(mtp.view(weights, k), state, config=config) for k, state in enumerate(states)]
    return [of_head[:, : LENGTH - k - 1] for k, of_head in enumerate(logits)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_read_the_streams(case: Case, tmp_path: Path) -> None:
    config = with_heads(case.config, 2)
    weights = generic_params(config)
    wanted = theirs(case, config, weights, tmp_path, begin=begun(config, case.family))
    assert len(wanted) == config.num_nextn_predict_layers > 0
    for one, other in zip(ours(config, weights), wanted, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp"])
def test_planted_bugs_are_found(name: str, tmp_path: Path) -> None:
    """Streams folded before the head, another norm of them, and the embedding of another token."""
    case = next(case for case in CASES if case.name == name)
    config = with_heads(case.config, 1)
    weights, right = generic_params(config), begun(config, case.family)
    (found,) = ours(config, weights)

    def folded(head: Any, token: Tensor, streams: Tensor) -> Tensor:
        return right(head, token, streams.mean(2, keepdim=True).expand_as(streams))

    other_norm = begun(config, case.family, other_norm=True)
    for number, bug in enumerate(({"begin": folded}, {"begin": other_norm}, {"begin": right, "shift": 2})):
        (wrong,) = theirs(case, config, weights, tmp_path / str(number), **bug)
        assert off(found[:, :-1], wrong[:, :-1]) > 1e-3, bug
