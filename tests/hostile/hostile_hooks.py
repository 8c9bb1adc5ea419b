"""User code that does what it must not. Loaded as hooks by `test_hostile_hooks`; each name is a row of its table."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import decimal
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from headrace.hooks import DynamicFilterOutput, Sample

RETURNS, RAISES, BREAKS, HANGS, LEAVES, SCORES = {}, {}, {}, {}, {}, {}


def row(table):
    return lambda function: table.setdefault(function.__name__, function)


async def reward(args, sample):
    if sample.response == "good":
        return 1.0
    if sample.response.startswith("return:"):
        return RETURNS[sample.response[7:]]()
    found = {**RAISES, **BREAKS, **HANGS, **LEAVES, **SCORES}[sample.response]()
    return await found if asyncio.iscoroutine(found) else found


# What is returned and is no reward. Each is made when it is asked for.


class NoFloat:
    def __float__(self):
        raise ValueError("not today")


class Bomb:
    def __float__(self):
        raise SystemExit(9)


async def again():
    return again()


def nested(depth):
    value = 1.0
    for _ in range(depth):
        value = [value]
    return value


RETURNS.update(
    {
        "none": lambda: None,
        "nan": lambda: float("nan"),
        "too_large": lambda: 1e308,
        "text": lambda: "1.0",
        "a_deep_list": lambda: nested(100_000),
        "a_dict_with_numbers_as_names": lambda: {1: 1.0},
        "a_dict_with_a_surrogate": lambda: {"\ud800": 1.0},
        "a_dict_of_100000": lambda: {str(i): 1.0 for i in range(100_000)},
        "a_coroutine": again,
        "a_lock": threading.Lock,
        "an_integer_of_400_digits": lambda: 10**400,
        "an_array_of_two": lambda: np.array([1.0, 2.0]),
        "no_float": NoFloat,
        "the_sample": Sample,
    }
)


# What is returned and is a number all the same.

SCORES.update(
    {
        "a_bool": lambda: True,
        "a_numpy_scalar": lambda: np.float32(1),
        "an_array_of_none": lambda: np.array(1.0),
        "a_decimal": lambda: decimal.Decimal(1),
    }
)


# What is raised.


class Unprintable(Exception):
    def __str__(self):
        raise ValueError("no")

    __repr__ = __str__


class PrintsItselfAway(Exception):
    def __str__(self):
        sys.exit(3)


class Unsendable(Exception):
    def __init__(self):
        super().__init__(threading.Lock())


class OwnBase(BaseException):
    pass


def raising(name, error):
    def hook():
        raise error() if callable(error) else error

    RAISES[name] = hook


raising("value_error", lambda: ValueError("bad tokens"))
raising("unprintable", Unprintable)
raising("prints_itself_away", PrintsItselfAway)
raising("unsendable", Unsendable)
raising("a_surrogate", lambda: ValueError("\ud800\udfff"))
raising("a_message_of_50_MB", lambda: ValueError("x" * 50_000_000))
raising("of_its_own_base", OwnBase)
raising("system_exit", lambda: SystemExit(0))
raising("stop_iteration", StopIteration)
raising("cancelled", asyncio.CancelledError)
RAISES["bomb"] = lambda: float(Bomb())


@row(RAISES)
def recursion():
    return recursion()


@row(RAISES)
async def cancels_itself():
    asyncio.current_task().cancel()
    await asyncio.sleep(0)
    return 1.0


@row(RAISES)
def runs_a_loop():
    return asyncio.run(again())


# What ends, stops or speaks for its process.

BREAKS.update(
    {
        "exit_3": lambda: os._exit(3),
        "segfault": lambda: ctypes.string_at(0),
        "sigkill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60),
        "kills_its_group": lambda: os.killpg(0, signal.SIGKILL),
        "closes_descriptors": lambda: os.closerange(3, 65_536) or asyncio.sleep(60),
    }
)


# What it leaves running.


@row(LEAVES)
def a_sleeping_fork():
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    return 1.0


@row(LEAVES)
def a_daemon():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
    time.sleep(0.05)
    return 1.0


@row(LEAVES)
def a_program_with_nothing_of_ours():
    subprocess.Popen(["/bin/sleep", "600"], start_new_session=True, env={}, close_fds=True)
    return 1.0


@row(LEAVES)
def a_child_that_ignores_signals():
    if os.fork() == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        time.sleep(600)
    return 1.0


# What it does to its process, and the next call must not notice.


@row(SCORES)
async def a_fork_that_comes_back_late():
    if os.fork() == 0:
        await asyncio.sleep(0.05)
    return 1.0


@row(SCORES)
def an_alarm_for_later():
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    return 1.0


@row(SCORES)
def a_thread_that_exits_later():
    threading.Timer(0.05, lambda: os._exit(5)).start()
    return 1.0


@row(SCORES)
def blocks_signals():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    return 1.0


@row(SCORES)
def prints():
    print("1.0", "\ud800")
    os.write(1, b"\xff\x00")
    return 1.0


# What does not end by itself.


@row(HANGS)
def loops():
    while True:
        pass


@row(HANGS)
def stops_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


@row(HANGS)
async def swallows_its_end():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


# Other kinds of hooks. Their names say what they return.


def made(**fields):
    base = {"tokens": [1, 2], "response": "x", "response_length": 1, "rollout_log_probs": [-1.0]}
    sample = Sample(status=Sample.Status.COMPLETED)
    for name, value in {**base, **fields}.items():
        setattr(sample, name, value)
    return sample


GENERATED = {
    "nothing": lambda: None,
    "tokens_of_floats": lambda: made(tokens=np.array([1.0, 2.0])),
    "tokens_beyond_integers": lambda: made(tokens=[1, 10**30]),
    "no_log_probs": lambda: made(rollout_log_probs=None),
    "log_probs_nan": lambda: made(rollout_log_probs=[float("nan")]),
    "mask_of_halves": lambda: made(loss_mask=[0.5]),
    "a_response_with_a_surrogate": lambda: made(response="\ud800"),
    "a_status_of_its_own": lambda: made(status="finished"),
    "metadata_with_a_lock": lambda: made(metadata={"lock": threading.Lock()}),
    "versions_of_text": lambda: made(weight_versions=["latest"]),
    "an_exit": lambda: os._exit(4),
    "an_exception": lambda: 1 / 0,
}


async def generate(args, sample, sampling_params):
    return GENERATED[sample.label]() if sample.label in GENERATED else made()


FILTERED = {
    "nothing": lambda: None,
    "text": lambda: "yes",
    "a_reason_with_a_surrogate": lambda: DynamicFilterOutput(False, "\ud800"),
    "an_exit": lambda: os._exit(4),
    "an_exception": lambda: 1 / 0,
}


def keep(args, samples):
    return FILTERED[samples[0].label]() if samples[0].label in FILTERED else True


CHOSEN = {
    "nothing": lambda buffer: None,
    "too_many": lambda buffer: buffer,
    "the_same_twice": lambda buffer: [buffer[0], buffer[0]],
    "a_stranger": lambda buffer: ["group"],
    "a_group_of_another_place": lambda buffer: [[Sample(group_index=99)]],
    "an_exit": lambda buffer: os._exit(4),
    "an_exception": lambda buffer: 1 / 0,
}


def choose(args, rollout_id, buffer, num_samples):
    how = buffer[0][0].label
    return CHOSEN[how](buffer) if how in CHOSEN else buffer[:1]


def source_of(function):
    class Source:
        def __init__(self, args):
            pass

        def get_samples(self, n):
            return function(n)

    return Source


SourceGood = source_of(lambda n: [Sample(prompt="1 + 1?", label=2)])  # type: ignore[arg-type]
SourceNothing = source_of(lambda n: None)
SourceTooMany = source_of(lambda n: [Sample(prompt="x")] * (n + 1))
SourceLock = source_of(lambda n: [Sample(prompt=threading.Lock())])  # type: ignore[arg-type]
SourceExit = source_of(lambda n: os._exit(4))
SourceRaises = source_of(lambda n: 1 / 0)
SOURCES = ("Nothing", "TooMany", "Lock", "Exit", "Raises")
