"""Engines of other projects on the broker's weights. Each module imports its engine when used."""
