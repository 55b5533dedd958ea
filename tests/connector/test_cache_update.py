"""The two kinds of cache update: what is captured of a batch is what writing it elsewhere puts there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from toy_model import HEAD_DIM, HEADS, ToyAttention

from connector.cache_update import CacheUpdate, LatentUpdate, PlainUpdate, TakeRows

LATENT, ROTATED, BLOCKS, BLOCK = 6, 4, 3, 4


class LatentImpl:
    """Writes as vLLM's do: latent and rotated part apart, into a cache without a dimension of heads."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
    ) -> None:
        assert (kv_cache_dtype, float(k_scale)) == ("auto", 1.0)
        assert kv_cache.shape == (BLOCKS, BLOCK, LATENT + ROTATED)
        rows = torch.cat((kv_c_normed, k_pe.squeeze(1)), dim=-1)
        kv_cache.view(-1, LATENT + ROTATED)[slot_mapping] = rows


def captured_rows(update: CacheUpdate, forward: Any, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots that were heard of and those rows of the batch, over one forward pass."""
    heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def seen(slots: torch.Tensor, take: TakeRows) -> None:
        heard.append((slots, take(torch.tensor(rows))))

    update.watch(seen)
    forward()
    [one] = heard
    return one


def test_latent_attention_is_captured_as_one_part_and_written_back_as_it_was() -> None:
    layer: Any = SimpleNamespace(
        impl=LatentImpl(),
        head_size=LATENT + ROTATED,
        kv_lora_rank=LATENT,
        kv_cache_dtype="auto",
        _k_scale=torch.tensor(1.0),
    )
    cache = torch.zeros(BLOCKS, 1, BLOCK, LATENT + ROTATED)
    update = LatentUpdate(layer, cache)
    latent, rotated = torch.randn(3, LATENT), torch.randn(3, 1, ROTATED)

    def forward() -> None:
        layer.impl.do_kv_cache_update(
            latent, rotated, cache.squeeze(1), torch.tensor([7, 2, 5]), "auto", layer._k_scale
        )

    slots, part = captured_rows(update, forward, [2, 0])
    assert slots.tolist() == [7, 2, 5]
    assert part.shape == (update.parts, 2, update.kv_heads, update.head_dim)
    assert torch.equal(part[0, :, 0, : update.rotated_from], latent[[2, 0]])
    assert torch.equal(part[0, :, 0, update.rotated_from :], rotated[[2, 0], 0])
    update.write(part[0], part[-1], torch.tensor([11, 8]))
    by_slot = cache.view(-1, LATENT + ROTATED)
    assert torch.equal(by_slot[[11, 8]], by_slot[[5, 7]])


def test_plain_attention_is_captured_as_keys_and_values_and_written_back_as_it_was() -> None:
    layer = ToyAttention()
    cache = torch.zeros(12, 2, HEADS, HEAD_DIM)
    update = PlainUpdate(layer, cache)
    key, value = torch.randn(3, HEADS, HEAD_DIM), torch.randn(3, HEADS, HEAD_DIM)

    def forward() -> None:
        layer.impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([7, 2, 5]))

    _, parts = captured_rows(update, forward, [2, 0])
    assert torch.equal(parts, torch.stack((key[[2, 0]], value[[2, 0]])))
    update.write(parts[0], parts[-1], torch.tensor([11, 8]))
    assert torch.equal(cache[[11, 8]], cache[[5, 7]])
