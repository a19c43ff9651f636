"""The pytest plugin. `plugin` is loaded in every test run of an environment, so it imports nothing heavy."""
