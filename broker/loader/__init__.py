"""The loader process: reads one checkpoint into one slab. Started by the broker, ends by itself."""
