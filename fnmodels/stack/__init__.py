"""Running layers: `plan`, what is decided once for a config and options; `checks`, whether tensors fit; `loop`."""
