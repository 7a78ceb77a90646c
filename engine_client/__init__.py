"""The engine side of the weight broker."""
