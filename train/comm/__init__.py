"""Communication between processes, and nothing above it; `collectives` is the only file that sends tensors."""
