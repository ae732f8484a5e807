"""When calls are sent: times in seconds from the start, fixed before the first of them, and in order.

An open loop sends at these times whatever the service does, so a service that stalls meets the calls that real callers
would have sent meanwhile. Everything random takes a seeded generator: the same seed gives the same times.
"""

from __future__ import annotations

import random


def constant(rate: float, seconds: float) -> list[float]:
    """One call every 1/rate seconds."""
    return [n / rate for n in range(round(rate * seconds))]


def poisson(rate: float, seconds: float, rng: random.Random) -> list[float]:
    """Callers that know nothing of each other: `rate` a second on average, and as many as chance brings."""
    times: list[float] = []
    at = rng.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += rng.expovariate(rate)
    return times


def burst(size: int, every_s: float, seconds: float) -> list[float]:
    """`size` calls at one instant, again every `every_s` seconds: the steps of a training job."""
    bursts = max(1, round(seconds / every_s))
    return [n * every_s for n in range(bursts) for _ in range(size)]
