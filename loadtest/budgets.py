"""What the service may cost and has to hold, on two cores of a virtual machine.

These are goals: a figure that misses one is shown as that, and nothing fails because of it.
"""

#: µs of CPU a call: of the gateway for a call in a request of its own, and in a batch of 64; of all three parties for
#: the queue.
GATEWAY_SINGLE_US = 200.0
GATEWAY_BATCH_US = 30.0
QUEUE_US = 80.0
#: The same of a worker, outside of the jail, and of a client with very many calls at once.
WORKER_US = 500.0
CLIENT_US = 100.0
CLIENT_CONNECTIONS = 16
#: ms of CPU that the walls take beyond a bare fork of the same warm interpreter.
WALLS_MS = 1.0
#: Calls a second through HTTP, by kind of program.
CALLS_PER_S = {"print": 500.0, "numpy": 350.0, "sympy": 150.0}
#: ms that a lone call takes beyond the program's own run time.
ADDED_P50_MS = 8.0
ADDED_P99_MS = 25.0
IN_FLIGHT = 45_000
START_S = 3.0  # of the whole stack, until the first result
PLANNED_MEAN_S = 0.3
