"""T5, BART and their relatives: parity with transformers, packed pairs as each alone, files, gradients, training."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
import train
from fnmodels import tree
from fnmodels.models.common import storage
from fnmodels.models.encoder_decoder import bart, t5, t5gemma
from fnmodels.ops.attention.relative_bias import buckets
from tests.support.cases import generic, positions_of, segments
from tests.support.doubles import KeepsDoubles
from tests.support.oracle import assert_close
from tests.support.traced import without_generated_code
from tests.variants import t5gemma as t5gemmas
from tests.variants.bart import variants as barts
from tests.variants.t5 import TINY, TOTALS, variants

VARIANTS = variants() | barts() | t5gemmas.variants()
SOURCES = segments((-2, 17, 4, 1), (9, 14, -1))
TARGETS = segments((5, 3, 7), (1, 13, -1))
ALONE = ("t5_encoder", "umt5_encoder", "t5gemma_encoder")
every_variant = pytest.mark.parametrize("name", VARIANTS)
pairs = pytest.mark.parametrize("name", [name for name in VARIANTS if name not in ALONE])


@functools.cache
def reference(name: str) -> Any:
    """transformers' model of a variant."""
    return reference_of(VARIANTS[name])


def reference_of(values: dict[str, Any]) -> Any:
    """transformers' model, every parameter generic. Files of v1.1, mT5 and umT5 have a head of their own."""
    cls = getattr(transformers, values["architectures"][0])
    config = transformers.AutoConfig.for_model(**values)
    model = cls._from_config(config, attn_implementation="eager").eval()
    if values.get("tie_word_embeddings") is False:
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
    for module in model.modules():  # -1, which is no token, is the last row there, whose gradient would be 0
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    with torch.no_grad():
        for path, leaf in state_of(model).items():
            leaf.copy_(generic(path, leaf))
    return model


def state_of(model: Any) -> dict[str, Tensor]:
    """The parameters and the bias of logits, but no tables of sines and cosines."""
    state = {path: leaf for path, leaf in model.named_parameters() if leaf.requires_grad}
    return state | {path: leaf for path, leaf in model.named_buffers() if path == "final_logits_bias"}


def config_of(name: str) -> Any:
    return fnmodels.family_for(VARIANTS[name]["model_type"]).Config.from_hf(VARIANTS[name])


@functools.cache
def params_of(name: str) -> Any:
    """The reference's parameters, by name and by nothing else."""
    state, config = state_of(reference(name)), config_of(name)
    stored = fnmodels.family_of(config).hf_names(config)
    assert {storage.disk_name(one) for one in stored.values()} == state.keys()
    return tree.unflatten(
        {path: storage.extract_parameter(one, state).detach().clone() for path, one in stored.items()}
    )


def tokens_like(ids: Tensor, seed: int) -> Tensor:
    """Random ids, none of them that of padding, which M2M100 does not count."""
    return torch.randint(2, 61, ids.shape, generator=torch.Generator().manual_seed(seed))


def prepared_pair(name: str) -> tuple[Any, Any]:
    """(packed inputs, (source, target) of each document by row and segment)."""
    tokens, decoder_tokens = tokens_like(SOURCES, 0), tokens_like(TARGETS, 1)
    given = {"segment_ids": SOURCES, "positions": positions_of(SOURCES)}
    given |= {"decoder_segment_ids": TARGETS, "decoder_positions": positions_of(TARGETS)}
    prepared = fnmodels.prepare_pair(config_of(name), tokens, decoder_tokens, **given)
    found = {}
    for row, ids in enumerate(TARGETS.tolist()):
        for segment in sorted(set(ids) - {0}):
            found[row, segment] = (tokens[row, SOURCES[row] == segment], decoder_tokens[row, TARGETS[row] == segment])
    return prepared, found


@pytest.mark.parametrize(("count", "most"), [(32, 128), (8, 12), (16, 100)])
@pytest.mark.parametrize("both", [True, False])
def test_buckets(count: int, most: int, both: bool) -> None:
    """Equal to transformers' of each distance, and longer distances share the last."""
    module = transformers.models.t5.modeling_t5.T5Attention
    wanted = module._relative_position_bucket(torch.arange(-3 * most, 3 * most + 1), both, count, most).tolist()
    own = buckets(count, most, bidirectional=both)
    assert wanted == own[:1] * 2 * most + own + own[-1:] * 2 * most


