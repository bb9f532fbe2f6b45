"""All time limits, in seconds, and what depends on what. What users may change is an argument of `Job` or an option.

Paddle's own, which ours must stay below or above: gloo aborts a collective after 30 s; Paddle's launcher kills its
trainers 30 s after SIGTERM. (process_tree.py, which also runs as a script, has its own limit.)
"""

from __future__ import annotations

GLOO_TIMEOUT = 30.0
PADDLE_GRACE = 30.0

# Starting
JOIN = 30.0  # for all ranks to join a job; PPFLEET_WAIT overrides it
JOIN_CARDS = 120.0  # the same on accelerators: a wheel of 3 GB may come from a network disk
CONNECT = 5.0  # for one attempt to connect to another process
HELLO = 10.0  # for a process that has connected to say who it is
MESSAGE = 10.0  # for one message, once it has begun
JOIN_MARGIN = 10.0  # more than JOIN, after which a start that Paddle blocks is ended from outside of it

# The watchdog
STALL = GLOO_TIMEOUT - 5  # a rank lets others wait in a collective: Job(stall=...)
FIRST_STEP = 300.0  # the same on accelerators until each rank has made a step: they compile and search kernels
STALL_LONG = 1800.0  # no progress where nobody waits in a collective: Job(stall_long=...)
BEAT = 1.0  # between two beats of a rank
BEAT_NEW = 1.5 * BEAT  # a beat that is older may be followed by a newer one: diverged ranks are judged by new ones only
BEAT_FRESH = 3 * BEAT  # a beat that is older says nothing about now
BEAT_LOST = 5 * BEAT  # a process without a beat for so long is taken for gone, post-mortem
DIVERGED = 2.5  # two ranks must have been in different operations for so long to have diverged
UNREACHABLE = 7.0  # a host whose kernel does not answer
RAISE = 2.0  # for the main thread to raise before the watchdog ends the process
END_SILENT = 3.0  # more than RAISE, after which the judge kills a rank of its host that has not heard the verdict
END_FROZEN = 10.0  # more than the judge waits for a silent rank, after which one on another host ends itself
SAVE_AFTER_SIGTERM = PADDLE_GRACE - 5  # for the step and the save that SIGTERM asks for
LEARN_CAUSE = 2.0  # for the watchdog to learn why an operation failed
SAY_WAITING = 10.0  # a wait after which a message says for whom

# Post-mortem (`why`)
WAIT_ALWAYS = 5.0  # a wait that is never called a hang
TOGETHER = 3.0  # ranks of a host that end within so long ended together
KILL_AFTER_SIGTERM = 15.0  # a rank that is killed later was killed by the sender of SIGTERM

# Launching
MACHINES = 120.0  # for the other machines to join a command: --wait
MACHINES_DOCTOR = 15.0  # the same for `doctor`, which tells who is missing
MACHINES_TIPC = 600.0  # the same for the TIPC runner, whose machines may still be training
LAUNCH_GRACE = PADDLE_GRACE + 10  # for Paddle's launcher to end its trainers
LAUNCH_GRACE_LOST = 8.0  # the same where the job has ended on another host anyway
LAST_WORDS = 60.0  # for the other hosts to tell how the job ended there
SCALE_GRACE = LAUNCH_GRACE + 10  # for `launch` under `scale`
TIPC_LITE = 3600.0  # for one TIPC command
TIPC_WHOLE = 30 * 24 * 3600.0  # the same in the modes that train on all of the data
TIPC_GRACE = 10.0  # between SIGTERM and SIGKILL of a TIPC command
DOCTOR_CONNECT = 3.0  # for one connection of `doctor`
DOCTOR_SKEW = 2.0  # a difference between clocks that `doctor` mentions
MEASURE = 20.0  # for one connection while `scale` measures the network
