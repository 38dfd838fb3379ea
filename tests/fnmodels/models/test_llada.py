"""LLaDA, Dream and SDAR, which transformers does not have: its Llama, Qwen 2 and Qwen 3 under masks that are theirs.

Each document alone; their loss against a loop over documents, and their sampler against one that looks at each place.
"""

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.common import decoder
from fnmodels.models.encoder import llada
from tests.support.cases import generic_params, positions_of, segments
from tests.support.oracle import assert_close
from tests.support.status import Shows
from tests.variants.llada import FILES_TINY
from train.generation.unmask import unmask
from train.losses.masked_tokens import diffusion_masks, masked_diffusion_loss

ROWS = segments((-2, 13, 6), (11, 9, -1))
RELATIVES = {"llada": "llama", "dream": "qwen2", "sdar": "qwen3"}
every_model = pytest.mark.parametrize("name", FILES_TINY)
TINY = {"vocab_size": 19, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(name: str) -> Any:
    return llada.Config.from_hf(FILES_TINY[name])


@functools.cache
def reference(name: str) -> Any:
    """transformers' relative with the same parameters."""
    config, model_type = config_of(name), RELATIVES[name]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    values = {size: getattr(config, size) for size in sizes} | {"rms_norm_eps": config.rms_norm_eps}
    values |= {"num_key_value_heads": config.num_key_value_heads, "tie_word_embeddings": config.tie_word_embeddings}
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.theta}
    theirs = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    flat = tree.flatten(generic_params(config))
    state = {decoder.parameters.decoder_name(path): leaf for path, leaf in flat.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
    return model


def theirs(name: str, tokens: Tensor) -> Tensor:
    """Logits [S, V] of one document."""
    block, places = config_of(name).block_size, torch.arange(len(tokens))
    seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool)
    if block is not None:
        seen = places[None] // block <= places[:, None] // block
    mask = torch.zeros(1, 1, *seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits: Tensor = reference(name)(tokens[None], attention_mask=mask, use_cache=False).logits[0]
    return logits


@every_model
@pytest.mark.parametrize("kernel", ["math", "sdpa", "blocks"])
def test_packed_documents_are_as_each_alone_in_the_relative(name: str, kernel: Any, shows: Shows) -> None:
    config = config_of(name)
    shows(config.model_type, "parity")
    tokens = torch.randint(60, ROWS.shape, generator=torch.Generator().manual_seed(0))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    layout = fnmodels.layout(prepared[1]) if kernel == "blocks" else None
    got = fnmodels.forward(generic_params(config), *prepared, config=config, kernel=kernel, layout=layout)
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = ROWS[row] == segment
        assert_close(got[row, own], theirs(name, tokens[row, own]))


def batch_of(documents: list[list[int]], length: int) -> Any:
    return fnmodels.pack([torch.tensor(d) for d in documents], length).batch()


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_the_loss_is_that_of_each_document(name: str) -> None:
    """Cross entropy of masked tokens over the rate, which is one for a document; nothing depends on the packing."""
    config, params = config_of(name), generic_params(config_of(name))
    batch = batch_of([[3, 9, 4, 8, 11], [7, 5, 2], [30, 31, 32, 33]], 8)
    made = diffusion_masks(batch, torch.Generator().manual_seed(2), config=config)
    total, count = masked_diffusion_loss(params, made, config=config)
    assert int(count) == (4 + 2 + 3)
    wanted, masked = torch.zeros(()), 0
    for row in range(len(batch["tokens"])):
        for segment in set(batch["segment_ids"][row].tolist()) - {0}:
            own = batch["segment_ids"][row] == segment
            before, after = batch["tokens"][row, own], made["tokens"][row, own]
            logits, weights = theirs(name, after), made["weights"][row, own]
            for place in (after == config.mask_token_id).nonzero().flatten().tolist():
                weight = weights[place - config.shift]
                wanted = wanted + weight * F.cross_entropy(logits[place - config.shift], before[place])
                assert weight >= 1 and place > 0
                masked += 1
            assert len(set(weights[weights > 0].tolist())) <= 1
    assert masked > 2
    torch.testing.assert_close(total, wanted, rtol=1e-5, atol=0)


def test_rates_are_uniform_and_weights_their_inverses() -> None:
    config = config_of("llada")
    batch = batch_of([list(range(1, 33))] * 400, 32)
    made = diffusion_masks(batch, torch.Generator().manual_seed(0), config=config, least=0.1)
    shares = (made["labels"] != -100).sum(1) / made["maskable"].sum(1)
    assert abs(float(shares.mean()) - 0.55) < 0.03 and float(shares.min()) < 0.2 and float(shares.max()) > 0.9
    rates = 1 / made["weights"].max(1).values[shares > 0]
    assert float((rates - shares[shares > 0]).abs().mean()) < 0.1


@every_model
def test_the_surest_tokens_are_written_first(name: str) -> None:
    """Rows of two lengths: each is as alone, and as a loop over the relative's logits writes it."""
    config, params = config_of(name), generic_params(config_of(name))
    prompts, length, steps = [[3, 9, 4, 8, 11, 2], [7, 5, 2]], 7, 2
    block = None if name == "sdar" else 4
    found = unmask(params, config, prompts, length=length, steps=steps, block=block, kernel="math")
    for prompt, answer in zip(prompts, found, strict=True):
        assert unmask(params, config, [prompt], length=length, steps=steps, block=block, kernel="math") == [answer]
        tokens = torch.tensor(prompt + [config.mask_token_id] * length)
        size = len(prompt)
        parts = [(p // config.block_size if name == "sdar" else (p - size) // 4) for p in range(len(tokens))]
        for part in sorted(set(parts[size:])):
            for left in range(steps, 0, -1):
                masks = [p for p in range(size, len(tokens)) if parts[p] == part and tokens[p] == config.mask_token_id]
                logits = theirs(name, tokens)
                logits[:, config.mask_token_id] = -torch.inf
                best = {p: logits[p - config.shift].softmax(-1).max(-1) for p in masks}
                for p in sorted(masks, key=lambda p: -float(best[p].values))[: -(-len(masks) // left)]:
                    tokens[p] = best[p].indices
        assert answer == tokens[size:].tolist()


def test_a_trained_model_writes_what_it_has_learned() -> None:
    config = llada.Config(**TINY, num_key_value_heads=4, mask_token_id=18, model_type="llada")  # type: ignore[arg-type]
    text, generator = [1, 5, 9, 2, 14, 7, 7, 3], torch.Generator().manual_seed(0)
    batch = batch_of([text, [2, *text[:0:-1]]] * 4, 8)
    optimizer = train.adamw(5e-3, spec=llada.spec(config))
    step = train.make_step(functools.partial(masked_diffusion_loss, config=config), optimizer, clip=1.0)
    state = train.init_state(P.init(config, seed=0), optimizer)
    losses = []
    for _ in range(250):
        state, metrics = step(state, [diffusion_masks(batch, generator, config=config)])
        losses.append(float(metrics["loss"]))
    assert sum(losses[-10:]) < 0.2 * sum(losses[:10])
    found = unmask(state.params, config, [[1], [2]], length=7, steps=7)
    assert found == [text[1:], text[:0:-1]]
    drawn = unmask(state.params, config, [[1]], length=7, steps=7, temperature=0.1, generator=generator)
    assert drawn == [text[1:]]


def test_bad_use_is_a_sentence() -> None:
    config, params = config_of("llada"), generic_params(config_of("llada"))
    for wrong, said in (
        ({"prompts": [[1], []]}, "none of them empty"),
        ({"steps": 0}, "steps is 0"),
        ({"temperature": 1.0}, "temperature is 1.0"),
    ):
        given: dict[str, Any] = {"prompts": [[1]], "length": 2, "steps": 1} | wrong
        with pytest.raises(ValueError, match=said):
            unmask(params, config, given.pop("prompts"), **given)
    batch = batch_of([[1, 2, 3]], 4)
    with pytest.raises(ValueError, match="blocks of 5 tokens"):
        diffusion_masks(batch, torch.Generator(), config=config_of("sdar"))
    late = batch | {"segment_ids": batch["segment_ids"] * 9}
    with pytest.raises(ValueError, match=r"segment_ids has 9 in rows of 4 tokens; documents are numbered from 1"):
        diffusion_masks(late, torch.Generator(), config=config)
    other = fnmodels.preset("smollm2-135m")
    for call in (
        lambda: unmask(params, other, [[1]], length=2, steps=1),
        lambda: diffusion_masks(batch, torch.Generator(), config=other),
    ):
        with pytest.raises(ValueError, match="'llama' is no language model of masked diffusion, such as LLaDA"):
            call()
    with pytest.raises(ValueError, match="least is 0"):
        diffusion_masks(batch, torch.Generator(), config=config, least=0)
    with pytest.raises(ValueError, match="leave block out"):
        unmask(params, config_of("sdar"), [[1]], length=2, steps=1, block=4)
    with pytest.raises(fnmodels.errors.UnsupportedError, match="LLaDAMoE"):
        llada.Config.from_hf(FILES_TINY["llada"] | {"architectures": ["LLaDAMoEModelLM"]})
