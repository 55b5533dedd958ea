"""Bring-up: settings, composition root, command line, embedded services."""
