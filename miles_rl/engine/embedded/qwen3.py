"""The Qwen3 dense architecture, written for many short sequences at once.

One pass takes a flat list of tokens, some decoding and some prefilling, so that every matrix product is shared.
Query, key and value projections are one matrix, gate and up another. Weights are never changed in place: an update
builds a new object, so a failed update leaves the old one as it was. Checked against transformers'
`Qwen3ForCausalLM`, whose order of roundings in bfloat16 is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from miles_rl.engine.embedded.kv import KvShape
from miles_rl.engine.embedded.row_counts import Product, RowCounts, multiply
from miles_rl.engine.embedded.weights import Tensors, check_shapes

AttentionFunction = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Qwen3Config:
    """Sizes of one model, from its `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Qwen3Config:
        """Missing keys take the defaults of transformers' `Qwen3Config`."""
        num_heads = config.get("num_attention_heads", 32)
        return cls(
            vocab_size=config.get("vocab_size", 151936),
            hidden_size=config.get("hidden_size", 4096),
            intermediate_size=config.get("intermediate_size", 22016),
            num_layers=config.get("num_hidden_layers", 32),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or 128,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
            tie_word_embeddings=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
        )

    def kv_shape(self, dtype: torch.dtype, device: torch.device) -> KvShape:
        """Sizes of the keys and values."""
        groups = self.num_heads // self.num_kv_heads
        return KvShape(self.num_layers, self.num_kv_heads, groups, self.head_dim, dtype, device)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of the model, as in its files."""
        hidden, query, key = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab_size, hidden),
            "model.norm.weight": (hidden,),
        }
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
            shapes[f"{prefix}self_attn.q_norm.weight"] = (self.head_dim,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (self.head_dim,)
            for name, rows in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
                shapes[f"{prefix}self_attn.{name}.weight"] = (rows, hidden)
                if self.attention_bias:
                    shapes[f"{prefix}self_attn.{name}.bias"] = (rows,)
            shapes[f"{prefix}self_attn.o_proj.weight"] = (hidden, query)
            if self.attention_bias:
                shapes[f"{prefix}self_attn.o_proj.bias"] = (hidden,)
            shapes[f"{prefix}mlp.gate_proj.weight"] = (self.intermediate_size, hidden)
            shapes[f"{prefix}mlp.up_proj.weight"] = (self.intermediate_size, hidden)
            shapes[f"{prefix}mlp.down_proj.weight"] = (hidden, self.intermediate_size)
        return shapes


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def why_not(config: Mapping[str, Any]) -> str | None:
    """What about the model this fast path does not cover; None if it covers all."""
    rope = _rope(config)
    kinds = (rope.get("rope_type", rope.get("type", "default")), config.get("hidden_act", "silu"))
    if config.get("model_type") != "qwen3":
        return f"model_type {config.get('model_type')}"
    if kinds != ("default", "silu"):
        return f"rope {kinds[0]} with activation {kinds[1]}"
    if config.get("use_sliding_window") or set(config.get("layer_types") or ()) - {"full_attention"}:
        return "sliding window attention"
    if config.get("quantization_config"):
        return "quantized weights"
    return None


def _projection(weight: torch.Tensor) -> torch.Tensor:
    """`weight` [out, in] as [in, out]. On a CPU in that order in memory too: small batches are up to twice as fast."""
    return weight.t().contiguous() if weight.device.type == "cpu" else weight.t()


class _Layer:
    """The tensors of one block, products merged; the file's own tensors are views into them."""

    def __init__(self, config: Qwen3Config, take: Callable[[str], torch.Tensor], prefix: str) -> None:
        attention = f"{prefix}self_attn."
        self.input_norm = take(f"{prefix}input_layernorm.weight")
        self.post_norm = take(f"{prefix}post_attention_layernorm.weight")
        self.q_norm, self.k_norm = take(f"{attention}q_norm.weight"), take(f"{attention}k_norm.weight")
        self.qk_norm = torch.cat(
            [self.q_norm.expand(config.num_heads, -1), self.k_norm.expand(config.num_kv_heads, -1)]
        )
        names = [f"{attention}{name}_proj" for name in "qkv"]
        self.qkv = _projection(torch.cat([take(f"{name}.weight") for name in names]))
        biased = config.attention_bias
        self.qkv_bias = torch.cat([take(f"{name}.bias") for name in names]) if biased else None
        self.out = _projection(take(f"{attention}o_proj.weight"))
        self.out_bias = take(f"{attention}o_proj.bias") if biased else None
        gate, up = take(f"{prefix}mlp.gate_proj.weight"), take(f"{prefix}mlp.up_proj.weight")
        self.gate_up = _projection(torch.cat([gate, up]))
        self.down = _projection(take(f"{prefix}mlp.down_proj.weight"))

    def named(self, config: Qwen3Config, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors under the names in the model's files."""
        attention = f"{prefix}self_attn."
        sizes = [config.num_heads * config.head_dim] + 2 * [config.num_kv_heads * config.head_dim]
        yield f"{prefix}input_layernorm.weight", self.input_norm
        yield f"{prefix}post_attention_layernorm.weight", self.post_norm
        yield f"{attention}q_norm.weight", self.q_norm
        yield f"{attention}k_norm.weight", self.k_norm
        for kind, merged in (("weight", self.qkv.t()), ("bias", self.qkv_bias)):
            if merged is not None:
                for name, part in zip("qkv", merged.split(sizes), strict=True):
                    yield f"{attention}{name}_proj.{kind}", part
        yield f"{attention}o_proj.weight", self.out.t()
        if self.out_bias is not None:
            yield f"{attention}o_proj.bias", self.out_bias
        gate, up = self.gate_up.t().chunk(2)
        yield f"{prefix}mlp.gate_proj.weight", gate
        yield f"{prefix}mlp.up_proj.weight", up
        yield f"{prefix}mlp.down_proj.weight", self.down.t()


class Qwen3:
    """Weights of one version and the pass through them. Raises `WeightsError` if `tensors` do not fit `config`.

    With `counts` set, all products keep to them, so that the bits of a row depend on that row alone.
    """

    def __init__(
        self,
        config: Qwen3Config,
        tensors: Tensors,
        dtype: torch.dtype,
        device: torch.device,
        counts: RowCounts | None = None,
    ) -> None:
        self.config, self.dtype, self.device, self.counts = config, dtype, device, counts
        shapes = config.tensor_shapes()
        # Some exporters write the head of a tied model too; transformers then ignores it, and so do we.
        self._names_tied_head = config.tie_word_embeddings and "lm_head.weight" in tensors
        check_shapes(shapes, {name: t for name, t in tensors.items() if name in shapes or name != "lm_head.weight"})

        def take(name: str) -> torch.Tensor:
            return tensors[name].to(device=device, dtype=dtype)

        self.embedding = take("model.embed_tokens.weight")
        self.norm = take("model.norm.weight")
        self.head = _projection(self.embedding if config.tie_word_embeddings else take("lm_head.weight"))
        self.layers = [_Layer(config, take, f"model.layers.{i}.") for i in range(config.num_layers)]
        self._cos, self._sin = self._rotations(0)
        self._eps = torch.tensor(config.rms_norm_eps, device=device)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor in force, under the names in the model's files."""
        yield "model.embed_tokens.weight", self.embedding
        yield "model.norm.weight", self.norm
        if self._names_tied_head or not self.config.tie_word_embeddings:
            yield "lm_head.weight", self.head.t()
        for index, layer in enumerate(self.layers):
            yield from layer.named(self.config, f"model.layers.{index}.")

    def hidden(
        self, ids: torch.Tensor, positions: torch.Tensor, longest: int, attend: AttentionFunction
    ) -> torch.Tensor:
        """Last hidden states [N, hidden] before the final norm, of tokens `ids` [N] at `positions` [N] below `longest`.

        N is a number that `counts`, if set, leave as it is when they pad.
        `attend(layer, queries [N, H, D], keys [N, K, D], values [N, K, D])` stores and attends; returns [N, H * D].
        """
        config = self.config
        num_qk = config.num_heads + config.num_kv_heads
        if longest > self._cos.shape[0]:
            self._cos, self._sin = self._rotations(2 * longest)
        cos, sin = self._cos[positions], self._sin[positions]
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            qkv = self._product(self._rms_norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
            qkv = qkv.view(x.shape[0], num_qk + config.num_kv_heads, config.head_dim)
            qk = self._rms_norm(qkv[:, :num_qk], layer.qk_norm)
            qk = torch.addcmul(qk * cos, qk.roll(config.head_dim // 2, -1), sin)
            attended = attend(index, qk[:, : config.num_heads], qk[:, config.num_heads :], qkv[:, num_qk:])
            x = x + self._product(attended, layer.out, layer.out_bias)
            gate, up = self._product(self._rms_norm(x, layer.post_norm), layer.gate_up).chunk(2, dim=-1)
            x = x + self._product(F.silu(gate).mul_(up), layer.down)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] from hidden states [N, hidden]."""
        count = hidden.shape[0]
        if self.counts is not None and (surplus := self.counts.padded(count) - count):
            return self.logits(F.pad(hidden, (0, 0, 0, surplus)))[:count]
        return self._product(self._rms_norm(hidden, self.norm), self.head)

    def products(self) -> Iterator[Product]:
        """Every projection of a pass, with its bias."""
        yield self.head, None
        for layer in self.layers:
            yield from ((layer.qkv, layer.qkv_bias), (layer.out, layer.out_bias))
            yield from ((layer.gate_up, None), (layer.down, None))

    def _product(self, x: torch.Tensor, projection: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.counts is None or x.shape[0] <= self.counts.most:
            # `multiply`, without the call: this is most of what a small batch waits for.
            return x @ projection if bias is None else torch.addmm(bias, x, projection)
        return torch.cat([multiply(part, (projection, bias)) for part in x.split(self.counts.most)])

    def _rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.dtype is torch.float32:
            # Fewer and cheaper operations than torch's own on a CPU.
            norm = torch.linalg.vector_norm(x, 2, -1, True)
            return (x * torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()).mul_(weight)
        return weight * F.rms_norm(x.float(), (x.shape[-1],), None, self.config.rms_norm_eps).to(self.dtype)

    def _rotations(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [num_positions, 1, D]; the first half of sin is negated, which makes a roll into a rotation."""
        dim = self.config.head_dim
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        angles = torch.outer(torch.arange(num_positions).float(), 1.0 / self.config.rope_theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        pair = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
        cos, sin = (table[:, None].to(device=self.device, dtype=self.dtype) for table in pair)
        return cos, sin
