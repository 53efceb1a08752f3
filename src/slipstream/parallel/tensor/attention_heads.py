"""The attention heads of a module: whether tensor ranks can share them, and the sizes that its code reads then."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from slipstream.errors import SlipstreamError

_NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_NUM_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class AttentionHeads:
    """The number of query heads and key-value heads (fewer with grouped queries) and the size of each."""

    num_heads: int
    num_key_value_heads: int
    size: int

    @classmethod
    def of(cls, attention: nn.Module, config: Any) -> AttentionHeads:
        """Returns the heads of an attention module of a model of transformers."""
        num_heads = config.num_attention_heads
        sizes = (getattr(attention, "head_dim", None), getattr(attention, "head_size", None))
        size = next((size for size in sizes if size), None) or config.hidden_size // num_heads
        return cls(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, size)

    def check(self, name: str, tensor_ranks: int) -> None:
        """Raises SlipstreamError where `tensor_ranks` ranks can't each have equally many heads."""
        if self.num_heads % tensor_ranks:
            raise SlipstreamError(
                f"{name} has {self.num_heads} attention heads, which {tensor_ranks} tensor ranks can't share evenly. "
                f"Choose tp from the divisors of {self.num_heads}."
            )
        if self.num_key_value_heads % tensor_ranks and tensor_ranks % self.num_key_value_heads:
            raise SlipstreamError(
                f"{name} has {self.num_key_value_heads} key-value heads for {self.num_heads} query heads: "
                f"{tensor_ranks} tensor ranks can neither share them evenly nor each have one. Choose a tp that "
                f"divides {self.num_key_value_heads}, or a multiple of it that divides {self.num_heads}."
            )

    def num_parts(self, num_rows: int, tensor_ranks: int) -> int:
        """Returns into how many parts a weight of `num_rows` output features is cut: fewer than ranks if they share
        a head."""
        is_key_or_value = num_rows == self.num_key_value_heads * self.size != self.num_heads * self.size
        return min(tensor_ranks, self.num_key_value_heads) if is_key_or_value else tensor_ranks

    def matrices(self) -> tuple[int, int, int]:
        """Returns the output features of query, key and value where one weight has all three, one after the other."""
        return self.num_heads * self.size, self.num_key_value_heads * self.size, self.num_key_value_heads * self.size

    def local(self, tensor_ranks: int) -> AttentionHeads:
        """Returns the heads of one rank."""
        return AttentionHeads(
            self.num_heads // tensor_ranks, max(1, self.num_key_value_heads // tensor_ranks), self.size
        )

    def attributes(self, attention: nn.Module, tensor_ranks: int) -> dict[str, int]:
        """Returns those sizes that `attention` keeps as attributes and that differ on a rank, with their values
        there."""
        whole, local = self._attributes(), self.local(tensor_ranks)._attributes()
        known = [name for name in whole if vars(attention).get(name) == whole[name]]
        return {name: local[name] for name in known if local[name] != whole[name]}

    def _attributes(self) -> dict[str, int]:
        return {
            **dict.fromkeys(_NUM_HEADS, self.num_heads),
            **dict.fromkeys(_NUM_KEY_VALUE_HEADS, self.num_key_value_heads),
            "num_key_value_groups": self.num_heads // self.num_key_value_heads,
            "split_size": self.num_heads * self.size,  # GPT-2's size of query, key and value
        }


def is_attention(module: nn.Module) -> bool:
    """Returns whether a module is an attention module of transformers, by what these have in common."""
    return hasattr(module, "is_causal") or "attention" in type(module).__name__.lower()
