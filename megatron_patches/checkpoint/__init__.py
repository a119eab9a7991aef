"""Checkpoints of sharded training in Megatron's own torch_dist format.

A checkpoint saved with any number of weight shards has the same tensors, names, shapes and dtypes as one saved without
shards: runs with other (TP, ETP, PP, DP) sizes can load it, and so can Megatron without this package.

``pieces`` is the arithmetic, ``sharded_rows`` the entry of a sharded weight, ``model_state`` and ``optimizer_state``
the replacements of Megatron's helpers, ``verify`` the file check before a load, and ``patches`` the list of
replacements.
"""
