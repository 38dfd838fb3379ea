"""Tinker's protocol over HTTP, over `train.integrations.tinker` in this process.

wire      protobuf messages of the protocol        futures   results that clients fetch later
trainer   sessions and models                      routes    what Tinker's package calls
kept      samplers, and the bounds of all
"""
