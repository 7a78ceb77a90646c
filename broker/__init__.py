"""The weight broker: one daemon per node that holds model weights for many engines."""
