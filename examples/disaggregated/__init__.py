"""Prefill in one process, decode in another: KV is written straight into the decode worker's pinned host memory.

No KV is staged on the decode worker's device on its way. Prompts that are short enough are loaded into their hot
buffer when they have arrived; of longer ones the device never has more than the newest tokens. Read it in this order:

    options                 what a run is told
    decode, decode_forward  the decode worker: its turn on the host, its forward on the device
    arrivals                requests on their way into it: leases, grants, retries
    prefill                 the prefill worker
    kv                      KV memory in two tiers, and a rank's share of the heads
    channel, worker         how the two find each other, what has to be alike in both, and the requests
    roles                   what each of them does from its start to its end
    supervisor              both on one machine; a prefill worker that is killed is followed by another
    report, command         the comparison with transformers, and `python -m examples.disaggregated`
"""
