"""What is moved: tensors cut into boxes, how a tensor is stored, and a party's list of what it has.

No input or output. torch is imported only where a tensor is handled.
"""
