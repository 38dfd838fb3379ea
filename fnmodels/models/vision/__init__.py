"""Vision towers and models with two towers, one file each; they read patches of images, see `common/vision.py`.

    patches, positions, segment_ids = fnmodels.inputs.patch_rows(images, config, length=1024)
    inputs, masks, freqs_cis = fnmodels.prepare(config, patches, positions=positions, segment_ids=segment_ids)
    hidden = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)

`fnmodels.towers()` lists them by their `MODEL_TYPES`.
"""
