"""From chat messages to token ids, with a place in between where memory goes.

The model's own chat template is rendered once with a marker where the facts belong (at the end of the system message,
behind a preamble) and cut there: what stands before is the head, what stands behind the tail. Facts are tokenised on
their own, one line each, with control tokens switched off, so that a fact can never speak as the system.

Where the caller brings no system message, memory is appended to the one that the template itself puts there, if any:
the model's persona must not change with the first fact that is told.
"""

from __future__ import annotations

import copy
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from sharding.errors import InvalidRequest, StartupError

PREAMBLE = "\n\nWhat you know about the user:\n"

Message = dict[str, str]

HELLO: Message = {"role": "user", "content": "Hello"}


class PromptTemplate:
    """Wraps a transformers tokenizer with a chat template. Raises `StartupError` where the model has none."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The switch for control tokens is inside: with one for each, a prompt can be tokenised beside the event loop.
        self._fact_tokenizer = copy.deepcopy(tokenizer)
        self._fact_lock = threading.Lock()  # the switch is set with each call: two threads must not be inside at once
        if not getattr(tokenizer, "chat_template", None):
            raise StartupError("The model's tokenizer has no chat template; chat cannot be served with it.")
        self._own_system = ""
        try:
            head, tail = self._render_split([HELLO], in_system=True)
            self._in_system = bool(head) and bool(tail)
        except InvalidRequest:
            self._in_system = False  # the template drops or refuses a system message
        if self._in_system:
            self._own_system = self._find_own_system()

    def plain(self, messages: Sequence[Message]) -> list[int]:
        """The prompt without memory. Raises `InvalidRequest` where the template refuses the messages. May run in any
        thread, as `split`."""
        return self._ids(self._render(list(messages)))

    def split(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """Head and tail of the prompt around the memory. Raises `InvalidRequest` where the template refuses."""
        head, tail = self._render_split(messages, in_system=self._in_system)
        return self._ids(head), self._ids(tail)

    def default_head(self) -> list[int]:
        """The head of a conversation that brings no system message: the one that facts are encoded behind."""
        return self.split([HELLO])[0]

    def fact(self, text: str) -> list[int]:
        """One fact as a line of its own; control tokens in it are plain characters. May run in any thread."""
        line = "- " + " ".join(text.split()) + "\n"
        with self._fact_lock:
            return list(self._fact_tokenizer.encode(line, add_special_tokens=False, split_special_tokens=True))

    def answer(self, text: str) -> list[int]:
        """The beginning of an answer, to stand behind a prompt's tail."""
        return self._ids(text)

    def _render_split(self, messages: Sequence[Message], *, in_system: bool) -> tuple[str, str]:
        marker = f"<{secrets.token_hex(16)}>"  # nobody can have written it into a message
        role, fallback = ("system", self._own_system) if in_system else ("user", "")
        copied = [dict(message) for message in messages]
        first = next((m for m in copied if m["role"] == role), None)
        if first is None:
            first = {"role": role, "content": fallback}
            copied.insert(0, first)
        if in_system:
            preamble = PREAMBLE if first["content"] else PREAMBLE.lstrip()
            first["content"] = f"{first['content']}{preamble}{marker}"
        else:
            first["content"] = f"{PREAMBLE.lstrip()}{marker}\n{first['content']}"
        head, *rest = self._render(copied).split(marker)
        if len(rest) != 1:
            raise InvalidRequest(
                "The model's chat template has no place for memory in these messages.", field="messages"
            )
        return head, rest[0]

    def _find_own_system(self) -> str:
        """What the template says as the system where the caller does not, or nothing."""
        marker = secrets.token_hex(16)
        before, _, after = self._render([{"role": "system", "content": marker}, HELLO]).partition(marker)
        plain = self._render([HELLO])
        own = plain[len(before) : len(plain) - len(after)]
        return own if plain == before + own + after else ""

    def _render(self, messages: list[Message]) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            raise InvalidRequest(
                f"The model's chat template refuses these messages: {error}", field="messages"
            ) from error
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))
