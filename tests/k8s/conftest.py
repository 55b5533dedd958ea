import tests.deployments.quiet_ray  # noqa: F401  # before anything that imports ray
