"""What a trainer rank holds: from Megatron's names and layouts to boxes of Hugging Face tensors."""
