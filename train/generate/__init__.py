"""Generation of text: drawing tokens, stopping, and loops over a cache.

noise      counter-based random numbers          sampling   `Sampling`, `sample_step`: from logits to a token
stop       token ids to text, and stop texts
"""
