"""What parties say to each other, and how they meet: messages, the assembly, secrets, leases and HTTP calls."""
