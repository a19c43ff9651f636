"""Real engines, where they are installed: each in a file of its own, imported when it is asked for and not before."""
