"""How KV is made, kept, composed and written into vLLM's cache. Imports neither ray nor fastapi."""
