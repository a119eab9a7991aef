"""Families of models, one per file: the Hugging Face tensors of each, and where Megatron's parameters lie in them."""
