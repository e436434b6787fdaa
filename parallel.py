"""Tensor parallelism: processes that run one engine in lockstep, each with a GPU and a part of the weights of its own.

Rank 0 is the user's process; it starts the others, on its host, unless torchrun did (on several), and tells them
whatever changes the engine's state. What they gather (kernels/collectives.py) are the same bits everywhere: all
schedule alike, choose the same tokens and need no other exchange. A script that starts ranks needs
`if __name__ == "__main__":`, because they import it; one that torchrun starts ends in `LLM(...)` on all but rank 0."""

import gc
import os
import pickle
import secrets
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process, util

import torch
import torch.distributed as dist
from tqdm import tqdm

from kernels.collectives import Group, SymmetricMemory

TICK_SECONDS, STALL_TICKS = 0.1, 6000  # of one step; the first ones compile


class Ranks:
    """An engine's place: `rank` of `size`, with a `pipe` to rank 0, which has `pipes`. One that is alone does nothing.
    `runner`: its CUDA graphs must go before the `group` that they gather through; `since`: when a step began."""

    def __init__(self, size: int = 1, rank: int = 0, pipe: connection.Connection | None = None):
        self.size, self.rank, self.pipe, self.pipes = size, rank, pipe, []
        self.store = self.group = self.runner = self.since = None
        self.processes, self.far_ends, self.watchers, self.closed = [], [], [], threading.Event()
        if size == 1 or pipe or "LOCAL_WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
            return  # else torchrun gives this process its place
        if (launched := int(os.environ["WORLD_SIZE"])) != size:
            raise ValueError(f"torchrun started {launched} processes: tensor_parallel_size must be as many or 1")
        self.rank, self.store = int(os.environ["RANK"]), next(dist.rendezvous("env://"))[0]
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) if torch.cuda.is_available() else -1)
        if self.rank:
            port, key = self.store.get("samebits").split()
            self.pipe = connection.Client((os.environ["MASTER_ADDR"], int(port)), authkey=key)
        else:
            if self.store.add("engines", 1) > 1:
                raise ValueError("torchrun's ranks ended with this program's first engine")
            key = secrets.token_hex(16)
            with connection.Listener(("", 0), backlog=self.size, authkey=key.encode()) as listener:
                self.store.set("samebits", f"{listener.address[1]} {key}")
                self.pipes = [listener.accept() for _ in range(1, self.size)]

    def start(self, llm, options: dict) -> None:
        """As rank 0, start the others, to make LLM(**options); all end with `llm`. ValueError if GPUs are lacking."""
        if self.rank or self.size == 1:
            return
        first, spawn = llm.device.index, get_context("spawn")
        if not (self.store or first is None) and (count := torch.cuda.device_count() - first) < self.size:
            raise ValueError(f"tensor_parallel_size {self.size} takes as many GPUs; here are {count}")
        for rank in range(1, 1 if self.store else self.size):
            pipe, far_end = spawn.Pipe()
            self.pipes.append(pipe)
            self.far_ends.append(far_end)  # stays open: nobody but `_watch` notices a death
            self.processes.append(spawn.Process(target=run, args=(rank, far_end, first, options), daemon=True))
            self.processes[-1].start()
        self.watchers.append(threading.Thread(target=self._watch, daemon=True))
        self.watchers[0].start()
        util.Finalize(llm, self.close, exitpriority=1)  # at the end of the program: before Python ends its children

    def tell(self, method: str, *args, **options) -> None:
        """Have the other ranks' engines run a method, which must not fail there."""
        self.since = time.monotonic() if method == "step" else self.since
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((method, args, options)))  # tensors by value; `send` would share their memory

    def of_all(self, value) -> list:
        """What each rank says, in rank order. ChildProcessError on rank 0: which other could not start, and why."""
        if self.rank:
            self.pipe.send(value)
            return self.pipe.recv()
        said = [value, *(pipe.recv() for pipe in self.pipes)]
        if failed := [why for why in said if isinstance(why, str)]:
            raise ChildProcessError(failed[0])
        for pipe in self.pipes:
            pipe.send(said)
        return said

    def connect(self, device: torch.device, num_bytes: list[int]) -> SymmetricMemory | Group | None:
        """How to exchange columns with the others, once all have come this far; None for a rank that is alone.
        num_bytes: of each buffer. ValueError if a rank's GPU is of another kind than the rest, and has other bits."""
        if self.size == 1:
            return None
        cuda, launched = device.type == "cuda", self.store
        own = None if self.rank or launched else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        kinds, ports = zip(*self.of_all((cuda and torch.cuda.get_device_name(device), own and own.port)))
        if len({*kinds}) > 1:
            raise ValueError("tensor_parallel_size takes GPUs of one kind: others have other bits")
        self.store = launched or own or dist.TCPStore("127.0.0.1", ports[0], is_master=False)
        one_host = not launched or os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
        usable = cuda and one_host and os.environ.get("SAMEBITS_SYMMETRIC_MEMORY") != "0" and all(
            torch.cuda.can_device_access_peer(device, i) for i in {*range(torch.cuda.device_count())} - {device.index})
        if all(self.of_all(usable)):
            return SymmetricMemory(self.rank, self.size, device, self.store, num_bytes)
        self.group = (dist.ProcessGroupNCCL if cuda else dist.ProcessGroupGloo)(self.store, self.rank, self.size)
        return Group(self.rank, self.size, self.group)

    def follow(self, llm) -> None:
        """As another rank than 0, do what it tells, and end the process with it."""
        if self.rank:
            gc.disable()  # as in `generate`: a rank that looks for garbage makes all wait
        while self.rank:
            try:
                method, args, options = self.pipe.recv()
            except EOFError:
                os._exit(0)
            getattr(llm, method)(*args, **options)

    def close(self, broken: bool = False) -> None:
        """End the other ranks, `broken` if they may be in the middle of a step. There can be no further one."""
        if self.pipes:
            try:
                if broken:
                    time.sleep(0.5)  # if this is but the echo of a death, `_watch` ends the program meanwhile
                if torch.cuda.is_initialized() and not (broken and self.group):
                    self.since = time.monotonic()
                    torch.cuda.synchronize()  # a step may outlive its requests, and takes all ranks
                self.pipes.clear()  # from here on a death is no accident; ranks of torchrun end by this
                if self.runner:
                    self.runner.use_cache(None)
                if self.group:
                    self.group.abort()
            finally:  # on a lost device, too
                self.pipes.clear()
                self.closed.set()
                self.runner = None  # the thread that watches may still have `self`
                for process in self.processes:
                    process.kill()
                # Garbage may be collected on any thread; one that outlives the interpreter would abort it.
                for ending in {*self.processes, *self.watchers} - {threading.current_thread()}:
                    ending.join()

    def _watch(self) -> None:
        """End the program if a rank dies or, so long does a step take, must hang: the others would wait for ever."""
        since, ticks = None, 0  # not a clock's time: this process may have been stopped
        while not self.closed.wait(TICK_SECONDS):
            since, ticks = self.since, ticks + 1 if self.since and self.since == since else 0
            dead = [f"rank {rank} died (exit code {process.exitcode})" for rank, process in enumerate(self.processes, 1)
                    if process.exitcode is not None and self.pipes]  # once these are cleared it is no accident
            if dead or ticks == STALL_TICKS:
                print("error:", *dead[:1] or ["a rank stalled: a step does not end"], file=sys.stderr, flush=True)
                for process in self.processes:
                    process.kill()
                os._exit(1)


def run(rank: int, pipe: connection.Connection, first_gpu: int | None, options: dict) -> None:
    """The process of another rank that rank 0 starts: make the engine, which follows."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # if all were sent it, rank 0 decides
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which would outlive this process
    try:
        torch.cuda.set_device(-1 if first_gpu is None else first_gpu + rank)  # -1: does nothing
        from engine import LLM
        LLM(**options, _ranks=Ranks(options["tensor_parallel_size"], rank, pipe))
    except BaseException as error:
        if not isinstance(error, EOFError):  # which tells that rank 0 gave up
            said = f"rank {rank} failed: {type(error).__name__}: {error}"
            with suppress(OSError):  # rank 0 may be gone
                pipe.send(said)
            time.sleep(5)  # if rank 0 is starting, or fails likewise, it raises an error and ends this process
            print(f"error: {said}", file=sys.stderr, flush=True)
    os._exit(1)
