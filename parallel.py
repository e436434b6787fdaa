"""Tensor parallelism: processes that run one engine in lockstep, each with a GPU and a part of the weights of its own.

Rank 0 is the user's process; it starts the others, on its host, and tells them whatever changes the engine's state.
What they gather (kernels/collectives.py) are the same bits everywhere: all schedule alike, choose the same tokens and
need no other exchange. A script that starts ranks needs `if __name__ == "__main__":`, because they import it."""

import os
import pickle
import signal
import sys
import threading
import time
from multiprocessing import connection, get_context, parent_process, util

import torch
import torch.distributed as dist
from tqdm import tqdm


class Ranks:
    """An engine's place: `rank` of `size`, with a `pipe` to rank 0, which has `pipes`. One that is alone does nothing.
    `runner`: its CUDA graphs must go before the `group` that they gather through."""

    def __init__(self, size: int = 1, rank: int = 0, pipe: connection.Connection | None = None):
        self.place = self.rank, self.size = rank, size
        self.pipe, self.group, self.runner, self.pipes, self.processes, self.watches = pipe, None, None, [], [], []

    def start(self, llm, options: dict) -> None:
        """Start the others, to make LLM(**options) and to end with `llm`. ValueError if there are no such GPUs."""
        first, count, spawn = llm.device.index, torch.cuda.device_count(), get_context("spawn")
        gpus = [torch.cuda.get_device_name(i) for i in range(count if first is None else first, count)][: self.size]
        if first is not None and (len(gpus) < self.size or len(set(gpus)) > 1):  # another kind has other bits
            raise ValueError(f"tensor_parallel_size {self.size} takes as many GPUs of one kind; here are {gpus}")
        for rank in range(1, self.size):
            pipe, far_end = spawn.Pipe()
            self.pipes.append(pipe)
            process = spawn.Process(target=follow, args=(rank, far_end, first, options), daemon=True)
            self.processes.append(process)
            process.start()
            self.watches.append(threading.Thread(target=self._watch, args=(rank, process, far_end), daemon=True))
            self.watches[-1].start()
        util.Finalize(llm, self.close, exitpriority=1)  # at the end of the program: before Python ends its children

    def tell(self, method: str, *args, **options) -> None:
        """Have the other ranks' engines run a method, which must not fail there."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((method, args, options)))  # tensors by value; `send` would share their memory

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. ChildProcessError on rank 0 says which other could not start, and why."""
        if self.rank:
            self.pipe.send(value)
            return self.pipe.recv()
        for said in [pipe.recv() for pipe in self.pipes]:
            if isinstance(said, str):
                raise ChildProcessError(said)
            value = min(value, said)
        for pipe in self.pipes:
            pipe.send(value)
        return value

    def connect(self, device: torch.device):
        """The process group to gather through, once all ranks have come this far; None for one that is alone."""
        if self.size > 1:
            own = None if self.rank else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = self.least(own.port if own else 1 << 16)
            kind = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
            self.group = kind(own or dist.TCPStore("127.0.0.1", port, is_master=False), self.rank, self.size)
        return self.group

    def close(self, broken: bool = False) -> None:
        """End the other ranks, `broken` if they may be in the middle of a step. There can be no further one."""
        if self.pipes:
            try:
                if broken:
                    time.sleep(0.5)  # if this is but the echo of a death, `_watch` ends the program meanwhile
                elif torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # a step may outlive its requests, and takes all ranks
                self.pipes.clear()  # from here on a death is no accident
                if self.runner:
                    self.runner.use_cache(None)
                    self.group.abort()
            finally:  # on a lost device, too
                self.pipes.clear()
                for process, watch in zip(self.processes, self.watches):
                    process.kill()
                    watch.join()  # it reaps the process; a thread that outlives the interpreter would abort it

    def _watch(self, rank: int, process, far_end: connection.Connection) -> None:
        """End the program with a rank, for which the others would wait. (An open `far_end` lets nobody else notice.)"""
        process.join()
        if self.pipes:
            print(f"error: rank {rank} died (exit code {process.exitcode})", file=sys.stderr, flush=True)
            os._exit(1)


def follow(rank: int, pipe: connection.Connection, first_gpu: int | None, options: dict) -> None:
    """The process of another rank: make the engine, then do as rank 0 tells, and end with it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # if all were sent it, rank 0 decides
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()
    tqdm.set_lock(threading.RLock())  # its own is a semaphore, which would outlive this process
    try:
        torch.cuda.set_device(-1 if first_gpu is None else first_gpu + rank)  # -1: does nothing
        from engine import LLM
        llm = LLM(**options, _ranks=Ranks(options["tensor_parallel_size"], rank, pipe))
        while True:
            method, args, options = pipe.recv()
            getattr(llm, method)(*args, **options)
    except BaseException as error:
        said = f"rank {rank} failed: {type(error).__name__}: {error}"
        if not isinstance(error, EOFError):  # which tells that rank 0 is gone, or does not need this one any more
            pipe.send(said)
            time.sleep(5)  # if rank 0 is starting, or fails likewise, it raises an error and ends this process
            print(f"error: {said}", file=sys.stderr, flush=True)
    os._exit(1)
