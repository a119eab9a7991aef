"""Checkpoints as files, of Megatron and of Hugging Face: read, written, and compared with a run's model."""
