"""The attention backends' own cache update, of the two kinds that there are, behind one form.

    plain    do_kv_cache_update(layer, key, value, kv_cache, slots)
    latent   do_kv_cache_update(latent, rotated, kv_cache, slots, kv_cache_dtype, scale)

It knows the cache's layout, packing and scaling. Called, it writes what we composed; wrapped, it shows what an ordinary
forward pass caches: keys as they are rotated, before any quantisation, of this rank's heads.

Multi-head latent attention (DeepSeek-V2, section 2.1) caches one row a token, out of which every head's keys and
values are computed again: first a latent without position, then the one part that is rotated. A chunk of it has one
part in place of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

TakeRows = Callable[[torch.Tensor], torch.Tensor]
"""int64 `[n]` rows of a batch -> `[parts, n, kv_heads, head_dim]`, as a chunk holds them."""

Seen = Callable[[torch.Tensor, TakeRows], None]
"""Called with the batch's slots, after each update."""


class CacheUpdate(Protocol):
    """One layer's. `parts` and `rotated_from` as in `KVShape`."""

    parts: int
    kv_heads: int
    head_dim: int
    rotated_from: int
    dtype: torch.dtype

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes `[tokens, kv_heads, head_dim]` into int64 `[tokens]` slots of the cache."""

    def watch(self, seen: Seen) -> None:
        """From now on, `seen` hears of every update but those of `write`."""


class PlainUpdate:
    """Of ordinary attention: keys and values of each head."""

    parts = 2
    rotated_from = 0

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        self.kv_heads = int(layer.num_kv_heads)
        self.head_dim = int(layer.head_size)
        self.dtype: torch.dtype = layer.dtype
        self._layer = layer
        self._cache = cache
        self._update = layer.impl.do_kv_cache_update

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        self._update(self._layer, keys, values, self._cache, slots)

    def watch(self, seen: Seen) -> None:
        def do_kv_cache_update(
            layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
        ) -> None:
            self._update(layer, key, value, kv_cache, slot_mapping)
            seen(slot_mapping, lambda rows: torch.stack((key[rows], value[rows])))

        self._layer.impl.do_kv_cache_update = do_kv_cache_update


class LatentUpdate:
    """Of multi-head latent attention; written rows come as `keys`, and `values` says nothing more."""

    parts = 1
    kv_heads = 1

    def __init__(self, layer: Any, cache: torch.Tensor) -> None:
        self.head_dim = int(layer.head_size)
        self.rotated_from = int(layer.kv_lora_rank)
        self.dtype: torch.dtype = cache.dtype
        self._layer = layer
        self._cache = cache.squeeze(1)  # [blocks, 1, block_tokens, head_dim], as vLLM binds it to the layer
        self._update = layer.impl.do_kv_cache_update

    def write(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rotated = keys[:, 0, : self.rotated_from], keys[:, :, self.rotated_from :]
        layer = self._layer
        self._update(
            latent.contiguous(), rotated.contiguous(), self._cache, slots, layer.kv_cache_dtype, layer._k_scale
        )

    def watch(self, seen: Seen) -> None:
        def do_kv_cache_update(
            kv_c_normed: torch.Tensor,
            k_pe: torch.Tensor,
            kv_cache: torch.Tensor,
            slot_mapping: torch.Tensor,
            kv_cache_dtype: str,
            k_scale: torch.Tensor,
        ) -> None:
            self._update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale)

            def take(rows: torch.Tensor) -> torch.Tensor:
                return torch.cat((kv_c_normed[rows], k_pe[rows].flatten(1)), dim=-1)[None, :, None]

            seen(slot_mapping.flatten(), take)

        self._layer.impl.do_kv_cache_update = do_kv_cache_update