@pairs
def test_packed_pairs_are_as_each_alone_in_transformers(name: str) -> None:
    """Documents of a row, padding on both sides: logits of each target given its own source.

    In fp64, the reference's norms and softmax too; its tables of positions are fp32. All of it in fp32 is off by 2e-5.
    """
    prepared, found = prepared_pair(name)
    model, wide = copy.deepcopy(reference(name)).double(), tree.map(Tensor.double, params_of(name))
    layouts = {stack: fnmodels.layout(prepared[1][stack]) for stack in ("encoder", "decoder")}
    assert len(found) == 5
    options: dict[str, dict[str, Any]] = {"math": {"kernel": "math"}, "sdpa": {"kernel": "sdpa"}}
    if getattr(config_of(name), "attention_softcap", None) is not None:  # which sdpa refuses
        del options["sdpa"]
    options["blocks"] = {"kernel": "blocks", "layout": layouts}
    for how in options.values():
        got = fnmodels.forward(wide, *prepared, config=config_of(name), **how)
        for (row, segment), (source, target) in found.items():
            with torch.no_grad(), KeepsDoubles():
                theirs = model(input_ids=source[None], decoder_input_ids=target[None], use_cache=False).logits[0]
            assert_close(got[row, TARGETS[row] == segment], theirs, bound=4e-6)


def test_the_encoder_alone() -> None:
    """T5EncoderModel and its like: packed, in each kernel; and the encoder of both stacks by itself."""
    tokens = tokens_like(SOURCES, 0)
    for name in (*ALONE, "t5", "umt5", "t5gemma", "t5gemma_uncapped"):
        whole = config_of(name)
        config = whole if whole.stack == "encoder" else whole.encoder
        weights = params_of(name) if whole.stack == "encoder" else fnmodels.stack_params(params_of(name), "encoder")
        prepared = fnmodels.prepare(config, tokens, positions=positions_of(SOURCES), segment_ids=SOURCES)
        capped = getattr(config, "attention_softcap", None) is not None  # which sdpa refuses
        for kernel in ("math", "blocks") if capped else ("math", "sdpa", "blocks"):
            layout = fnmodels.layout(prepared[1]) if kernel == "blocks" else None
            got = fnmodels.forward(weights, *prepared, config=config, kernel=kernel, layout=layout)
            for row, ids in enumerate(SOURCES):
                for segment in set(ids.tolist()) - {0}:
                    model = reference(name) if whole.stack == "encoder" else reference(name).get_encoder()
                    with torch.no_grad():
                        theirs = model(input_ids=tokens[row, ids == segment][None]).last_hidden_state[0]
                    assert_close(got[row, ids == segment], theirs)


@pairs
def test_every_parameter_is_read(name: str) -> None:
    """A change of 10% of any parameter changes the logits, but of biases of keys: scores of a query change alike."""
    prepared, _ = prepared_pair(name)
    run = functools.partial(fnmodels.forward, config=config_of(name), kernel="math")
    weights, wanted = tree.flatten(params_of(name)), run(params_of(name), *prepared)
    for path in weights:
        if path.endswith("k_bias"):
            continue
        changed = run(tree.unflatten(weights | {path: weights[path] * 1.1}), *prepared)
        assert (changed - wanted).abs().max() > 1e-5, path


def test_mistakes_would_be_seen() -> None:
    """Wrong buckets, a target that sees another source, a lost scale: each is far outside of the tolerance."""
    (inputs, masks, freqs), _ = prepared_pair("t5")
    config = config_of("t5")

    def off(masks: Any, inputs: Any = inputs, **changes: Any) -> float:
        other = replace(config, **changes)
        got = fnmodels.forward(params_of("t5"), inputs, masks, freqs, config=other, kernel="math")
        return float((got - wanted)[TARGETS > 0].abs().max())

    wanted = fnmodels.forward(params_of("t5"), inputs, masks, freqs, config=config, kernel="math")
    assert off(masks, scale_outputs=False) > 1e-2
    assert off(masks, relative_attention_max_distance=30) > 1e-2
    shown = replace(masks["cross"], q_segments=TARGETS.clamp(max=1))
    assert off(masks | {"cross": shown}) > 1e-2
    moved = inputs | {"decoder": inputs["decoder"] | {"positions": torch.arange(TARGETS.shape[1]).expand(2, -1) * 2}}
    assert off(masks, moved) > 1e-2


