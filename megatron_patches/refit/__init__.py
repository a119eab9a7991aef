"""Moves a training run's weight shards to where they are served, without ever building a full tensor.

Every region of every weight is a :class:`~megatron_patches.refit.boxes.Box` in the global coordinates of a Hugging Face
tensor. A trainer rank lists the boxes that it holds (``source``), an engine worker lists those that it wants, ``plan``
matches the two, ``proof`` shows that nothing is missing, duplicated or padding, a transport moves the bytes, and
``digest`` compares what arrived with what was sent.

Import from the modules; this package imports nothing itself, so that the pure modules (``boxes``, ``manifest``,
``plan``, ``proof``) can be used without torch or Megatron.
"""
