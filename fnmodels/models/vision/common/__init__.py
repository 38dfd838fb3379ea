"""What vision towers have in common beside `common.vision`, and models of two towers (CLIP, SigLIP)."""
