"""Parts that vision towers share beside `common.vision`, and models of two towers (CLIP, SigLIP)."""
