"""Indexers beside `fnmodels.ops.indexer`: those that choose blocks of keys."""
