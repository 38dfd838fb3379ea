"""Files: the safetensors format, checks on plain files and JSON, and staged saves.

safetensors_file   reads and writes headers and tensors
files              which files may be opened, strict JSON, flushing to disk
staging            write aside, flush, rename; the lock that keeps a second writer out
"""
