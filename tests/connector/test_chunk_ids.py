"""A chunk's id changes with everything its bytes depend on, and with nothing else; salts keep users and kinds apart."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from connector.chunk import Chunk, ChunkId, KVShape, chunk_id, memory_salt, text_salt

names = st.text(max_size=12)
token_lists = st.lists(st.integers(0, 200_000), max_size=8)
refs = st.lists(st.tuples(st.integers(0, 99).map(lambda n: ChunkId(f"{n:032x}")), st.integers(1, 50)), max_size=6)
inputs = st.tuples(names, names, token_lists, token_lists)


@given(inputs, inputs)
def test_two_chunks_share_an_id_only_where_model_owner_prefix_and_tokens_are_the_same(
    one: tuple[str, str, list[int], list[int]], other: tuple[str, str, list[int], list[int]]
) -> None:
    assert (chunk_id(*one) == chunk_id(*other)) == (one == other)


@given(inputs, st.integers(0, 3), st.data())
def test_changing_any_single_part_changes_the_id(
    whole: tuple[str, str, list[int], list[int]], part: int, data: st.DataObject
) -> None:
    changed = list(whole)
    changed[part] = data.draw(names if part < 2 else token_lists)
    assume(changed[part] != whole[part])
    assert chunk_id(*changed) != chunk_id(*whole)  # type: ignore[arg-type]


@given(names, names, token_lists, st.data())
def test_the_border_between_prefix_and_tokens_matters(
    model: str, owner: str, tokens: list[int], data: st.DataObject
) -> None:
    cuts = st.integers(0, len(tokens))
    one, other = data.draw(cuts), data.draw(cuts)
    ids = {chunk_id(model, owner, tokens[:cut], tokens[cut:]) for cut in (one, other)}
    assert len(ids) == len({one, other})


@given(st.text(min_size=1, max_size=12), st.data())
def test_the_border_between_model_and_owner_matters(name: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(name)))
    assert chunk_id(name[:cut], name[cut:], (), (1,)) != chunk_id("", name, (), (1,))


@given(inputs)
def test_an_id_is_32_hexadecimal_digits_and_does_not_care_how_tokens_are_held(
    whole: tuple[str, str, list[int], list[int]],
) -> None:
    model, owner, prefix, tokens = whole
    id_ = chunk_id(model, owner, prefix, tokens)
    assert len(id_) == 32
    int(id_, 16)
    assert chunk_id(model, owner, tuple(prefix), tuple(tokens)) == id_


@given(names, refs, names, refs)
def test_two_compositions_share_a_salt_only_for_one_owner_and_the_same_chunks_in_the_same_order(
    owner: str, chunks: list[tuple[ChunkId, int]], other_owner: str, other_chunks: list[tuple[ChunkId, int]]
) -> None:
    same = owner == other_owner and [id_ for id_, _ in chunks] == [id_ for id_, _ in other_chunks]
    assert (memory_salt(owner, chunks) == memory_salt(other_owner, other_chunks)) == same


@given(names, refs, names)
def test_the_salt_of_injected_memory_is_never_one_of_text(
    owner: str, chunks: list[tuple[ChunkId, int]], anybody: str
) -> None:
    assert memory_salt(owner, chunks) != text_salt(anybody)


@given(names, names)
def test_text_of_two_owners_has_two_salts(owner: str, other: str) -> None:
    assert (text_salt(owner) == text_salt(other)) == (owner == other)


def test_a_chunk_takes_as_many_bytes_as_its_shape_says() -> None:
    shape = KVShape(layers=3, kv_heads=2, head_dim=5, dtype=torch.bfloat16)
    kv = torch.zeros(3, 2, 7, 2, 5, dtype=torch.bfloat16)
    assert Chunk(ChunkId("c"), 0, kv).tokens == 7
    assert kv.numel() * kv.element_size() == 7 * shape.token_bytes
