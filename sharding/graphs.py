"""Approximate nearest neighbours: what a graph over many vectors answers with keys, and on what it runs.

    HnswGraph     a CPU: usearch, float16, grows and shrinks in place
    CudaGraph     a GPU: cuVS, brute force for fewer than CAGRA_FROM vectors and CAGRA above, built anew when it changed

A graph calibrates itself: how widely it has to search is measured on its own vectors against exact search, until its
recall is RECALL. One that would have to look at too many for that (random vectors, which are near nothing) says that it
is not `worthwhile`, and exact search is used instead. `fact_index.py` decides who is asked.

`CudaGraph` was written from the documentation and has not run yet: no machine at hand had a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Keys = NDArray[np.int64]

CAGRA_FROM = 20_000  # CAGRA fails or loses recall on small sets (cuvs#626, #1021)
RECALL = 0.995  # of the sample; 0.99 is promised
SAMPLE = 64
K = 10  # at which recall is measured
WIDTHS = (64, 128, 256, 512, 1024, 2048)
WORTH = 4  # a random access costs about as much as so many rows in a matrix product


class Graph(Protocol):
    """Vectors are float32, normalised, [n, dim]; keys are not negative and given out once. Not thread-safe."""

    worthwhile: bool

    def add(self, keys: Keys, vectors: Float32) -> None:
        """Keys that are not in the graph."""

    def remove(self, key: int) -> None:
        """Of a key that is in the graph."""

    def calibrate(self) -> None:
        """Find out how widely to search, after the graph has grown much."""

    def search(self, query: Float32, count: int) -> Keys:
        """About the `count` nearest to `query` [dim]."""

    def __len__(self) -> int: ...


def open_graph(dim: int) -> Graph:
    """The graph for the device that this process has."""
    return CudaGraph(dim) if has_cuvs() else HnswGraph(dim)


class HnswGraph:
    """A hierarchical navigable small world (Malkov and Yashunin, arXiv:1603.09320)."""

    def __init__(self, dim: int) -> None:
        from usearch.index import Index

        self.worthwhile = False
        self._index: Any = Index(ndim=dim, metric="ip", dtype="f16", connectivity=32, expansion_add=128)

    def __len__(self) -> int:
        return len(self._index)

    def add(self, keys: Keys, vectors: Float32) -> None:
        self._index.add(keys, vectors, threads=1, copy=True)

    def remove(self, key: int) -> None:
        self._index.remove(key)

    def calibrate(self) -> None:
        count = len(self)
        self.worthwhile = False
        if count < 10 * K:
            return
        random = np.random.default_rng(count)
        keys = np.asarray(self._index.keys)[random.integers(0, count, SAMPLE)]
        queries = questions_about(np.asarray(self._index.get(keys), np.float32), random)
        exact = self._index.search(queries, K, exact=True, threads=1)
        for width in WIDTHS:
            self._index.expansion_search = width
            found = self._index.search(queries, K, threads=1)
            if found.computed_distances / SAMPLE > count / WORTH:
                return
            hits = sum(len(np.intersect1d(*pair)) for pair in zip(exact.keys, found.keys, strict=True))
            if hits >= RECALL * SAMPLE * K:
                self.worthwhile = True
                return

    def search(self, query: Float32, count: int) -> Keys:
        return np.asarray(self._index.search(query, count, threads=1).keys, np.int64)


class CudaGraph:
    """Holds the vectors in main memory too, and uploads and builds anew when they changed by a tenth."""

    REBUILD_PART = 0.1

    def __init__(self, dim: int) -> None:
        self.worthwhile = True
        self._vectors: dict[int, Float32] = {}
        self._dim = dim
        self._built: Any = None
        self._keys: Keys = np.empty(0, np.int64)  # of the rows of what is built
        self._dataset: Any = None  # cuVS keeps a reference only
        self._changes = 0

    def __len__(self) -> int:
        return len(self._vectors)

    def add(self, keys: Keys, vectors: Float32) -> None:
        self._vectors.update(zip(keys.tolist(), vectors, strict=True))
        self._change(len(keys))

    def remove(self, key: int) -> None:
        del self._vectors[key]
        self._change(1)

    def calibrate(self) -> None:
        self._build()

    def search(self, query: Float32, count: int) -> Keys:
        from cuvs.neighbors import brute_force, cagra
        from pylibraft.common import device_ndarray

        if self._built is None:
            self._build()
        fresh = [key for key in self._vectors if key not in set(self._keys.tolist())] if self._changes else []
        depth = min(len(self._keys), count + self._changes)
        asked = device_ndarray(query[np.newaxis])
        if isinstance(self._built, cagra.Index):
            wide = cagra.SearchParams(itopk_size=max(256, 32 * -(-depth // 16)))
            _, rows = cagra.search(wide, self._built, asked, depth)
        else:
            _, rows = brute_force.search(self._built, asked, depth)
        found = self._keys[np.asarray(rows.copy_to_host(), np.int64)[0]]
        alive = [key for key in found.tolist() if key in self._vectors]
        return np.array([*alive[:count], *fresh], np.int64)

    def _change(self, count: int) -> None:
        self._changes += count
        if self._changes > self.REBUILD_PART * max(1, len(self._keys)):
            self._built = None

    def _build(self) -> None:
        from cuvs.neighbors import brute_force, cagra
        from pylibraft.common import device_ndarray

        self._keys = np.fromiter(self._vectors, np.int64, len(self._vectors))
        self._dataset = device_ndarray(np.stack(list(self._vectors.values())))
        if len(self) < CAGRA_FROM:
            self._built = brute_force.build(self._dataset, metric="inner_product")
        else:
            params = cagra.IndexParams(metric="inner_product", graph_degree=64, intermediate_graph_degree=128)
            self._built = cagra.build(params, self._dataset)
        self._changes = 0


def questions_about(vectors: Float32, random: np.random.Generator) -> Float32:
    """Directions as near to `vectors` as questions are to facts: cosines of 0.7 (half of them) and 0.45."""
    noise = random.normal(size=vectors.shape)
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    noise[len(noise) // 2 :] *= 2.0
    asked = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12) + noise
    return np.asarray(asked / np.linalg.norm(asked, axis=1, keepdims=True), np.float32)


def has_cuvs() -> bool:
    """Whether cuVS is installed and sees a GPU: it imports without one, and raises at the first build."""
    try:
        import cuvs.neighbors  # noqa: F401
        from cuda.bindings import runtime
    except ImportError:
        return False
    error, count = runtime.cudaGetDeviceCount()
    return int(error) == 0 and count > 0
