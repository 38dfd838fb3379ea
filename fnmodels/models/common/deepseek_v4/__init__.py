"""What DeepSeek V4 brought and other families have too: residual streams of n rows, keys of windows of tokens."""
