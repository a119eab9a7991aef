"""Layers of a hybrid for Megatron's ``--spec`` where neither Mamba's kernels nor Transformer Engine are installed."""

from __future__ import annotations

from tests.support.live_hybrid import install_stand_ins, stack_spec

install_stand_ins()
STACK = stack_spec(8)
