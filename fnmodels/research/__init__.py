"""Interpretability by small functions on `taps` and `edits`: lenses, attribution, patching, steering, SAEs, probes.

Curvature by linear operators over params trees, and model merging by sums of them.

A `Prepared` is what `fnmodels.prepare` returns: (inputs, masks, freqs_cis). Nothing here knows a family:
`fnmodels.tap_names(config)` says what a model has.
"""

from .attribution import direct_logit_attribution
from .curvature import (
    Operator,
    conjugate_gradients,
    empirical_fisher_vp,
    empirical_ntk,
    fisher_vp,
    ggn_vp,
    hutchinson_trace,
    hvp,
    influence,
    lanczos,
)
from .heads import ablate_heads, induction_scores
from .lens import init_tuned_lens, jacobian_lens, jacobian_lens_logits, logit_lens, train_tuned_lens, tuned_lens
from .merging import merge_linear, merge_slerp, merge_task_arithmetic, merge_ties
from .patching import attribution_patching, causal_trace, patch_grid, path_patching
from .probing import fit_probe, probe_logits
from .progress import progress_bar
from .sae import decode, encode, harvest, init_sae, sae_loss, splice, train_sae
from .steering import mean_difference, steered

__all__ = ["ablate_heads", "attribution_patching", "causal_trace", "decode", "direct_logit_attribution", "encode"]
__all__ += ["fit_probe", "harvest", "induction_scores", "init_sae", "init_tuned_lens", "logit_lens", "mean_difference"]
__all__ += ["patch_grid", "path_patching", "probe_logits", "progress_bar", "sae_loss", "splice", "steered", "train_sae"]
__all__ += ["jacobian_lens", "jacobian_lens_logits", "train_tuned_lens", "tuned_lens"]
__all__ += ["Operator", "conjugate_gradients", "empirical_fisher_vp", "empirical_ntk", "fisher_vp", "ggn_vp", "hvp"]
__all__ += ["hutchinson_trace", "influence", "lanczos"]
__all__ += ["merge_linear", "merge_slerp", "merge_task_arithmetic", "merge_ties"]
