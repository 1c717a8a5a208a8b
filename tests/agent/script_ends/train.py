"""A script that ends in the way that its first argument names; `record` runs it."""

from __future__ import annotations

import argparse
import atexit
import datetime
import json
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable


class DataError(Exception):
    """One of the script's own."""


class Leaky:
    """Its finalizer fails when the interpreter ends."""

    def __del__(self) -> None:
        raise OSError("cannot close")


def value_error() -> None:
    int("a hundred")


def value_error_twice() -> None:
    try:
        read_row()
    except KeyError as error:
        raise ValueError("row 7 is bad") from error


def value_error_of_a_file() -> None:
    try:
        open("rows.txt").close()
    except OSError as error:
        raise ValueError("no rows") from error


def read_row() -> str:
    return {"text": "x"}["label"]


def own_error() -> None:
    raise DataError("3 rows are bad:\nrow 7: no label\n\nrow 9: no text\nError: see above")


def nested_error() -> None:
    class InnerError(Exception):
        pass

    raise InnerError


def json_error() -> None:
    json.loads("{")


def syntax_error() -> None:
    compile("a b", "config.py", "exec")


def noted_error() -> None:
    error = TypeError("not a tensor")
    error.add_note("Error: raised in layer 3")
    raise error


def group() -> None:
    failures = []
    for each in (value_error, json_error):
        try:
            each()
        except ValueError as error:
            failures.append(error)
    raise ExceptionGroup("2 loaders failed", failures)


def told_traceback() -> None:
    raise RuntimeError("a worker said:\nTraceback (most recent call last):\n  none\nOSError: no")


def no_module() -> None:
    import flash_attn_of_nobody  # noqa: F401


def no_file() -> None:
    open("train.bin").close()


def cuda_oom() -> None:
    import torch

    # As a device raises it; there was none where this was recorded.
    raise torch.cuda.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.15 GiB"
    )


def host_oom() -> None:
    import torch

    torch.empty(2**60)


def shapes() -> None:
    import torch

    torch.ones(2, 3) @ torch.ones(2, 3)


def lost_peer() -> None:
    """Of two ranks the second one ends as they reduce."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        os._exit(7)
    for _ in range(100):
        dist.all_reduce(torch.ones(1))


def error_with_peer() -> None:
    """Of two ranks the second one raises an exception, and the first one waits for it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        progress_bar()
        own_error()
    dist.all_reduce(torch.ones(1))


def no_store() -> None:
    import torch.distributed as dist

    # Nobody listens there.
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_PORT="1")
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))


def no_name() -> None:
    import socket

    socket.getaddrinfo("data.invalid", 443)


def no_service() -> None:
    import urllib.request

    urllib.request.urlopen("http://127.0.0.1:1/train.bin")


def progress_bar() -> None:
    """As tqdm leaves it: without the end of a line."""
    sys.stderr.write("\r 30%|###       | 3/10 [00:00<00:00]")
    sys.stderr.flush()


def error_in_progress() -> None:
    progress_bar()
    value_error()


def error_and_noise() -> None:
    """What is printed while the interpreter ends, after the traceback."""
    global leaky
    leaky = Leaky()
    atexit.register(print, "run-7 is saved", file=sys.stderr)
    atexit.register(value_error)
    atexit.register(warnings.warn, "leaked semaphores", ResourceWarning)
    warnings.simplefilter("always")
    read_row()


def logged_and_went_on() -> None:
    try:
        value_error()
    except ValueError:
        logging.exception("step 3 failed")
    for step in range(4, 7):
        print("step", step, file=sys.stderr)
    sys.exit(1)


def printed_and_went_on() -> None:
    import traceback

    try:
        value_error()
    except ValueError:
        traceback.print_exc()
    for step in range(4, 14):
        print("step", step, file=sys.stderr)
    sys.exit(1)


def thread() -> None:
    thread = threading.Thread(target=value_error_twice)
    thread.start()
    thread.join()
    sys.exit(1)


def child_process() -> None:
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=value_error)
    process.start()
    process.join()
    sys.exit(1)


def pool() -> None:
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1) as executor:
        executor.submit(read_row).result()


def exit_code() -> None:
    sys.exit(7)


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def arguments() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("end")
    parser.add_argument("--lr", type=float)
    parser.parse_args()


def click_arguments() -> None:
    import click

    @click.command()
    @click.argument("end")
    @click.option("--lr", type=float)
    def main(end: str, lr: float) -> None:
        pass

    main()


def run() -> None:
    end: Callable[[], None] = globals()[sys.argv[1]]
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import record

        end = record(end)
    end()


if __name__ == "__main__":
    run()
