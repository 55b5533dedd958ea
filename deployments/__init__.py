"""The processes: gateway, router, shard replica. Plain classes; `cluster` wraps them with `serve.deployment()`."""
