"""Parts of DeepSeek V4.1: its config.json, keys that layers share, tables of n-grams."""
