"""Diffusion models, one file each: functions of noisy latents, a text, and the time; see `fnmodels.diffusion`.

    prepared = fnmodels.diffusion.prepare_denoising(config, latents, text, conditions, positions=positions)
    velocity = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)

`fnmodels.diffusion_models()` lists them by their `MODEL_TYPES`, which are the `_class_name`s of diffusers.
"""
