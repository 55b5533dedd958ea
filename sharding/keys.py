"""Names of everything Memshard keeps in Redis.

    <ns>:{<user>}:owner:<model>   hash    shard, epoch; tier, bytes, used: `directory.py`, for one served model
    <ns>:{<user>}:facts           hash    fact id -> record       JSON, written by `facts.py` only
    <ns>:{<user>}:order           zset    fact id -> seq          the order in which facts were told
    <ns>:{<user>}:hashes          hash    text hash -> fact id    what the user already has
    <ns>:{<user>}:embeddings      hash    fact id -> the model's fingerprint, float32 bytes
    <ns>:{<user>}:history         hash    <fact id>:<version> -> record of a version that was replaced
    <ns>:{<user>}:turns           hash    turn id -> messages that facts were distilled from
    <ns>:{<user>}:pending         set     ids of turns that are not distilled yet
    <ns>:{<user>}:mentions        hash    fact id -> ids of the turns that tell it, with spaces between
    <ns>:{<user>}:feedback        hash    fact id -> what its reader said of it
    <ns>:{<user>}:event:<id>      string  an add that can be polled, with a TTL
    <ns>:{<user>}:seq             int     last seq given out; outlives deletions
    <ns>:{shards:<model>}         set     ids of shards that may be alive
    <ns>:{shards:<model>}:<id>    string  a shard's last report, with a TTL
    <ns>:{shards:<model>}::beating, ::settling   see `beat.lua`
    <ns>:{shards:<model>}:pages   hash    gateway's id -> its metrics; `pages.py`
    <ns>:{tenant:<tenant>}:…      what the tenant has: see `registry.py` and `limits.py`
    <ns>:{keys:}, <ns>:{limit:…}:… see `api_keys.py` and `limits.py`
    <ns>:{shards:<model>}:verdict:<name>  string  what is known of the model's answers, with a TTL

Where `cluster` is given, its shards are in `{shards:<model>:<cluster>}`: two clusters of one installation share users
and facts, and do not see each other's shards, so each takes over, under a new epoch, whomever the other owns.

The braces are Redis Cluster's hash tag: all keys of one user, and all keys of one model's shards, lie in one
slot, so a Lua script may touch them together. User ids are percent-encoded, so that no id (braces, colons,
control characters, lone surrogates) can leave its tag or meet another's; an encoded id holds no colon, so no
user shares the shards' tag or a tenant's.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from sharding.ids import ShardId, UserId
from sharding.scopes import SEPARATOR

COUNTED = ("requests", "tokens")
"""What limits count, of a tenant (`requests:t:<tenant>`) and of a user (`requests:u:<user>`)."""


@dataclass(frozen=True, slots=True)
class KeySpace:
    """The keys of one installation (`namespace`) serving one `model`, as `cluster` sees them. All may be any text."""

    namespace: str
    model: str
    cluster: str = ""

    def placement(self, user: UserId) -> str:
        """Owner and epoch; the only key of a user that depends on the model."""
        return f"{self._of(user)}:owner:{_escape(self.model)}"

    def facts(self, user: UserId) -> str:
        return f"{self._of(user)}:facts"

    def order(self, user: UserId) -> str:
        return f"{self._of(user)}:order"

    def hashes(self, user: UserId) -> str:
        return f"{self._of(user)}:hashes"

    def embeddings(self, user: UserId) -> str:
        return f"{self._of(user)}:embeddings"

    def history(self, user: UserId) -> str:
        return f"{self._of(user)}:history"

    def turns(self, user: UserId) -> str:
        return f"{self._of(user)}:turns"

    def pending(self, user: UserId) -> str:
        return f"{self._of(user)}:pending"

    def mentions(self, user: UserId) -> str:
        return f"{self._of(user)}:mentions"

    def feedback(self, user: UserId) -> str:
        return f"{self._of(user)}:feedback"

    def event(self, user: UserId, event_id: str) -> str:
        return f"{self._of(user)}:event:{_escape(event_id)}"

    def tenant(self, tenant: str) -> str:
        """What the keys of a tenant's registry begin with."""
        return f"{_escape(self.namespace)}:{{tenant:{_escape(tenant)}}}"

    def of_tenant(self, tenant: str) -> list[str]:
        """Patterns that all keys of a tenant match, those of its users first, and no other's."""
        namespace, users = _escape(self.namespace), _escape(tenant + SEPARATOR)
        patterns = [f"{namespace}:{{{users}*}}:*", f"{self.tenant(tenant)}:*"]
        for what in COUNTED:
            limit = f"{namespace}:{{limit:{_escape(what + ':')}"
            patterns += [f"{limit}{_escape('t:' + tenant)}}}:*", f"{limit}{_escape('u:')}{users}*}}:*"]
        return patterns

    def seq(self, user: UserId) -> str:
        return f"{self._of(user)}:seq"

    def api_keys(self) -> str:
        return f"{_escape(self.namespace)}:{{keys:}}"

    def limit(self, what: str, minute: int) -> str:
        return f"{_escape(self.namespace)}:{{limit:{_escape(what)}}}:{minute}"

    def shards(self) -> str:
        cluster = f":{_escape(self.cluster)}" if self.cluster else ""
        return f"{_escape(self.namespace)}:{{shards:{_escape(self.model)}{cluster}}}"

    def beating(self) -> str:
        """There while any shard beats."""
        return f"{self.shards()}::beating"

    def settling(self) -> str:
        """There for a while after the first heartbeat that follows on none."""
        return f"{self.shards()}::settling"

    def turn(self) -> str:
        """Which shard moves users away; two colons, because a shard may be called anything."""
        return f"{self.shards()}::turn"

    def moves(self) -> str:
        """Who moved lately."""
        return f"{self.shards()}::moves"

    def shard(self, shard: ShardId) -> str:
        return f"{self.shards()}:{_escape(shard)}"

    def pages(self) -> str:
        return self.shards() + ":pages"

    def verdict(self, name: str) -> str:
        return f"{self.shards()}:verdict:{_escape(name)}"

    def user_in(self, key: str) -> UserId:
        """Whose a key is that one of the first pattern matches."""
        return UserId(unquote(key.partition(":{")[2].partition("}")[0], errors="surrogatepass"))

    def _of(self, user: UserId) -> str:
        return f"{_escape(self.namespace)}:{{{_escape(user)}}}"


def _escape(text: str) -> str:
    # surrogatepass: JSON bodies can spell lone surrogates, and a key must not be where that is found out.
    return quote(text, safe="", errors="surrogatepass")