def test_order_of_the_encoder_does_not_matter() -> None:
    """Positions and segments say where a token stands, so permuted rows give permuted results."""
    config, weights = config_of("t5_encoder"), params_of("t5_encoder")
    tokens, order = (
        tokens_like(SOURCES, 0),
        torch.randperm(SOURCES.shape[1], generator=torch.Generator().manual_seed(0)),
    )
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(SOURCES), segment_ids=SOURCES)
    wanted = fnmodels.forward(weights, *prepared, config=config)
    got = fnmodels.forward(weights, *fnmodels.permute(prepared, order), config=config)
    torch.testing.assert_close(got, wanted[:, order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["t5_v1_1", "umt5"])
def test_what_stands_at_padding_does_not_matter(name: str) -> None:
    """NaN in a pad token's row changes no bit and has gradient 0, where the head does not read it."""
    config, (prepared, _) = config_of(name), prepared_pair(name)
    for ids, stack in ((SOURCES, "encoder"), (TARGETS, "decoder")):
        prepared[0][stack]["tokens"] = torch.where(ids > 0, prepared[0][stack]["tokens"].clamp(min=1), 0)
    weights = dict(params_of(name))
    for kernel in ("math", "sdpa"):
        results = []
        for value in (0.0, torch.nan):
            table = weights["embed_tokens"].clone()
            table[0] = value
            table.requires_grad_()
            got = fnmodels.forward(weights | {"embed_tokens": table}, *prepared, config=config, kernel=kernel)[
                TARGETS > 0
            ]
            (grad,) = torch.autograd.grad(got.square().sum(), table)
            assert not grad[0].any() and grad[1:].any()
            results.append(torch.cat([got.flatten(), grad[1:].flatten()]))
        assert torch.equal(*results)


@pytest.mark.parametrize("name", ["bart", "blenderbot-small", "m2m_100"])
def test_vectors_at_padding_do_not_matter(name: str) -> None:
    """As above for tied heads, which read the table: NaN in the vectors that stand in place of tokens."""
    (inputs, masks, freqs), _ = prepared_pair(name)
    weights = params_of(name)
    results = []
    for value in (0.0, torch.nan):
        vectors = {}
        for ids, stack in ((SOURCES, "encoder"), (TARGETS, "decoder")):
            found = weights["embed_tokens"][inputs[stack]["tokens"]]
            vectors[stack] = found.masked_fill(ids[..., None] == 0, value).requires_grad_()
        given = {stack: inputs[stack] | {"tokens": vectors[stack]} for stack in vectors}
        got = fnmodels.forward(weights, given, masks, freqs, config=config_of(name), kernel="math")[TARGETS > 0]
        grads = torch.autograd.grad(got.square().sum(), list(vectors.values()))
        assert not grads[0][SOURCES == 0].any() and grads[0][SOURCES > 0].any()
        results.append(torch.cat([got.flatten(), *(grad.flatten() for grad in grads)]))
    assert torch.equal(*results)


@pairs
def test_gradients_of_every_parameter(name: str) -> None:
    """Of the loss on packed pairs, in each kernel, against transformers' on the pairs one by one."""
    config, model = config_of(name), reference(name)
    _, found = prepared_pair(name)
    documents = list(found.values())
    batch = fnmodels.pair_batch(documents, 24, 16, start=config.decoder_start_token_id)
    assert len(batch["tokens"]) < len(documents)
    losses = []
    for source, target in documents:
        before = torch.cat((torch.tensor([config.decoder_start_token_id]), target[:-1]))
        logits = model(input_ids=source[None], decoder_input_ids=before[None], use_cache=False).logits[0]
        losses.append(torch.nn.functional.cross_entropy(logits, target, reduction="sum"))
    state = {path: leaf for path, leaf in model.named_parameters() if leaf.requires_grad}
    theirs = dict(zip(state, torch.autograd.grad(torch.stack(losses).sum(), list(state.values())), strict=True))
    for kernel in ("math", "auto"):
        weights = tree.map(lambda leaf: leaf.clone().requires_grad_(), params_of(name))
        total, count = train.losses.pair_loss(weights, batch, config=config, kernel=kernel)
        assert int(count) == sum(len(target) for _, target in documents)
        torch.testing.assert_close(total, torch.stack(losses).sum(), rtol=1e-5, atol=0)
        flat = tree.flatten(weights)
        names = fnmodels.family_of(config).hf_names(config)
        for path, grad in zip(flat, torch.autograd.grad(total, list(flat.values())), strict=True):
            if path == "lm_head_bias":  # a constant, which transformers does not train
                continue
            wanted = theirs[names[path]]
            assert (grad - wanted).abs().max() <= 3e-5 * max(1.0, float(wanted.abs().max())), path


@pytest.mark.parametrize(("remat", "compiled"), [("full", "none"), ("none", "block")])
def test_a_train_step(remat: str, compiled: str) -> None:
    """make_step with microbatches takes the loss, and it falls."""
    config = config_of("t5")
    documents = list(prepared_pair("t5")[1].values())
    batch = fnmodels.pair_batch(documents, 24, 14, start=0)
    loss = functools.partial(train.losses.pair_loss, config=config)
    optimizer = train.adamw(1e-2, spec=t5.spec(config))
    step = train.make_step(loss, optimizer, clip=1.0, remat=remat, compile=compiled)
    state = train.init_state(params_of("t5"), optimizer)
    wanted, count = loss(params_of("t5"), batch)
    seen = []
    with without_generated_code() as graphs:
        for _ in range(4):
            state, metrics = step(state, list(fnmodels.split(batch, len(batch["tokens"]))))
            seen.append(float(metrics["loss"]))
    assert bool(graphs) == (compiled == "block")
    assert abs(seen[0] - float(wanted / count)) < 1e-4 and seen[-1] < seen[0] - 0.1


@every_variant
def test_files(name: str, tmp_path: Path) -> None:
    """A folder of transformers is read without leftovers; ours is read by transformers, and both are bit-equal."""
    model = reference(name)
    model.save_pretrained(tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs")
    assert config == config_of(name)
    wanted = tree.flatten(params_of(name))
    found = tree.flatten(weights)
    assert found.keys() == wanted.keys() and all(torch.equal(found[path], wanted[path]) for path in wanted)
    P.save_pretrained(tmp_path / "ours", config, weights)
    again = type(model).from_pretrained(tmp_path / "ours")
    if config.model_type in ("t5", "umt5"):
        assert again.config.scale_decoder_outputs == model.config.scale_decoder_outputs
    assert all(torch.equal(state_of(again)[path], leaf) for path, leaf in state_of(model).items())
    if name not in ALONE:
        tokens = tokens_like(SOURCES, 0)
        both = [m(input_ids=tokens, decoder_input_ids=tokens[:, :5], use_cache=False).logits for m in (model, again)]
        torch.testing.assert_close(*both, atol=1e-5, rtol=0)


def test_the_encoder_of_a_whole_checkpoint(tmp_path: Path) -> None:
    """A v1.0 file repeats its embedding; a copy that differs is refused."""
    from safetensors.torch import load_file, save_file

    reference("t5").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    copies = {name: tensors["shared.weight"].clone() for name in t5.hf_copies(config_of("t5"))}
    save_file(tensors | copies, file, metadata={"format": "pt"})
    P.load_pretrained(tmp_path)
    save_file(tensors | copies | {"decoder.embed_tokens.weight": torch.ones(61, 32)}, file, metadata={"format": "pt"})
    with pytest.raises(P.CheckpointError, match="embed_tokens"):
        P.load_pretrained(tmp_path)


_STATED: dict[str, Any] = {"model_type": "t5_gemma_module", "add_cross_attention": False, "bos_token_id": 2}
_STATED |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256}
_STATED |= {"hidden_activation": "gelu_pytorch_tanh", "rope_theta": 10000.0, "sliding_window": 4096, "use_cache": True}
_STATED |= {"attention_dropout": 0.0, "dropout_rate": 0.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-06}


def _layers(count: int) -> list[str]:
    return ["full_attention" if i % 2 else "sliding_attention" for i in range(count)]


# Fields of published files that no forward pass reads.
FIELDS: dict[str, dict[str, Any]] = {
    "bart-large-cnn": {"force_bos_token_to_be_generated": True, "forced_bos_token_id": 0, "normalize_before": False}
    | {"add_final_layer_norm": False, "_num_labels": 3, "id2label": {"0": "LABEL_0"}, "no_repeat_ngram_size": 3},
    "pegasus-large": {"force_bos_token_to_be_generated": False, "extra_pos_embeddings": 1, "length_penalty": 0.8}
    | {"static_position_embeddings": True, "add_bias_logits": False, "task_specific_params": {}, "pad_token_id": 0},
    "opus-mt-en-de": {"bad_words_ids": [[58100]], "decoder_vocab_size": 58101, "static_position_embeddings": True},
    "blenderbot-400m-distill": {"do_blenderbot_90_layernorm": True, "layernorm_variant": "prelayernorm"}
    | {"extra_layer_norm": False, "encoder_no_repeat_ngram_size": 3, "unk_token_id": 3},
    "t5gemma-9b-2b": {"classifier_dropout_rate": 0.0, "dropout_rate": 0.0, "eos_token_id": [1, 107], "pad_token_id": 0}
    | {"attention_dropout": 0.0, "vocab_size": 256000, "use_cache": True, "initializer_range": 0.02}
    | {"encoder": {**t5gemma.PRESETS["t5gemma-9b-2b"]["encoder"], **_STATED, "layer_types": _layers(42)}}
    | {"decoder": {**_STATED, "is_decoder": True, "cross_attention_hidden_size": 3584, "layer_types": _layers(26)}},
    "umt5-xxl-encoder": {"scalable_attention": True, "output_past": True, "dense_act_fn": "gelu_new"},
}


@pytest.mark.parametrize("name", FIELDS)
def test_published_files_are_read(name: str) -> None:
    values = (bart.PRESETS | t5.PRESETS | t5gemma.PRESETS)[name]
    read = fnmodels.family_for(values["model_type"]).Config.from_hf
    assert read(values | FIELDS[name]) == read(values)


def test_sizes() -> None:
    """transformers counts the same on meta; tests/fnmodels/models/test_presets.py holds all presets to TOTALS."""
    for name in ("t5-small", "t5-v1_1-xxl-encoder", "mt5-small", "umt5-xxl-encoder"):
        values = t5.PRESETS[name]
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(**values)
            model = getattr(transformers, values["architectures"][0])(config)
        untied = config.model_type == "mt5"  # transformers ties what its files do not
        assert model.num_parameters() + untied * config.vocab_size * config.d_model == TOTALS[name]


def test_bad_use_is_a_sentence() -> None:
    config, weights = config_of("t5"), params_of("t5")
    tokens = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="prepare_pair"):
        fnmodels.prepare(config, tokens)
    with pytest.raises(ValueError, match="one stack"):
        fnmodels.prepare_pair(config.encoder, tokens, tokens)
    with pytest.raises(ValueError, match="2 rows and the decoder 1"):
        fnmodels.prepare_pair(config, tokens, tokens[:1])
    prepared = fnmodels.prepare_pair(config, tokens, tokens)
    with pytest.raises(ValueError, match="one stack"):
        fnmodels.forward(weights, *prepared, config=config, taps=("embed",))
    with pytest.raises(ValueError, match="no relative position bias"):
        fnmodels.forward(weights, *prepared, config=config, kernel="flex")
    one = [made["decoder"] for made in prepared]
    with pytest.raises(ValueError, match="memory"):
        fnmodels.forward(fnmodels.stack_params(weights, "decoder"), *one, config=config.decoder)
    part, encoder = fnmodels.stack_params(weights, "encoder"), fnmodels.prepare(config.encoder, tokens)
    with pytest.raises(ValueError, match="positions"):
        fnmodels.forward(part, tokens, *encoder[1:], config=config.encoder)
    with pytest.raises(ValueError, match="shared="):
        fnmodels.run_layers(part, torch.zeros(2, 3, 32), *encoder[1:], 0, 1, config=config.encoder)
    with pytest.raises(P.UnsupportedError, match="T5ForQuestionAnswering"):
        t5.Config.from_hf(TINY | {"architectures": ["T5ForQuestionAnswering"]})
    with pytest.raises(ValueError, match="multiple of 4"):
        t5.Config.from_hf(TINY | {"relative_attention_num_buckets": 6})
    with pytest.raises(ValueError, match="The target of pair 1 has 0"):
        fnmodels.pair_batch([([1], [2]), ([1], [])], 4, 4, start=0)
    with pytest.raises(ValueError, match="decoder_tokens"):
        train.losses.pair_loss(weights, {"tokens": tokens}, config=config)


def test_taps_of_a_stack() -> None:
    """The names of taps, and those of cross attention."""
    config = config_of("t5").decoder
    names = fnmodels.tap_names(config)
    assert "layers.0.cross_attention.z" in names and "layers.2.cross_attention" in names
    assert "layers.0.cross_attention" not in fnmodels.tap_names(config_of("t5").encoder)
    with pytest.raises(ValueError, match=r"each with taps of its own: tap_names of config\.encoder or config\.decoder"):
        fnmodels.tap_names(config_of("t5"))
