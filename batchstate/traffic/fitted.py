"""Traffic like a real hour's, from a seed: nothing to download, and as many requests as you ask for."""

import numpy as np
import numpy.typing as npt

from batchstate.errors import ArgumentError
from batchstate.traffic.workload import Workload

HOUR_REQUESTS = 19_366
"""Requests of the hour that the generator is fitted to."""

HOUR_SECONDS = 3_501.7
"""Seconds between its first request and its last."""

_SHARES = np.array([0, 1, 5, 10, 20, 30, 40, 45, 50, 60, 70, 80, 90, 95, 99, 99.9, 100]) / 100
_CONTEXT = np.array([2, 29, 181, 207, 387, 403, 703, 984, 1020, 1071, 1130, 1315, 2734, 4083, 4142, 6179, 14050])
_LONG_ANSWER = np.array([26, 45, 88, 373, 386, 394, 397, 400, 404, 412, 420, 431, 482, 550, 654, 992, 1000])
_SHORT_ANSWER = np.array([7, 14, 35, 47, 64, 79, 88, 92, 95, 105, 122, 149, 183, 217, 404, 656, 1000])
_LONG_ANSWER_CONTEXTS = (930, 1300)

_FIVE_MINUTES = np.array([1445, 1422, 1557, 1561, 1884, 2239, 2229, 1839, 1701, 1424, 1297, 768])
_FIVE_MINUTE_MARKS = np.minimum(np.arange(13) * 300.0, HOUR_SECONDS)


def fitted_workload(num_requests: int = HOUR_REQUESTS, seed: int = 0) -> Workload:
    """Draws requests that look like one hour of a conversation service.

    Fitted to `AzureLLMInferenceTrace_conv`, 2023-11-16, of the Azure public dataset (CC-BY), described in Patel et al.,
    "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024: 19,366 requests, prompts of 1,020
    tokens in the median and 14,050 at most, answers of 129 in the median, 1,000 at most and 211 on average. How:

    - Prompt lengths are drawn from a table of 17 quantiles of the hour, linear between them.
    - Answer lengths likewise, from one of two tables. Prompts of 930 to 1,300 tokens (35 % of the hour) get long
      answers, around 400 tokens; all others short ones, around 95. These two bounds split the logarithms of the answer
      lengths best. Two tables are needed: within a prompt's band the lengths are nearly independent, overall not.
    - Arrivals are a Poisson process whose rate changes every five minutes as the hour's did. Fewer requests than the
      hour's take proportionally less time, so the load on the engine is the same.

    Args:
        num_requests: how many, at least 1.
        seed: the same seed gives the same requests.

    Raises:
        ArgumentError: fewer than one request, or a negative seed.
    """
    if num_requests < 1 or seed < 0:
        raise ArgumentError(
            f"{num_requests} requests with seed {seed}",
            value=(num_requests, seed),
            remedy="ask for at least 1 request, with a seed of 0 or more",
        )
    rng = np.random.default_rng(seed)
    arrived = np.concatenate([[0], np.cumsum(_FIVE_MINUTES)]) / _FIVE_MINUTES.sum()
    arrival = np.interp(np.sort(rng.random(num_requests)), arrived, _FIVE_MINUTE_MARKS)
    arrival *= num_requests / HOUR_REQUESTS
    context = _draw(rng, _CONTEXT, num_requests)
    lowest, highest = _LONG_ANSWER_CONTEXTS
    long_answer = (lowest <= context) & (context <= highest)
    generated = np.where(long_answer, _draw(rng, _LONG_ANSWER, num_requests), _draw(rng, _SHORT_ANSWER, num_requests))
    return Workload(arrival - arrival[0], context, generated, source=f"fitted hour, seed {seed}")


def _draw(rng: np.random.Generator, quantiles: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    return np.rint(np.interp(rng.random(count), _SHARES, quantiles)).astype(np.int64)
