"""Weights on their way to a rollout: what is handed over, and the changes since.

exports   full tensors, shards or adapters        deltas   elements that have changed
bucket    buckets for another process             offload  the state in host memory and back
"""

from .bucket import Bucket, as_stored, buckets, changed, received

__all__ = ["Bucket", "as_stored", "buckets", "changed", "received"]
