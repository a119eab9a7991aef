"""Moves a training run's weight shards to where they are served, without ever building a full tensor.

Every region of every weight is a :class:`~megatron_patches.refit.boxes.Box` in the global coordinates of a
Hugging Face tensor. A trainer rank lists the boxes that it holds (``source``), the other side lists those that
it wants, ``plan`` pairs the two, ``proof`` shows that nothing is missing, doubled or padding, a transport moves
the bytes, and ``digest`` compares what arrived with what was sent.

Import the parts from their modules; this package imports nothing by itself, so that the pure ones
(``boxes``, ``manifest``, ``plan``, ``proof``) stay usable where neither torch nor Megatron is installed.
"""
