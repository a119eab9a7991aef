"""What tests share: the launcher of multi-process bodies and small tools."""
