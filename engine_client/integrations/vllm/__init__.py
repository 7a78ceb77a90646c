"""vLLM on shared weights: a plugin that adds the load format `weight_broker`.

    vllm serve MODEL --load-format weight_broker

The first engine (each of its ranks for its own shard) loads as vLLM does and publishes; every
other one, and every restart, maps what is there. Nothing of vLLM runs in the broker. docs/vllm.md
is the user's page. Only `plugin`, `loader`, `loading` and `runtime` import vLLM; the rest is
tested without.
"""
