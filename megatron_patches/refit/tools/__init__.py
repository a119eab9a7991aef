"""The commands of ``python -m megatron_patches.refit``, one per file."""
