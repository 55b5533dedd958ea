"""What the shard's process may ask of its workers: methods mixed into vLLM's worker class, called by `collective_rpc`.

They run between engine steps, so each is short. Only ids, counts and reasons cross.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.utils.network_utils import get_ip

from connector.chunk_file import ChunkFormat
from connector.groups import Door, dial
from connector.memory_connector import MemoryConnector
from connector.moves import Move
from connector.rotation_cpu import rotate_bfloat16
from connector.worker_side import WorkerSide

MOVE_WAIT_S = 0.003
"""How long an engine step may wait for a move that is all but done: one call less for what is short."""


class MemoryWorkerExtension:
    """Mixed into vLLM's worker (`worker_extension_cls`)."""

    model_runner: Any

    def memshard_prepare(self, file_key: bytes | None = None) -> dict[str, Any]:
        """Proves the model, and takes the key that files are sealed with. Returns `refusal` (a reason, or None) and,
        if there is none, the rank's `token_bytes`, the name of its `device`, and a `digest` of its weights' shapes,
        dtype, rotation and a sample of their values."""
        worker = _worker_side()
        model = self.model_runner.get_model()
        worker.prove(model, rotate_bfloat16)
        if worker.refusal is not None or worker.store is None or not worker.rotations:
            return {"refusal": worker.refusal or "its caches were never registered"}
        if worker.tiers is not None:
            worker.tiers.format = ChunkFormat(file_key)
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr(worker.store.shape).encode())
        for rotation in worker.rotations:
            digest.update(rotation.frequencies.cpu().numpy().tobytes() + bytes([rotation.neox]))
        for name, weight in model.named_parameters():
            sample = weight.detach().flatten()[:: max(1, weight.numel() // 64)].float().cpu()
            digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode() + sample.numpy().tobytes())
        about = {"token_bytes": worker.store.shape.token_bytes, "device": _name_of(worker.store.device)}
        return {"refusal": None, "digest": digest.hexdigest(), **about}

    def memshard_settle(self, ids: list[Any]) -> tuple[list[Any], list[Any]]:
        """Which captures are complete, and which had no room; all but the first are forgotten."""
        done, no_room = _worker_side().settle(ids)
        return list(done), list(no_room)

    def memshard_drop(self, ids: list[Any]) -> None:
        """Forgets chunks in memory."""
        _worker_side().drop(ids)

    def memshard_move(self, job: str, move: list[Any]) -> dict[Any, Any] | None:
        """Begins to move chunks between tiers (`tier_jobs.Move.plain`), and answers as `memshard_moved`."""
        if (tiers := _worker_side().tiers) is None:
            return {}
        tiers.begin(job, Move.of(move))
        return tiers.poll(job, MOVE_WAIT_S)

    def memshard_moved(self, job: str) -> dict[Any, Any] | None:
        """What became of a move's chunks, told once; None while it goes on."""
        tiers = _worker_side().tiers
        return tiers.poll(job) if tiers is not None else {}

    def memshard_listen(self, line: str, nccl: bool) -> tuple[str, int] | None:
        """Where the other end of a new line finds this one; None where there are no chunks. The line's name is the
        secret that lets it in."""
        if (tiers := _worker_side().tiers) is None:
            return None
        door = Door(_address(), line, tiers.device, nccl)
        tiers.lines.open(line, door.connect)
        return door.address

    def memshard_dial(self, line: str, doors: list[tuple[str, int]], nccl: bool) -> None:
        """Goes to the door of its own rank."""
        if (tiers := _worker_side().tiers) is not None:
            host, port = doors[tiers.rank]
            tiers.lines.open(line, lambda: dial((host, port), _address(), line, tiers.device, nccl))

    def memshard_hang_up(self, line: str) -> None:
        """What is on its way over the line fails."""
        if (tiers := _worker_side().tiers) is not None:
            tiers.lines.hang_up(line)

    def memshard_stats(self) -> dict[str, int]:
        """Chunks and bytes held, and counters since the start."""
        worker = _worker_side()
        worker.check_integrity()
        counted = {"chunks": 0, "bytes": 0, "host_chunks": 0, "host_bytes": 0}
        for prefix, store in (("", worker.store), ("host_", worker.host)):
            if store is not None:
                counted |= {f"{prefix}chunks": len(store), f"{prefix}bytes": store.bytes}
        lines = worker.tiers.lines.counters if worker.tiers is not None else {}
        return {**counted, **lines, **worker.counters}


def _worker_side() -> WorkerSide:
    connector = get_kv_transfer_group()
    assert isinstance(connector, MemoryConnector)
    return connector.worker


def _address() -> str:
    """This machine as others reach it, or as it reaches itself where it has no network."""
    found = str(get_ip())
    return "127.0.0.1" if found == "0.0.0.0" else found


def _name_of(device: torch.device) -> str:
    """The same for the same GPU only, on whichever machine; "cpu" for every CPU."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else device.type
