"""Checkpoints as files, of Megatron and of Hugging Face: read, written, matched with a run, and quantized."""
