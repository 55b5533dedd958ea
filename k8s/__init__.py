"""Manifests, images, and the check of both."""
