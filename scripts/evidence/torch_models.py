"""Models in PyTorch that scripts/evidence/bench_peers.py compares MinText with, from tokens to logits."""

from typing import Any, NamedTuple


class Case(NamedTuple):
    """A model and its batch, for both sides."""

    keys: list[str]  # MinText's keys, in addition to those of `base`
    kind: str  # of PyTorch's model: a key of TORCH_MODELS
    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    rows: int
    length: int
    steps: int  # per turn
    base: str = "quickstart.yml"
    documents: int = 4  # per row
    dtype: str = "float32"  # of matmuls and activations


def torch_llama(case: Case) -> Any:
    """Builds transformers' Llama in a case's sizes, from tokens to logits."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=case.vocabulary,
            hidden_size=case.width,
            intermediate_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.heads,
            max_position_embeddings=case.length,
            use_cache=False,
        )
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = llama

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.llama(tokens).logits

    return Logits()


def torch_gpt(case: Case) -> Any:
    """Builds a GPT-2 in a case's sizes: learned positions, LayerNorm before, GELU, tied embeddings, no biases."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.LayerNorm(case.width, bias=False)
            self.qkv = nn.Linear(case.width, 3 * case.width, bias=False)
            self.out = nn.Linear(case.width, case.width, bias=False)
            self.mlp_norm = nn.LayerNorm(case.width, bias=False)
            self.up = nn.Linear(case.width, case.hidden, bias=False)
            self.down = nn.Linear(case.hidden, case.width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = (x.shape[0], x.shape[1], case.heads, case.width // case.heads)
            q, k, v = (part.view(heads).transpose(1, 2) for part in self.qkv(self.attention_norm(x)).chunk(3, -1))
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(case.vocabulary, case.width)
            self.positions = nn.Embedding(case.length, case.width)
            self.layers = nn.ModuleList(Layer() for _ in range(case.layers))
            self.norm = nn.LayerNorm(case.width, bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens) + self.positions(torch.arange(case.length, device=tokens.device))
            x = x.to(getattr(torch, case.dtype))  # autocast would leave it in float32
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.embedding.weight.T

    return Gpt()


def torch_llama_modules(case: Case) -> Any:
    """Builds a Llama of PyTorch's modules: transformers' gets a mask when compiled, without a fused kernel."""
    import torch
    from torch import nn
    from torch.nn import functional

    H = case.width // case.heads

    def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.mlp_norm = (nn.RMSNorm(case.width, eps=1e-5) for _ in range(2))
            self.q, self.k, self.v, self.out = (nn.Linear(case.width, case.width, bias=False) for _ in range(4))
            self.gate, self.up = (nn.Linear(case.width, case.hidden, bias=False) for _ in range(2))
            self.down = nn.Linear(case.hidden, case.width, bias=False)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            normed = self.attention_norm(x)
            q, k, v = (
                project(normed).view(*x.shape[:2], case.heads, H).transpose(1, 2)
                for project in (self.q, self.k, self.v)
            )
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
            normed = self.mlp_norm(x)
            return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(case.vocabulary, case.width)
            self.layers = nn.ModuleList(Layer() for _ in range(case.layers))
            self.norm = nn.RMSNorm(case.width, eps=1e-5)
            self.logits = nn.Linear(case.width, case.vocabulary, bias=False)
            angles = torch.outer(torch.arange(case.length), 10_000 ** (-torch.arange(0, H, 2) / H))
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens).to(getattr(torch, case.dtype))  # autocast would leave it in float32
            for layer in self.layers:
                x = layer(x, self.cos, self.sin)
            return self.logits(self.norm(x))

    return Llama()


TORCH_MODELS = {"gpt": torch_gpt, "llama": torch_llama, "llama_modules": torch_llama_modules}
