"""A causal language model of the Llama family: the model code of the tiny engine.

Names are those of Llama checkpoints, so weights fit by name. Nothing here knows of the broker.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

Cache: TypeAlias = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer so far: [batch, key/value heads, positions, head size]."""


@dataclass(frozen=True)
class Shape:
    """What a checkpoint's config.json says of the model."""

    vocab: int
    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    epsilon: float
    theta: float
    tied: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, folder: str | Path) -> Shape:
        """Read it. Refuses other families: their weights would fit no place here."""
        said = json.loads((Path(folder) / "config.json").read_text())
        if said.get("model_type") != "llama":
            raise SystemExit(f"{folder} is a {said.get('model_type')!r}; this engine runs Llamas")
        rope = said.get("rope_parameters") or said.get("rope_scaling") or {}
        if rope.get("rope_type", "default") != "default" or said.get("hidden_act") != "silu":
            raise SystemExit(f"{folder} is a Llama with extensions that this engine lacks")
        heads = said["num_attention_heads"]
        return cls(
            vocab=said["vocab_size"],
            width=said["hidden_size"],
            inner=said["intermediate_size"],
            layers=said["num_hidden_layers"],
            heads=heads,
            kv_heads=said.get("num_key_value_heads") or heads,
            head=said.get("head_dim") or said["hidden_size"] // heads,
            epsilon=said["rms_norm_eps"],
            theta=rope.get("rope_theta") or said.get("rope_theta") or 10000.0,
            tied=said.get("tie_word_embeddings", False),
            dtype=getattr(torch, said.get("dtype") or said.get("torch_dtype") or "float32"),
        )


class Norm(nn.Module):
    """Root mean square norm, computed in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(hidden.dtype)


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Positions turn pairs of one number of the first and one of the second half of a head."""
    first, second = states.chunk(2, dim=-1)
    return states * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        def heads(states: Tensor) -> Tensor:
            return states.view(*states.shape[:2], -1, self.shape.head).transpose(1, 2)

        query = rotated(heads(self.q_proj(hidden)), cos, sin)
        key, value = rotated(heads(self.k_proj(hidden)), cos, sin), heads(self.v_proj(hidden))
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        # A first pass looks back only; each later one is of one position, which may see them all.
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=past is None, enable_gqa=True
        )
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2))
        return out, (key, value)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.inner, bias=False)
        self.down_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        gate = functional.silu(self.gate_proj(hidden))
        out: Tensor = self.down_proj(gate * self.up_proj(hidden))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.width, shape.epsilon)
        self.post_attention_layernorm = Norm(shape.width, shape.epsilon)

    def forward(
        self, hidden: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        mixed, kept = self.self_attn(self.input_layernorm(hidden), cos, sin, past)
        hidden = hidden + mixed
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), kept


class Trunk(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width, shape.epsilon)


class Llama(nn.Module):
    """A model whose parameters have the shapes and the dtype that the checkpoint's say."""

    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(shape.dtype)
        try:
            self.model = Trunk(shape)
            self.lm_head = nn.Linear(shape.width, shape.vocab, bias=False)
        finally:
            torch.set_default_dtype(before)
        if shape.tied:
            self.lm_head.weight = self.model.embed_tokens.weight
        steps = torch.arange(0, shape.head, 2, dtype=torch.int64).float() / shape.head
        self.register_buffer("frequencies", shape.theta**-steps, persistent=False)

    def forward(self, ids: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """Logits of the last position, and the cache to give along with the next token."""
        hidden: Tensor = self.model.embed_tokens(ids)
        start = cache[0][0].shape[2] if cache else 0
        at = torch.arange(start, start + ids.shape[1], device=ids.device, dtype=torch.float32)
        angles = torch.outer(at, self.frequencies).repeat(1, 2)
        cos, sin = angles.cos().to(hidden.dtype), angles.sin().to(hidden.dtype)
        kept: Cache = []
        for number, layer in enumerate(self.model.layers):
            hidden, states = layer(hidden, cos, sin, cache[number] if cache else None)
            kept.append(states)
        logits: Tensor = self.lm_head(self.model.norm(hidden[:, -1:]))
        return logits[:, -1], kept


@torch.inference_mode()
def generate(model: Llama, prompt: list[int], new: int) -> list[int]:
    """Greedy decoding: so many tokens more, each the most probable one."""
    where = model.frequencies.device
    ids, cache, made = torch.tensor([prompt], device=where), None, []
    for _ in range(new):
        logits, cache = model(ids, cache)
        ids = logits.argmax(-1, keepdim=True)
        made.append(int(ids))
    return made
