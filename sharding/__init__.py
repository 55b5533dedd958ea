"""Who owns whom, and what a shard holds: directory, facts, indices. Imports neither ray, vllm nor fastapi."""
