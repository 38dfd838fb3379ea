"""Text that does not fit in memory: sources that are read, tokenized and shuffled while a run trains.

files        the files of a source: local, or of a file system that fsspec knows, by a URL
readers      the records of a file from any place in it
documents    the endless train documents of a source, and its held-out ones, which their hashes choose
windows      rows of tokens, a window at a time, made in the background
mixture      the batch of a step from several sources, and the position that a run saves
"""

from .mixture import StreamMixture as StreamMixture
