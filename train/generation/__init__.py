"""Generation: drawing tokens, stopping, and loops over a cache.

noise      counter-based random numbers          sampling   `Sampling`, `sample_step`: from logits to a token
stop       token ids to text, and stop texts     prompts    prompts into a cache, what they share once
serve      `serve_step`: one token per slot      requests   requests, answers, events
batching   slots between steps, `ContinuousBatch`   loops      the queue over them, `generate`
beam       `beam_search`
text       texts instead of token ids            speculative   `speculate`: drafts of a smaller model
transcribe   speech to text with Whisper
"""

from .beam import beam_search
from .requests import best_of
from .sampling import sample_step
from .serve import ServeState
from .speculative import speculate

__all__ = ["ServeState", "beam_search", "best_of", "sample_step", "speculate"]
