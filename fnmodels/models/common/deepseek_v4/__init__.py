"""Parts of DeepSeek V4: its config.json, parameters and names, residual streams of n rows, keys of windows."""
