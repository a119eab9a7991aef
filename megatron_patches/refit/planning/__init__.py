"""Plans of single destinations, made and proved from compact layouts of the sources that overlap them.

Pure functions of integers and names: no torch, no input or output.
"""
