"""The package against itself without its checks: a build made of the sources, and what each level adds to a step."""
