"""What an engine worker wants: boxes of Hugging Face tensors, and their places in its parameters."""
