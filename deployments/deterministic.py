"""An engine without a model, for runs with more shards and users than a machine has room for models: load, chaos,
simulation. A tool: no setting of the product starts it, and the model that it serves is called `NAME`.

It stands behind the same port as the real one, so everything around it is real: placement, fencing, Redis, the encoder,
the ledger, moves. It answers with what it was given to read, so that a wrong answer shows:

    prompt  = the chunks' own tokens where chunks are injected, the request's tokens elsewhere
    answer  = "2 facts: 3f9a1c0b77d2e845 90b1…"      one `mark` a fact, in the prompt's order: the nearest is the last

Whoever knows the facts' texts can tell from the marks which facts were read, and would see a fact of another user, an
old version, or a deleted one. A fact is a line that begins with "- ", as `connector.template` writes it.

Neither vLLM nor torch is imported: a shard around it takes some 100 MB.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.chunk import CaptureRange, ChunkId
from connector.chunk_file import HEADER_BYTES, ChunkFormat, Damaged, Label, Pieces
from connector.files import name_of, open_files, owner_key
from connector.moves import DEVICE, HOST, PEER, Move, Outcome
from connector.plan import PromptPlan
from connector.port import CHAT_PRIORITY, Engine, EngineDelta
from connector.reason import Reason
from connector.template import PromptTemplate
from deployments.deterministic_lines import LineFailed, SocketLines
from deployments.encode_pace import EncodePace
from deployments.settings import ShardSettings
from deployments.shard import Shard
from deployments.shard_parts import put_together
from sharding.directory import Directory
from sharding.errors import EngineFailed
from sharding.facts import FactStore
from sharding.ids import ShardId
from sharding.lease import Lease
from sharding.sealing import Seal
from sharding.user_memory import UserTable

NAME = "deterministic-no-model"
BYTES_A_TOKEN = 3  # about 25 tokens a fact, as with a real tokenizer
MAX_MODEL_LEN = 32_768
TOKEN_BYTES = 64  # what a chunk's token is taken to need


class DeterministicEngine:
    """Chunks are the tokens that they stand for. `step_s` is what a prefill and each token of an answer take."""

    ranks = 1
    devices: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        chunk_budget_bytes: int,
        *,
        max_model_len: int = MAX_MODEL_LEN,
        token_bytes: int = TOKEN_BYTES,
        step_s: float = 0.0,
        file_key: bytes | None = None,
    ) -> None:
        self.model_digest = hashlib.blake2b(NAME.encode(), digest_size=16, key=file_key or b"").hexdigest()
        self.refusal: str | None = None
        self.max_model_len = max_model_len
        self.token_bytes = token_bytes
        self.block_tokens = 1
        self.dead = False  # for whoever wants to see it die
        self.chunks: dict[ChunkId, tuple[int, ...]] = {}
        self.host: dict[ChunkId, tuple[int, ...]] = {}
        self.counters = {
            "injected_tokens": 0,
            "failed_loads": 0,
            "encode_prefilled_tokens": 0,
        }
        self.lines = SocketLines()
        self._budget_tokens = chunk_budget_bytes // token_bytes
        self._step_s = step_s
        self._format = ChunkFormat(file_key)

    @staticmethod
    def sampling(
        max_tokens: int, stop: Sequence[str] = (), *, schema: Mapping[str, Any] | None = None, **given: Any
    ) -> int:
        """How many tokens the answer may have; nothing else changes it."""
        return max_tokens

    async def generate(
        self, request_id: str, plan: PromptPlan, sampling: int, *, priority: int = CHAT_PRIORITY
    ) -> AsyncGenerator[EngineDelta, None]:
        """The answer in words, one a token. Raises `EngineFailed` once `dead`."""
        injected = self._injected(plan)
        fallback = Reason.MISSING_CHUNK if injected is None else None
        read = (*(injected or ()), *plan.token_ids[len(injected or ()) :])
        loaded = len(injected or ())
        self.counters["injected_tokens"] += loaded
        self.counters["failed_loads"] += injected is None
        words = answer(facts_in(decode(read))).split(" ")
        for place, word in enumerate(words[:sampling]):
            await self._step()
            end = ("stop" if len(words) <= sampling else "length") if place + 1 == min(len(words), sampling) else None
            yield EngineDelta((place,), word if place == 0 else f" {word}", end, loaded, 0, fallback)

    async def encode(
        self, request_id: str, token_ids: Sequence[int], captures: Sequence[CaptureRange], salt: str
    ) -> set[ChunkId]:
        """Keeps the ranges; what the budget has no room for is not among the ids returned. Raises `EngineFailed` once
        `dead`."""
        await self._step()
        held = sum(map(len, self.chunks.values()))
        done: set[ChunkId] = set()
        for range_ in captures:
            held += range_.tokens
            if held <= self._budget_tokens:
                self.chunks[range_.id] = tuple(token_ids[range_.start : range_.start + range_.tokens])
                done.add(range_.id)
        self.counters["encode_prefilled_tokens"] += len(token_ids)
        return done

    async def drop(self, ids: Sequence[ChunkId]) -> None:
        """Forgets chunks. Raises `EngineFailed` once `dead`."""
        await self.check_health()
        for id_ in ids:
            self.chunks.pop(id_, None)
            self.host.pop(id_, None)

    async def move(self, move: Move) -> dict[ChunkId, Outcome]:
        """Between the two memories, files, which hold the tokens, and lines. Raises `EngineFailed` once `dead`."""
        await self._step()
        try:
            if move.target.startswith(PEER):
                return await self._send(move)
            if move.source.startswith(PEER):
                return await self._receive(move)
        except LineFailed:
            await self.check_health()
            return {id_: Outcome.FAILED for id_, _ in move.chunks}
        return {id_: self._move(move, id_, tokens) for id_, tokens in move.chunks}

    async def _send(self, move: Move) -> dict[ChunkId, Outcome]:
        frames = [self._frame(move, id_, tokens) for id_, tokens in move.chunks]
        sizes = [self._frame_bytes(tokens) for _, tokens in move.chunks]
        await self.lines.named(move.target).send(move.hello(0), frames, sizes)
        here = zip(move.chunks, frames, strict=True)
        return {id_: Outcome.MISSING if frame is None else Outcome.DONE for (id_, _), frame in here}

    async def _receive(self, move: Move) -> dict[ChunkId, Outcome]:
        sizes = [self._frame_bytes(tokens) for _, tokens in move.chunks]
        frames = await self.lines.named(move.source).receive(move.hello(0), sizes)
        came = zip(move.chunks, frames, strict=True)
        return {id_: self._move(move, id_, tokens, frame) for (id_, tokens), frame in came}

    def _frame_bytes(self, tokens: int) -> int:
        return HEADER_BYTES + tokens * self.token_bytes

    def _frame(self, move: Move, id_: ChunkId, tokens: int) -> bytes | None:
        """What is sent of a chunk."""
        if (memory := {DEVICE: self.chunks, HOST: self.host}.get(move.source)) is not None:
            held = memory.get(id_)
            if held is None:
                return None
            pieces, head = self._file(move, id_, held)
            data = b"".join(pieces)
            return head() + data
        header, payload = bytearray(HEADER_BYTES), bytearray(tokens * self.token_bytes)
        try:
            name = name_of(move.digest, owner_key(move.owner), id_, 0)
            open_files(move.source).read(name, header, memoryview(payload))
        except (OSError, Damaged):
            return None
        return bytes(header + payload)

    def _file(self, move: Move, id_: ChunkId, held: tuple[int, ...]) -> tuple[Pieces, Callable[[], bytes]]:
        payload = bytearray(np.array(held, np.int64).tobytes().ljust(len(held) * self.token_bytes, b"\0"))
        label = Label(move.digest, 0, move.owner, id_, len(held))
        return self._format.writing(label, 0, memoryview(payload))

    def _move(self, move: Move, id_: ChunkId, tokens: int, frame: bytes | None = None) -> Outcome:
        memory = {DEVICE: self.chunks, HOST: self.host}
        label = Label(move.digest, 0, move.owner, id_, tokens)
        name = name_of(move.digest, owner_key(move.owner), id_, 0)
        try:
            if (source := memory.get(move.source)) is not None:
                if (held := source.get(id_)) is None:
                    return Outcome.MISSING
            else:
                header, payload = bytearray(HEADER_BYTES), bytearray(tokens * self.token_bytes)
                if frame is None:
                    open_files(move.source).read(name, header, memoryview(payload))
                else:
                    header, payload = bytearray(frame[:HEADER_BYTES]), bytearray(frame[HEADER_BYTES:])
                self._format.position_of(header, memoryview(payload), label)
                held = tuple(np.frombuffer(payload, np.int64)[:tokens].tolist())
            if (target := memory.get(move.target)) is not None:
                target[id_] = held
                if source is not None:
                    del source[id_]
                return Outcome.DONE
            open_files(move.target).write(name, *self._file(move, id_, held))
        except FileNotFoundError:
            return Outcome.MISSING
        except Damaged:
            return Outcome.DAMAGED
        except OSError:
            return Outcome.FAILED
        return Outcome.DONE

    async def listen(self, line: str, nccl: bool) -> list[tuple[str, int]]:
        return [self.lines.listen(line)]

    async def dial(self, line: str, doors: Sequence[tuple[str, int]], nccl: bool) -> None:
        await self.lines.dial(line, doors[0])

    async def hang_up(self, line: str) -> None:
        self.lines.hang_up(line)

    async def stats(self) -> list[dict[str, int]]:
        """As one rank."""
        held = self.token_bytes * sum(map(len, self.chunks.values()))
        return [{"chunks": len(self.chunks), "bytes": held, **self.counters}]

    async def check_health(self) -> None:
        """Raises `EngineFailed` once `dead`."""
        if self.dead:
            raise EngineFailed("The engine of this shard has died.")

    def shutdown(self) -> None:
        self.dead = True
        self.lines.close()

    def _injected(self, plan: PromptPlan) -> tuple[int, ...] | None:
        """What the plan's chunks hold, or None where one of them is not here or not as long as it was planned."""
        found = [self.chunks.get(id_, ()) for id_, _ in plan.load]
        if [len(tokens) for tokens in found] != [tokens for _, tokens in plan.load]:
            return None
        return tuple(token for tokens in found for token in tokens)

    async def _step(self) -> None:
        await asyncio.sleep(self._step_s)
        await self.check_health()


