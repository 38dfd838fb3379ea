"""Models of an encoder and a decoder that attends to it, one file each; see `fnmodels.pairs`.

    inputs, masks, freqs_cis = fnmodels.prepare_pair(config, tokens, decoder_tokens)
    logits = fnmodels.forward(params, inputs, masks, freqs_cis, config=config)

`fnmodels.encoder_decoders()` lists them by their `MODEL_TYPES`.
"""
