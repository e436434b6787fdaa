"""The ranks of tensor parallelism: processes that run one engine in lockstep, each with its part of every weight.

Rank 0 is the user's process. It starts the others, and each builds the same `LLM` on a GPU of its own. Whatever changes
the engine's state goes to all of them before rank 0 does it itself (`on_all_ranks`). What they gather are the same bits
everywhere, so all schedule alike and choose the same tokens, and need no other exchange. The ranks are of one host, and
a script that makes such an engine needs Python's `if __name__ == "__main__":` guard, as its children import it."""

import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from multiprocessing import connection, get_context, parent_process
from multiprocessing.util import Finalize

import torch
import torch.distributed as dist
from tqdm import tqdm

LOST = "a step broke off, and the ranks may disagree: make a new LLM"
GRACE = 5.0  # seconds a failed rank waits: if rank 0 has the same error it raises that, and nobody speaks of ranks


def on_all_ranks(method: Callable) -> Callable:
    """A method of `LLM` that every rank runs, with the same arguments and in the same order. It raises the same error
    on all of them, unless rank 0 is interrupted."""

    @wraps(method)
    def run(llm, *args, **kwargs):
        try:
            if llm.ranks.pipes:
                message = pickle.dumps((method.__name__, args, kwargs))
                for pipe in llm.ranks.pipes:
                    pipe.send_bytes(message)
            return method(llm, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                llm.ranks.close(LOST)
            raise

    return run


class Ranks:
    """This process's place: `rank` of `size`. A rank alone costs nothing.

    lost: why no step can run any more, if so
    runner: holder of the CUDA graphs, which must go before the group that they gather through"""

    def __init__(self, size: int = 1, rank: int = 0, port: int = 0, pipe: connection.Connection | None = None):
        self.size, self.rank, self.port, self.pipe = size, rank, port, pipe
        self.lost, self.group, self.runner = "", None, None
        self.pipes, self.processes, self.closed = [], [], threading.Event()

    def start(self, llm, options: dict) -> None:
        """On rank 0: start the others, each to make LLM(**options). They end with `llm`. ValueError if there are fewer
        GPUs, or an op table, which cannot be sent."""
        if self.size == 1 or self.rank:
            return
        first, count = llm.device.index, torch.cuda.device_count()
        if first is not None and first + self.size > count:
            raise ValueError(f"tensor_parallel_size {self.size} needs as many GPUs from {llm.device} on: torch sees "
                             f"{count}")
        if options["ops"]:
            raise ValueError("another op table (ops) takes tensor_parallel_size 1")
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port of its own
        Finalize(llm, self.close, exitpriority=1)  # at the end of the program, before Python ends its children
        spawn, threads = get_context("spawn"), max(1, torch.get_num_threads() // self.size)
        for rank in range(1, self.size):
            ours, theirs = spawn.Pipe()
            gpu = None if first is None else first + rank
            self.pipes.append(ours)
            self.processes.append(spawn.Process(
                target=follow, args=((self.size, rank, self.store.port, theirs), gpu, threads, options), daemon=True))
            self.processes[-1].start()
            theirs.close()

    def connect(self, device: torch.device):
        """The process group to gather through, once all ranks are here; None for a rank alone."""
        if self.size > 1:
            self.least(0)
            if self.rank:
                self.store = dist.TCPStore("127.0.0.1", self.port, is_master=False)
            else:
                threading.Thread(target=watch, args=(self.processes, self.closed), daemon=True).start()
            kind = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
            self.group = kind(self.store, self.rank, self.size)
        return self.group

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. On rank 0 ChildProcessError says which rank could not start, and why."""
        if self.rank:
            self.pipe.send(value)
            return self.pipe.recv()
        for rank, (pipe, process) in enumerate(zip(self.pipes, self.processes), 1):
            try:
                said = pipe.recv()
            except EOFError:
                process.join(GRACE)
                said = f"exit code {process.exitcode}"
            if isinstance(said, str):
                raise ChildProcessError(f"rank {rank} could not start: {said}")
            value = min(value, said)
        for pipe in self.pipes:
            pipe.send(value)
        return value

    def close(self, lost: str = "") -> None:
        """End the other ranks. `lost`: why, if they may be in the middle of a step."""
        self.lost = lost
        if self.processes and not self.closed.is_set():
            if lost and connection.wait([process.sentinel for process in self.processes], 0.5):
                time.sleep(GRACE)  # a rank has died: this is the echo, and `watch` ends the program
            self.closed.set()
            if torch.cuda.is_initialized() and not lost:
                torch.cuda.synchronize()  # a step may outlive its requests, and takes all ranks to end
            if self.runner:
                self.runner.use_cache(None)
            if self.group:
                self.group.abort()
            for process in self.processes:
                process.kill()
                process.join()
            self.pipes.clear()


def watch(processes: list, closed: threading.Event) -> None:
    """A thread of rank 0. Without one of the others it would wait for ever, where no exception reaches it."""
    dead = connection.wait([process.sentinel for process in processes])[0]
    if not closed.is_set():
        rank, process = next((rank, p) for rank, p in enumerate(processes, 1) if p.sentinel == dead)
        process.join()
        print(f"error: rank {rank} died (exit code {process.exitcode}), and all others end with it", file=sys.stderr,
              flush=True)
        for process in processes:
            process.kill()
        os._exit(1)


def follow(place: tuple, gpu: int | None, threads: int, options: dict) -> None:
    """The process of a rank other than 0: make the engine, then do what rank 0 does until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they may have been sent to all; rank 0 decides
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed process would leave behind
    ranks = Ranks(*place)
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)
        from engine import LLM

        llm = LLM(**options, _ranks=ranks)
        while True:
            name, args, kwargs = ranks.pipe.recv()
            try:
                getattr(llm, name)(*args, **kwargs)
            except (ValueError, RuntimeError):
                if ranks.lost:  # in the middle of a step; else rank 0 has raised it, too
                    raise
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
        with suppress(OSError):  # of a pipe that rank 0 has closed
            ranks.pipe.send(said)
            time.sleep(GRACE)
            print(f"error: rank {ranks.rank}: {said}", file=sys.stderr, flush=True)
    os._exit(1)
