"""The checks met real engines: their released classes, watched and fuzzed as they are.

`make peers` sets up an environment with their wheels, without their dependencies, and runs this. `placeholders` stands
for what they import and the classes here do not use.
"""
