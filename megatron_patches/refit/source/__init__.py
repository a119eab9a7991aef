"""What a trainer rank holds: the parameters of its live model, as boxes of Hugging Face tensors."""
