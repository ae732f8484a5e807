"""A shape for locust: the bursts of a training job.

    cd loadtest/locustfiles; locust -f scenarios.py,training.py --headless -u 500 -t 2m -s 60 --host URL Rollout

All users of `-u` start at one instant, as rollouts do at the beginning of a training step, and call for the first half
of `--training-step` seconds. Then the weights are updated and nobody calls, until the next one. It ends after `-t`.
With `-s` users finish what they are in the middle of; without it their calls are cut, and cancelled by the service.
"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from locust import LoadTestShape, events


@events.init_command_line_parser.add_listener
def add_options(parser: ArgumentParser) -> None:
    """The option of this shape."""
    parser.add_argument(
        "--training-step", type=float, default=20.0, help="TrainingSteps: seconds of each step"
    )


class TrainingSteps(LoadTestShape):
    """All users, nobody, all users, and so on."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """The users at this moment, or None at the end."""
        assert self.runner is not None
        options: Any = self.runner.environment.parsed_options
        at_s = self.get_run_time()
        if options.run_time and at_s >= options.run_time:
            return None
        is_rollout = at_s % options.training_step < options.training_step / 2
        return (options.num_users, options.num_users) if is_rollout else (0, options.num_users)
