"""Checkpoints of sharded training in Megatron's own torch_dist format.

A checkpoint saved with any number of weight shards has the tensors, names, shapes and dtypes of one saved without:
runs with other (TP, ETP, PP, DP) load it, and so does Megatron without this package.

``pieces`` is the arithmetic, ``sharded_rows`` the entry of a sharded weight, ``model_state`` and ``optimizer_state``
what replaces Megatron's helpers, ``verify`` the look at the files before a load, ``patches`` the list of
replacements.
"""
