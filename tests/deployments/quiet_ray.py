"""Imports ray.serve once without the warnings that are its own: they are errors in our tests.

Ray 2.60 passes `update_type` to pydantic's `Field`, which pydantic 2.11 deprecated.
"""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`", category=DeprecationWarning)
    import ray.serve.request_router  # noqa: F401
