"""The cost of batch state, against the ways in which engines keep it today: `python -m benchmarks`.

Each comparison shows first that both ways give equal results, and then times them interleaved in one process. Ratios
hold better than times; both come with their quartiles. Nothing here fails because something was slow.
"""
