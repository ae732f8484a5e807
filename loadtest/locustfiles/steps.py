"""A shape for locust: as many users as `-u`, in five steps.

    cd loadtest/locustfiles; locust -f scenarios.py,steps.py --headless -u 250 -r 50 -t 150s --host URL Single

Each step lasts a fifth of `-t`, which is 30 s where `-t` is not given. It shows where a service has its knee: at which
step requests a second stop growing and latencies begin to.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from locust import LoadTestShape

_STEPS = 5
_STEP_S = 30.0


class Steps(LoadTestShape):
    """A fifth of the users more at each step."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """The users at this moment, or None at the end."""
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        step_s = options.run_time / _STEPS if options.run_time else _STEP_S
        step = int(self.get_run_time() / step_s) + 1
        if step > _STEPS:
            return None
        users = ceil(options.num_users * step / _STEPS)
        return users, options.spawn_rate