class ByteTokenizer:
    """Three bytes of UTF-8 a token, and back; with a chat template of one line a message."""

    chat_template = "one line a message"

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}</>\n" for message in messages) + "<assistant>"

    def encode(self, text: str, **_: Any) -> list[int]:
        data = text.encode(errors="surrogatepass")
        parts = (data[i : i + BYTES_A_TOKEN] for i in range(0, len(data), BYTES_A_TOKEN))
        return [int.from_bytes(b"\x01" + part, "big") for part in parts]  # the leading 1 keeps zeros and lengths


class WordEmbedder:
    """A text is the sum of its words' vectors, which follow from a digest of the word: texts that share words are near
    each other."""

    dim = 64
    model = b"words-64"

    async def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Unit vectors, float32 `[len(texts), dim]`."""
        vectors = np.zeros((len(texts), self.dim), np.float32)
        for place, text in enumerate(texts):
            for word in text.casefold().split():
                digest = hashlib.blake2b(word.encode(errors="replace"), digest_size=self.dim).digest()
                vectors[place] += np.sign(np.frombuffer(digest, np.int8) + 0.5)
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)  # a text without words is no vector
        return vectors

    def close(self) -> None: ...


def decode(token_ids: Sequence[int]) -> str:
    """The text that `ByteTokenizer` made these of."""
    data = b"".join(id_.to_bytes(BYTES_A_TOKEN + 1, "big").partition(b"\x01")[2] for id_ in token_ids)
    return data.decode(errors="surrogatepass")


def facts_in(prompt: str) -> list[str]:
    """The facts that a prompt holds, in its order."""
    return [line.removeprefix("- ") for line in prompt.split("\n") if line.startswith("- ")]


def mark(fact: str) -> str:
    """What the answer says of a fact that was read: 16 hexadecimal digits, of its text with each run of whitespace as
    one space."""
    return hashlib.blake2b(" ".join(fact.split()).encode(errors="surrogatepass"), digest_size=8).hexdigest()


def answer(facts: Sequence[str]) -> str:
    """What the engine says where it was given these facts."""
    return " ".join([f"{len(facts)}", "facts:", *map(mark, facts)])


def open_template(model_path: Path | None = None) -> PromptTemplate:
    """Takes the place of what reads a model's tokenizer; there is none to look at."""
    return PromptTemplate(ByteTokenizer())


async def open_shard(
    settings: ShardSettings,
    me: ShardId,
    directory: Directory,
    store: FactStore,
    lease: Lease,
    *,
    step_s: float = 0.0,
) -> Shard:
    """Takes the place of `deployments.shard_start.open_shard`; `settings` name models that are not looked at."""
    engine: Engine = DeterministicEngine(
        settings.chunk_device_bytes,
        max_model_len=settings.max_model_len or MAX_MODEL_LEN,
        step_s=step_s,
        file_key=Seal(settings.encryption_key).file_key,
    )
    embedder = WordEmbedder()
    table = UserTable(
        me, directory, store, lease, dim=embedder.dim, capacity=settings.resident_users, embedding_model=embedder.model
    )
    pace = EncodePace((MAX_MODEL_LEN, MAX_MODEL_LEN))
    shard = put_together(settings, engine, embedder, open_template(), table, store, directory, pace)
    await shard.warm_up()
    shard.rebuilds.begin()
    return shard
