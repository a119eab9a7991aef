"""What an inference rank wants: boxes of Hugging Face tensors, and where they go in its parameters."""
