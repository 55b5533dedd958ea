"""OpenAI's chat completions as data: what a request may say, and how answers look. No I/O.

Refused with a sentence: everything that would change the answer and that this server cannot do (`n` above 1, tools,
log-probabilities, formats other than text, parts other than text), unless it stands at a value that asks for
nothing. Top-level fields that nobody knows are ignored, as OpenAI-compatible servers do; inside our own `memory`
object they are refused. Next step: `chat_api.py`, the routes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.bodies import as_user_id
from deployments.messages import ChatCall, ChatFinished, ChatStarted, MemoryUse, Mode, Sampling
from sharding.errors import InvalidRequest
from sharding.ids import UserId

JSONObject = dict[str, Any]

MAX_STOPS = 4
INT64 = 1 << 63

ASKS_FOR_NOTHING: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "reasoning_effort": (None, "none"),
    "store": (None, False),
}
"""OpenAI's fields that this server does not act on, each with the values that are therefore fine."""


class ChatMessage(BaseModel):
    """One message; its content is text, or a list of text parts that are joined by line feeds."""

    model_config = ConfigDict(strict=True)

    role: Literal["system", "developer", "user", "assistant"]
    content: str
    tool_calls: Any = None

    @field_validator("content", mode="before")
    @classmethod
    def _text(cls, content: object) -> str:
        return text_of(content)

    @field_validator("tool_calls")
    @classmethod
    def _no_tool_calls(cls, calls: object) -> None:
        if calls:
            raise ValueError("is not supported: this server has no tools")

    def for_template(self) -> dict[str, str]:
        """As chat templates know it: the developer's message is what they call system."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool = False


class MemoryOptions(BaseModel):
    """How this request uses the caller's memory."""

    model_config = ConfigDict(strict=True, extra="forbid")

    top_k: Annotated[int, Field(ge=0)] | None = None
    mode: Mode | None = None
    prefill_nearest: Annotated[int, Field(ge=0)] | None = None


class ChatRequest(BaseModel):
    """The body of POST /v1/chat/completions. What it does not name ends in `model_extra`.

    Where neither `max_tokens` nor `max_completion_tokens` is given, an answer has at most 256 tokens, and fewer where
    the messages leave less of the context (`chat_plan.py`). `min_tokens` is vLLM's: an answer does not end before it.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str
    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: tuple[str, ...] = ()
    seed: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    user_id: str | None = None
    memory: MemoryOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, stop: object) -> object:
        stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(text, str) and text for text in stops):
            raise ValueError("must be a non-empty string or a list of them")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"has more than {MAX_STOPS} strings")
        return tuple(stops)

    def refuse_unsupported(self) -> None:
        """Raises InvalidRequest for a field that asks for what this server cannot do."""
        extra = self.model_extra or {}
        for field, fine in ASKS_FOR_NOTHING.items():
            if field in extra and not any(extra[field] == value for value in fine):
                advice = "only 1 choice is made" if field == "n" else "leave it out"
                raise InvalidRequest(f"'{field}' is not supported with this value; {advice}.", field=field)

    def caller(self, header: str | None) -> UserId | None:
        """Who is asking: `user_id`, then the header x-user-id, `user`, `safety_identifier`. Raises InvalidRequest."""
        named = {
            "user_id": self.user_id,
            "x-user-id": header,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
        }
        return next((as_user_id(value, field) for field, value in named.items() if value is not None), None)

    def to_call(self, request_id: str, user: UserId | None, default_top_k: int, max_top_k: int) -> ChatCall:
        """What goes to the shard (without a placement yet). Raises InvalidRequest."""
        memory = self.memory or MemoryOptions()
        top_k = default_top_k if memory.top_k is None else memory.top_k
        if top_k > max_top_k:
            raise InvalidRequest(f"'memory.top_k' is larger than {max_top_k}.", field="memory.top_k")
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if self.min_tokens and self.min_tokens > (max_tokens or 0):
            raise InvalidRequest("'min_tokens' needs a 'max_tokens' that is not below it.", field="min_tokens")
        sampling = Sampling(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            stop=self.stop,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )
        return ChatCall(
            request_id=request_id,
            placement=None,
            messages=tuple(message.for_template() for message in self.messages),
            sampling=sampling,
            mode="off" if user is None else memory.mode or "inject",
            top_k=top_k,
            user=user,
            prefill_nearest=memory.prefill_nearest,
        )


def text_of(content: object) -> str:
    """The text of a message's content: a string, or OpenAI's list of text parts. Raises ValueError (a predicate)."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ValueError("must be a string or a list of text parts")
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("may have parts of type 'text' only, each with its text")
    return "\n".join(str(text) for text in texts)


def usage(started: ChatStarted, finished: ChatFinished) -> JSONObject:
    """Token counts as OpenAI reports them: what memory injected or a prefix cache held counts as cached."""
    cached = finished.memory.injected_tokens + finished.memory.prefix_cached_tokens
    return {
        "prompt_tokens": started.prompt_tokens,
        "completion_tokens": finished.completion_tokens,
        "total_tokens": started.prompt_tokens + finished.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def memory_object(use: MemoryUse) -> JSONObject:
    """The `memory` object of a response: what the answer took from memory, and the shard's times in seconds."""
    return {
        "mode": use.mode,
        "fact_ids": list(use.fact_ids),
        "memory_tokens": use.memory_tokens,
        "injected_tokens": use.injected_tokens,
        "prefix_cached_tokens": use.prefix_cached_tokens,
        "fallback": use.fallback,
        "left_out": use.left_out,
        "stale_facts": use.stale_facts,
        "timings": {"embed_s": use.embed_s, "search_s": use.search_s, "engine_ttft_s": use.engine_ttft_s},
    }


def model_object(model: str, created: int) -> JSONObject:
    """One entry of GET /v1/models; `created` in seconds since the epoch."""
    return {"id": model, "object": "model", "created": created, "owned_by": "memshard"}
