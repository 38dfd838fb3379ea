"""Interpretability by small functions on `taps` and `edits`: lenses, attribution, patching, steering, SAEs, probes.

A `Prepared` is what `fnmodels.prepare` returns: (inputs, masks, freqs_cis). Nothing here knows a family:
`fnmodels.tap_names(config)` says what a model has.
"""

from .attribution import direct_logit_attribution
from .heads import ablate_heads, induction_scores
from .lens import init_tuned_lens, logit_lens, train_tuned_lens, tuned_lens
from .patching import attribution_patching, causal_trace, patch_grid, path_patching
from .probing import fit_probe, probe_logits
from .sae import decode, encode, harvest, init_sae, sae_loss, splice, train_sae
from .steering import mean_difference, steered

__all__ = ["ablate_heads", "attribution_patching", "causal_trace", "decode", "direct_logit_attribution", "encode"]
__all__ += ["fit_probe", "harvest", "induction_scores", "init_sae", "init_tuned_lens", "logit_lens", "mean_difference"]
__all__ += ["patch_grid", "path_patching", "probe_logits", "sae_loss", "splice", "steered", "train_sae"]
__all__ += ["train_tuned_lens", "tuned_lens"]
