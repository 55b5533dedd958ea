"""mem0's filters: parsed once, matched against facts, and asked which entities they concern.

    {"user_id": "ada"}    {"AND": […]}    {"OR": […]}    {"NOT": […]}    {"created_at": {"gte": "2026-01-01"}}

Several keys of one object all have to match. Operators: eq ne gt gte lt lte in nin contains icontains; a plain value is
eq, a list is in, "*" is any value at all. Names that no fact has of its own are looked up in its metadata.

Pure. What is refused, in a sentence: unknown operators, operands of the wrong type, filters that are too large. Whether
a filter says whose memories it is about is `anchors`: None means it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from sharding.errors import InvalidRequest
from sharding.fact_records import Fact
from sharding.scopes import FIELDS, Entity

ANY = "*"
MAX_DEPTH = 16
MAX_NODES = 512

TIMES = ("created_at", "updated_at")
_ORDER = {"gt": lambda a, b: a > b, "gte": lambda a, b: a >= b, "lt": lambda a, b: a < b, "lte": lambda a, b: a <= b}
OPERATORS = ("eq", "ne", *_ORDER, "in", "nin", "contains", "icontains")


@dataclass(frozen=True, slots=True)
class Compare:
    """One field against one operand."""

    field: str
    operator: str
    operand: Any


@dataclass(frozen=True, slots=True)
class Combine:
    """All, any or none of `parts`."""

    how: Literal["AND", "OR", "NOT"]
    parts: tuple[Filter, ...]


Filter = Compare | Combine


def parse_filters(raw: object) -> Filter:
    """`raw`, as JSON has it, as a filter. Raises `InvalidRequest`."""
    count = 0

    def parse(part: object, depth: int) -> Filter:
        nonlocal count
        count += 1
        if depth > MAX_DEPTH or count > MAX_NODES:
            raise _refused("is too deep or too large")
        if not isinstance(part, dict):
            raise _refused("must be made of objects")
        parts = [one for key, value in part.items() for one in parse_key(key, value, depth)]
        return parts[0] if len(parts) == 1 else Combine("AND", tuple(parts))

    def parse_key(key: object, value: object, depth: int) -> list[Filter]:
        if key in ("AND", "OR", "NOT"):
            members = value if isinstance(value, list) else [value]
            how: Literal["AND", "OR", "NOT"] = key
            return [Combine(how, tuple(parse(member, depth + 1) for member in members))]
        if key == "metadata" and isinstance(value, dict):
            return [one for name, inner in value.items() for one in _compare(f"metadata.{name}", inner)]
        return _compare(str(key), value)

    return parse(raw, 1)


def matches(filter: Filter, fact: Fact) -> bool:
    """Whether `fact` passes."""
    if isinstance(filter, Compare):
        return _holds(filter, fact)
    some: Callable[..., bool] = all if filter.how == "AND" else any
    found = some(matches(part, fact) for part in filter.parts)
    return not found if filter.how == "NOT" else found


def anchors(filter: Filter) -> frozenset[Entity] | None:
    """Entities of which every matching fact was told under at least one; a name of "*" is any of its kind.

    None where the filter does not say whose memories it is about.
    """
    if isinstance(filter, Compare):
        return _anchors_of_one(filter)
    found = [anchors(part) for part in filter.parts]
    if filter.how == "AND":
        return min((one for one in found if one is not None), key=_width, default=None)
    if filter.how == "OR" and found and None not in found:
        return frozenset().union(*(one for one in found if one is not None))
    return None


def _anchors_of_one(one: Compare) -> frozenset[Entity] | None:
    if (kind := FIELDS.get(one.field)) is None or one.operator not in ("eq", "in"):
        return None
    names = one.operand if one.operator == "in" else [one.operand]
    if not all(isinstance(name, str) for name in names):
        return None
    return frozenset(Entity(kind, name) for name in names)


def _width(entities: frozenset[Entity]) -> tuple[bool, int, int]:
    """Named entities before wildcards, those that own before others, few before many."""
    kinds = list(FIELDS.values())
    return (
        any(entity.name == ANY for entity in entities),
        max((kinds.index(entity.kind) for entity in entities), default=0),
        len(entities),
    )


def _compare(field: str, value: object) -> list[Filter]:
    if isinstance(value, list):
        value = {"in": value}
    if not isinstance(value, dict):
        value = {"eq": value}
    comparisons: list[Filter] = []
    for operator, operand in value.items():
        if operator not in OPERATORS:
            raise _refused(f"has no operator '{str(operator)[:40]}'; there are {', '.join(OPERATORS)}")
        if operator in ("in", "nin") and not isinstance(operand, list):
            raise _refused(f"needs a list for '{operator}'")
        if operator in ("contains", "icontains") and not isinstance(operand, str):
            raise _refused(f"needs a text for '{operator}'")
        comparisons.append(Compare(_canonical(field), operator, operand))
    if not comparisons:
        raise _refused(f"compares '{field[:40]}' with nothing")
    return comparisons


def _canonical(field: str) -> str:
    return {"session_id": "run_id", "memory_ids": "id", "keywords": "memory", "timestamp": "created_at"}.get(
        field, field
    )


def _holds(one: Compare, fact: Fact) -> bool:
    actual, operator, operand = _value(fact, one.field), one.operator, one.operand
    if operator in ("in", "nin"):
        among = any(_equal(one.field, actual, member) for member in operand)
        return among == (operator == "in")
    if operator in ("eq", "ne"):
        return _equal(one.field, actual, operand) == (operator == "eq")
    if operator in ("contains", "icontains"):
        return _contains(actual, operand, fold=operator == "icontains")
    left, right = _comparable(one.field, actual), _comparable(one.field, operand)
    if left is None or type(left) is not type(right):
        return False
    return bool(_ORDER[operator](left, right))


def _value(fact: Fact, field: str) -> Any:
    own: Mapping[str, Any] = {
        "id": fact.id,
        "memory": fact.text,
        "created_at": fact.created_at,
        "updated_at": fact.updated_at,
        "expiration_date": fact.expires_on,
        "role": fact.role,
    }
    if field in FIELDS:
        return fact.scopes.get(field)
    if field in own:
        return own[field]
    return fact.metadata.get(field.removeprefix("metadata."))


def _equal(field: str, actual: Any, operand: Any) -> bool:
    if operand == ANY:
        return actual is not None
    if field in TIMES:
        return _comparable(field, actual) == _comparable(field, operand)
    if isinstance(actual, list) and not isinstance(operand, list):
        return operand in actual
    return bool(actual == operand) and isinstance(actual, bool) == isinstance(operand, bool)


def _contains(actual: Any, operand: str, *, fold: bool) -> bool:
    texts = [actual] if isinstance(actual, str) else actual if isinstance(actual, list) else []
    whole = isinstance(actual, list)
    wanted = operand.casefold() if fold else operand
    for text in texts:
        if isinstance(text, str):
            found = text.casefold() if fold else text
            if wanted == found if whole else wanted in found:
                return True
    return False


def _comparable(field: str, value: Any) -> float | str | None:
    """A number, or a text; times as seconds since 1970, whether they were written as text or as a number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        return float(value) if abs(value) < 1e300 else None
    if not isinstance(value, str):
        return None
    return parse_time(value) if field in TIMES else value


def parse_time(text: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 date or time (UTC where it names no zone), or None."""
    try:
        at = datetime.fromisoformat(text)
        return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None


def _refused(predicate: str) -> InvalidRequest:
    return InvalidRequest(f"'filters' {predicate}.", field="filters")
