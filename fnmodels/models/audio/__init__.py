"""Encoders of sound alone, one file each; they read raw waves, see `fnmodels.inputs.wave_rows`.

    waves, positions, segment_ids = fnmodels.inputs.wave_rows(clips, config, length=1024)
    inputs, masks, freqs_cis = fnmodels.prepare(config, waves, positions=positions, segment_ids=segment_ids)
    logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)

`fnmodels.towers()` lists them by their `MODEL_TYPES`.
"""
