"""The vLLM plugin against a real vLLM: `make test-vllm`. Not part of `make test`, for its size."""
