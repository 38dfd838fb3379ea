"""The activations of both models under the names of our taps: ours by taps, the reference's by hooks."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor

from fnmodels import forward, prepare, tap_names
from fnmodels.models.common.family import DecoderConfig, field_of
from fnmodels.ops.streams.hyper import mean
from fnmodels.tree import Tree

from .batches import Arrangement
from .reference import layers_of

# Taps of what is added to the residual stream: {tap: the reference's field that multiplies what its module returns}.
BETAS = {"attention": "attn_beta_factor", "mlp": "mlp_beta_factor"}  # of MiniMax's layers, which multiply these
_ADDED = {"mamba": "ssm_out_multiplier", "attention": "attention_out_multiplier", "mlp": ""}
# The reference's module whose output equals our tap: where a norm follows a sublayer, that norm. The first entry whose
# modules a layer has all of is used: post_attention_layernorm alone is a norm before the MLP. Where several modules are
# named, their sum, without those that are None in a layer.
_SUBLAYERS = (
    {"attention": "post_operator_norm", "mlp": "post_ffn_norm"},  # LFM3
    {"attention": "post_attention_convolution", "mlp": "post_mlp_convolution"},  # Inkling 2
    {"attention": "post_norm1", "mlp": "post_norm2"},  # HyperCLOVA X
    {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"},
    {"attention": "post_self_attn_layernorm", "mlp": "post_mlp_layernorm"},
    {"attention": "post_attention_dropout", "mlp": "post_mlp_dropout"},  # Nomic BERT, whose norms follow the sums
    {"attention": "post_attention_layernorm", "mlp": "post_mlp_layernorm"},  # AFMoE
    {"attention": "attention.output.dense", "mlp": "output.dense"},  # BERT
    {"attention": "temporal_block", "mlp": "mlp_block"},  # RecurrentGemma
    {"attention": "attention.attn", "mlp": "output.dense"},  # MPNet
    {"attention": "attention.dense", "mlp": "ffn_output"},  # ALBERT
    {"attention": "attention", "mlp": "ffn"},  # DistilBERT
    {"attention": "self_attn", "mlp": "mlp"},
    {"mamba": "mamba", "attention": "self_attn", "mlp": "feed_forward"},  # Falcon-H1
    {"attention": "self_attn", "mlp": "feed_forward"},  # Llama 4
    {"attention": "mamba", "mlp": "feed_forward"},  # Bamba
    {"attention": "attn", "mlp": "mlp"},  # GPT-2
    {"attention": "attn", "mlp": "ffn.down_proj"},  # MPT
    {"attention": "norm_attn_norm.attn", "mlp": "ffn"},  # DBRX
    {"attention": "self_attn", "mlp": "fc2"},  # OPT
    {"attention": "attention", "mlp": "mlp"},  # GPT-NeoX
    {"attention": "self_attention.dense", "mlp": "mlp.dense_4h_to_h"},  # Falcon, BLOOM
    {"attention": "linear_attn", "mlp": "mlp"},  # Gated DeltaNet
    {"attention": "conv", "mlp": "feed_forward"},  # LFM2
    {"attention": "mixer", "mlp": "mixer"},  # one sublayer, of which ours has the tap
    {"attention": "mamba self_attn", "mlp": "shared_mlp block_sparse_moe"},  # Granite 4
    {"attention": "self_attn", "mlp": "shared_mlp block_sparse_moe"},  # Granite 3 MoE
    {"attention": "self_attn", "mlp": "block_sparse_moe"},
    {"attention": "mamba"},  # Zamba 2
)
_ROWS_FIRST = ("gemma3n_text",)  # transformers has the streams [n, B, S, D], and the first one is the embedding


def our_taps(config: DecoderConfig, params: Tree, tokens: Tensor, batch: Arrangement) -> dict[str, Tensor]:
    """{tap: activation} of our model."""
    names = {name.split(".", 2)[2] for name in tap_names(config) if name.startswith("layers.")}
    of_streams = ("layers.*.streams",) if field_of(config, "residual_streams") else ()
    taps = ("embed", "layers.*.output", *of_streams, *(f"layers.*.{name}" for name in _ADDED if name in names))
    prepared = prepare(config, tokens, positions=batch.positions, segment_ids=batch.segment_ids)
    logits, tapped = forward(params, *prepared, config=config, kernel="math", taps=taps)
    for name in [name for name in tapped if name.endswith(".streams")]:  # the last layer returns another mixture
        tapped[name.replace(".streams", ".output")] = mean(tapped.pop(name))
    return {**tapped, "logits": logits}


def their_taps(model: Any, config: DecoderConfig, tokens: Tensor, batch: Arrangement) -> dict[str, Tensor]:
    """{tap: activation} of the reference, by hooks on its modules."""
    tapped: dict[str, Tensor] = {}

    rows_first = getattr(model.config, "model_type", "") in _ROWS_FIRST
    width = field_of(config, "residual_streams") * config.hidden_size

    def apart(x: Tensor) -> Tensor:
        """The rows of the stream [B, S, n, D], which Qwen 3.8 Flash Next has one after the other, [B, S, n D]."""
        return x.unflatten(-1, (-1, config.hidden_size)) if width and x.ndim == 3 and x.shape[-1] == width else x

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["hidden_states"]
        tapped["embed"] = x[0] if rows_first else mean(apart(x))

    # Granite and MiniCPM 3 multiply what a sublayer returns.
    multiplier = getattr(model.config, "residual_multiplier", getattr(layers_of(model)[0], "residual_scale", 1.0))

    def after(tap: str, module: Any, args: Any, output: Any, *, factor: float = 1.0) -> None:
        value = output[0] if isinstance(output, tuple | list) else output
        value = mean(value.movedim(0, -2) if rows_first and value.ndim == 4 else apart(value))  # of the stream's rows
        own = _ADDED.get(tap.rpartition(".")[2])
        value = value if own is None else value * multiplier * getattr(model.config, own, 1.0) * factor
        value = value.clone()  # Falcon adds the attention's output to the MLP's in place
        value = value if value.ndim == 3 else value.view(*tokens.shape, -1)  # experts may see rows of tokens
        tapped[tap] = tapped[tap] + value if tap in tapped else value

    layers = layers_of(model)
    if field_of(config, "passes"):
        handles = _hooks_of_passes(layers, after)
    else:
        handles = [layers[0].register_forward_pre_hook(before, with_kwargs=True)]
        for i, layer in enumerate(layers):
            modules = [("output", layer), *sublayers_of(layer)]
            for name, module in modules:
                factor = float(getattr(layer, BETAS.get(name, ""), 1.0))
                handles.append(module.register_forward_hook(partial(after, f"layers.{i}.{name}", factor=factor)))
    try:
        mask = batch.segment_ids if batch.form == "padded" else None  # else documents begin where positions restart
        positions = batch.positions + field_of(config, "first_position")
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return {**tapped, "logits": logits}


def _hooks_of_passes(layers: Sequence[Any], after: Callable[..., None]) -> list[Any]:
    """Handles of hooks on sublayers, whose taps have the number of the pass, of layers that run several times.

    What enters and leaves a layer is one of the rows of our residual stream, which has no tap.
    """
    passed = [0]

    def note(name: str, *given: Any) -> None:
        after(f"layers.{passed[0]}.{name}", *given)

    def ended(*_: Any) -> None:
        passed[0] += 1

    hooks = [(module, partial(note, name)) for layer in layers for name, module in sublayers_of(layer)]
    return [module.register_forward_hook(hook) for module, hook in (*hooks, *((layer, ended) for layer in layers))]


def sublayers_of(layer: Any) -> list[tuple[str, Any]]:
    """(tap, module whose output it is, or a summand of it) of one layer; [] if its modules have unknown names."""
    for names in _SUBLAYERS:
        modules = [(tap, name) for tap, several in names.items() for name in several.split()]
        try:
            found = [(tap, attrgetter(name)(layer)) for tap, name in modules]
        except AttributeError:
            continue
        return [(tap, module) for tap, module in found if module is not None]
    return []


def tap_order(layers: int) -> Iterator[str]:
    """The taps in the order in which the model computes them."""
    yield "embed"
    for i in range(layers):
        yield from (f"layers.{i}.{name}" for name in ("mamba", "attention", "mlp", "output"))
    yield "logits"
