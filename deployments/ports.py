"""What the shard asks of an embedding model, whichever it is; `connector.port` says the same of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Embeds(Protocol):
    """See `deployments.embedder.Embedder`."""

    dim: int
    model: bytes  # the same for the same model only

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]: ...

    def close(self) -> None: ...
