"""The masks and rotary tables of each kind of layer, made from positions and segment ids."""

from typing import Any

from torch import Tensor

from fnmodels.inputs.mask import Create, MaskLike, causal_masks, check_one_axis
from fnmodels.inputs.order import build_segments
from fnmodels.inputs.segments import text_order
from fnmodels.ops.rotary import mrope_table, no_rotation, query_temperature, rotary_table

from ..family import TwoRopesConfig, UsualConfig, field_of, parsed


def attention_masks(
    config: UsualConfig, positions: Tensor, segment_ids: Tensor, *, create: Create | None = None
) -> dict[str, MaskLike]:
    """{kind: mask}: causal, and limited to `sliding_window` for sliding kinds.

    Ordered kinds (`LayerKind.ordered`) have `fnmodels.inputs.Segments`. positions and segment_ids [B, S]; positions
    [B, S, 3 or 4] if the config has an `mrope_section`, see `freqs_cis`. create: see `fnmodels.inputs.mask.build_mask`.
    """
    window = field_of(config, "sliding_window")
    kinds = parsed(sorted(set(config.layer_kinds)))
    if field_of(config, "mrope_section") and positions.ndim == 3:
        counted = positions.shape[-1] == 4
        positions = positions[..., 0] if counted else text_order(positions, segment_ids)
    windows = {kind.name: window if kind.slides else None for kind in kinds if not kind.ordered}
    masks = causal_masks(windows, positions, segment_ids, create=create)
    if ordered := [kind.name for kind in kinds if kind.ordered]:
        check_one_axis(positions)
        masks |= dict.fromkeys(ordered, build_segments(segment_ids, positions))
    return masks


def freqs_cis(config: UsualConfig, positions: Tensor, *, length: int | Tensor | None = None) -> dict[str, Tensor]:
    """{kind: fp32 table [B, S, R/2, 2]} of `config.rope`; R is 0 for kinds that do not rotate, and for ordered ones.

    positions: [B, S]; with an `mrope_section` also [B, S, 3], time, height and width, or [B, S, 4], `text_order` before
    them, for a piece of a row, which does not know it. length: an int or [B], the sequence length that length-dependent
    scalings read; see `fnmodels.ops.rotary`.
    """
    sections = field_of(config, "mrope_section")
    if sections and positions.ndim == 3:
        axes = positions[..., positions.shape[-1] == 4 :]
        interleaved = field_of(config, "mrope_interleaved")
        table = mrope_table(config.rope, config.head_dim, axes, sections, interleaved=interleaved, length=length)
    else:
        table = rotary_table(config.rope, config.head_dim, positions, length)
    kinds = parsed(sorted(set(config.layer_kinds)))
    still = [kind.name for kind in kinds if kind.ordered or not kind.rotates]
    tables = {kind.name: table for kind in kinds}
    return tables | dict.fromkeys(still, no_rotation(positions)) if still else tables


def freqs_cis_by_window(
    config: TwoRopesConfig, positions: Tensor, *, length: int | Tensor | None = None
) -> dict[str, Tensor]:
    """As `freqs_cis`, with `config.local_rope` for sliding kinds and `config.rope` for the others."""
    ropes = {True: config.local_rope, False: config.rope}
    tables = {slides: rotary_table(rope, config.head_dim, positions, length) for slides, rope in ropes.items()}
    kinds, none = parsed(sorted(set(config.layer_kinds))), no_rotation(positions)
    return {kind.name: tables[kind.slides] if kind.rotates else none for kind in kinds}


def freqs_cis_with_temperature(
    config: Any, positions: Tensor, *, length: int | Tensor | None = None
) -> dict[str, dict[str, Tensor]]:
    """{kind: {"table": that of `freqs_cis`, "temperature": `query_temperature`, fp32 [B, S]}}."""
    temperature = query_temperature(positions, beta=config.temperature_beta, period=config.temperature_length)
    tables = freqs_cis(config, positions, length=length)
    return {kind: {"table": table, "temperature": temperature} for kind, table in tables.items()}
