"""What is moved: tensors cut into boxes, how a tensor is stored, and a party's list of what it has. Pure."""
