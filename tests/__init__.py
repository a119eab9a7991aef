"""Tests of megatron-etp; a package, so that bodies and helpers can be imported by name from every process."""
