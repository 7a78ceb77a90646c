"""Models of the Hugging Face transformers library on the broker's weights.

    from engine_client import EngineClient
    from engine_client.integrations.transformers import from_pretrained

    client = EngineClient(device="cuda:0")
    model = from_pretrained("/models/m", client=client)

The model is the one that the library's own `from_pretrained` gives, and moved to the device: same
class, names, ties, dtype, buffers, generation configuration, evaluation mode. What differs: its
parameters are read-only views of the node's one copy and require no gradient, and a checkpoint that
lacks weights is an error.

The library itself is imported when it is first used.
"""

from __future__ import annotations

from engine_client.integrations.transformers.model import from_pretrained, weights_of

__all__ = ["from_pretrained", "weights_of"]
