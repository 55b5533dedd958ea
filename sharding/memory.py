"""One user's facts as a shard holds them, with their vector index: a cache over `FactStore`."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from sharding.fact_index import FactIndex
from sharding.fact_records import Fact, today
from sharding.ids import FactId, Placement


class UserMemory:
    """One user's facts in the order they were told, and their vector index. Vectors are float32 [dim].

    An embedding as it is stored is the fingerprint of the model that made it (`embedding_model`) and then the vector.
    Facts that were indexed do not keep theirs: the index holds it. Whoever changes Redis and then this does both under
    `write_lock`.
    """

    def __init__(
        self, placement: Placement, dim: int, facts: Iterable[Fact] = (), *, embedding_model: bytes = b""
    ) -> None:
        self.placement = placement
        self._embedding_model = embedding_model
        self.write_lock = asyncio.Lock()
        self._dim = dim
        self._facts: list[Fact] = []  # by seq
        self._by_id: dict[FactId, Fact] = {}
        self._expiring: dict[FactId, Fact] = {}  # those with a last day, which are few
        self._index = FactIndex(dim)
        self.add(facts)

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, fact_id: object) -> bool:
        return fact_id in self._by_id

    @property
    def facts(self) -> Sequence[Fact]:
        """All facts, oldest first, also expired ones. A view: it changes with the memory."""
        return self._facts

    def expired(self) -> set[FactId]:
        """Facts whose last day has passed."""
        now = today()
        return {id for id, fact in self._expiring.items() if fact.expired(now)}

    def current(self) -> list[Fact]:
        """The facts that may be served today, oldest first."""
        expired = self.expired()
        return [fact for fact in self._facts if fact.id not in expired]

    def get(self, fact_id: FactId) -> Fact | None:
        return self._by_id.get(fact_id)

    def add(self, facts: Iterable[Fact]) -> None:
        """Add facts in any order, indexing those that have an embedding; facts already held are passed over."""
        embeddings: dict[FactId, bytes] = {}
        for fact in sorted(facts, key=_seq):
            if fact.id in self._by_id:
                continue
            if fact.embedding is not None:
                embeddings[fact.id] = fact.embedding
            held = replace(fact, embedding=None)
            self._facts.insert(bisect_left(self._facts, fact.seq, key=_seq), held)
            self._keep(held)
        self.put_embeddings(embeddings)

    def replace(self, fact: Fact, embedding: bytes | None) -> None:
        """Put a new version in the place of the one that is held; `embedding` is None where the text is the same.
        Raises KeyError for a fact not held."""
        held = replace(fact, embedding=None)
        self._facts[bisect_left(self._facts, self._by_id[fact.id].seq, key=_seq)] = held
        self._keep(held)
        if embedding is not None:
            self.put_embeddings({fact.id: embedding})

    def _keep(self, held: Fact) -> None:
        self._by_id[held.id] = held
        self._expiring.pop(held.id, None)
        if held.expires_on is not None:
            self._expiring[held.id] = held

    def put_embeddings(self, embeddings: Mapping[FactId, bytes]) -> None:
        """Index facts by their embedding; one that cannot be used, or of a fact not held, is ignored.

        Another fingerprint or size means made by another embedding model, not finite means damaged: the fact goes on
        to need an embedding.
        """
        model, size = self._embedding_model, len(self._embedding_model) + 4 * self._dim
        usable = {id: e for id, e in embeddings.items() if len(e) == size and e.startswith(model)}
        ids = [id for id in usable if id in self._by_id]
        data = b"".join(usable[id][len(model) :] for id in ids)
        vectors = np.frombuffer(data, "<f4").reshape(len(ids), self._dim)
        finite = np.isfinite(vectors).all(axis=1)
        self._index.add([id for id, whole in zip(ids, finite, strict=True) if whole], vectors[finite])

    def remove(self, fact_id: FactId) -> bool:
        """Forget a fact; False if it is not held."""
        fact = self._by_id.pop(fact_id, None)
        if fact is None:
            return False
        del self._facts[bisect_left(self._facts, fact.seq, key=_seq)]
        self._expiring.pop(fact_id, None)
        self._index.remove(fact_id)
        return True

    def clear(self) -> None:
        """Forget every fact."""
        self._facts.clear()
        self._by_id.clear()
        self._expiring.clear()
        self._index = FactIndex(self._dim)

    def facts_without_embedding(self) -> list[Fact]:
        """Facts that a search cannot find yet, oldest first."""
        return [fact for fact in self._facts if fact.id not in self._index]

    def search(self, vector: ArrayLike, k: int) -> list[Fact]:
        """The at most k facts nearest to `vector` [dim] that may be served today, nearest first."""
        return [fact for fact, _ in self.search_scored(vector, k)]

    def search_scored(
        self,
        vector: ArrayLike,
        k: int,
        passes: Callable[[Fact], bool] | None = None,
        *,
        with_expired: bool = False,
    ) -> list[tuple[Fact, float]]:
        """As `search`, of the facts that pass, each with its cosine."""
        hidden = set() if with_expired else self.expired()
        depth = k + len(hidden) if passes is None else max(64, 4 * k)
        while True:
            nearest = self._index.search(vector, depth)
            found = [(self._by_id[id], score) for id, score in nearest if id not in hidden]
            if passes is not None:
                found = [one for one in found if passes(one[0])]
            if len(found) >= k or len(nearest) < depth:
                return found[:k]
            depth *= 4

    def check_integrity(self) -> None:
        """Raise AssertionError unless list, lookup and index tell of the same facts."""
        seqs = [fact.seq for fact in self._facts]
        assert seqs == sorted(set(seqs)), "facts are not in the order of their seq"
        assert {fact.id: fact for fact in self._facts} == self._by_id, "list and lookup differ"
        indexed = len(self._facts) - len(self.facts_without_embedding())
        assert indexed == len(self._index), "the index holds facts that the memory does not"


def _seq(fact: Fact) -> int:
    return fact.seq
