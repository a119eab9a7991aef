"""How the bytes of a plan move. One transport per file."""
