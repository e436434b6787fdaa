"""The ranks of tensor parallelism: how they start, get their steps, and end together.

Rank 0 is the user's process, with the only scheduler and sampler. It starts the others, each a process that runs this
file, or all are started by `torchrun`. Steps travel over gloo. A rank that dies or stalls would leave the others
spinning on their GPUs, so a thread of rank 0 watches, and ends the process with EXIT_LOST; the others end with it.
"""

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

EXIT_LOST = 3  # exit code when a rank died or stalled
STEP_SECONDS = 300.0  # a step takes no longer, even one that compiles kernels
FOREVER = timedelta(days=365)  # the time between two requests has no limit
HEADER = 16  # integers before a step's payload: its length, then what the runner says; all 0 is goodbye


class Ranks:
    """This process's place among `size` ranks: `rank`, and `local_rank` of `local_size` on its host. A rank alone costs
    nothing. Raises ValueError if torchrun started another number of ranks."""

    def __init__(self, size: int = 1):
        if size < 1:
            raise ValueError(f"tensor_parallel_size must be at least 1, got {size}")
        self.joins = size > 1 and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()
        env = os.environ if self.joins else {"RANK": 0, "WORLD_SIZE": size}
        if int(env["WORLD_SIZE"]) != size:
            raise ValueError(f"tensor_parallel_size is {size}, but torchrun started {env['WORLD_SIZE']} ranks")
        self.size, self.rank = size, int(env["RANK"])
        self.local_rank, self.local_size = int(env.get("LOCAL_RANK", self.rank)), int(env.get("LOCAL_WORLD_SIZE", size))
        self.children: list[subprocess.Popen] = []
        self.step_seconds, self.step_began = STEP_SECONDS, None
        self.closed, self._is_starting, self._last_word = threading.Event(), True, threading.Lock()

    @contextmanager
    def started(self, options: dict, device: torch.device):
        """Start the other ranks (unless torchrun has) on LLM(**options), and form the process group. Around the rest of
        the constructor: an error ends all ranks, and names the rank it came from (ChildProcessError)."""
        try:
            if self.size > 1:
                self._start(options, device)
            yield
            self._is_starting = False
        except BaseException as error:
            echo = isinstance(error, (RuntimeError, BrokenPipeError))  # maybe of a death
            time.sleep(0.5 if self.children and echo else 0)
            obituary = self._obituary()
            self.close(in_step=True)
            if echo and obituary:
                raise ChildProcessError(obituary) from error
            raise

    def _start(self, options: dict, device: torch.device) -> None:
        if dist.is_initialized():
            raise ValueError("this process is a rank already: close() the other engine, or use another process")
        if self.joins:
            store, _, _ = next(dist.rendezvous("env://"))
        else:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port of its own
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": self.size,
                   "LOCAL_WORLD_SIZE": self.size, "OMP_NUM_THREADS": max(1, torch.get_num_threads() // self.size)}
            for rank in range(1, self.size):
                own = {name: str(value) for name, value in (env | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                self.children.append(child := subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    env=os.environ | own, start_new_session=True))  # Ctrl-C then reaches rank 0 alone
                child.stdin.write(json.dumps(options) + "\n")
                child.stdin.flush()
        if self.rank == 0:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        store.set(f"rank {self.rank}", "is here")
        while self.children and not store.check([f"rank {rank}" for rank in range(1, self.size)]):
            if obituary := self._obituary():  # the process group would wait for ever
                raise ChildProcessError(obituary)
            time.sleep(0.01)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=self.rank,
                                store=dist.PrefixStore("samebits", store), world_size=self.size, timeout=FOREVER)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values, on every rank."""
        values = torch.tensor([value])
        if self.size > 1:
            dist.all_reduce(values, dist.ReduceOp.MIN)
        return int(values)

    def send(self, numbers: list[int], payload: np.ndarray) -> None:
        """Hand a step to the other ranks: up to HEADER - 1 integers, and an int32 payload."""
        dist.broadcast(torch.tensor([payload.size, *numbers] + [0] * (HEADER - 1 - len(numbers))), 0)
        dist.broadcast(torch.from_numpy(payload), 0)

    def receive(self) -> tuple[list[int], np.ndarray] | None:
        """The next step's integers (padded with 0) and payload; None when rank 0 closed the engine."""
        header = torch.zeros(HEADER, dtype=torch.int64)
        dist.broadcast(header, 0)
        payload = torch.empty(int(header[0]), dtype=torch.int32)
        if not len(payload):
            return None
        dist.broadcast(payload, 0)
        return header.tolist()[1:], payload.numpy()

    def begin(self) -> None:
        """A step begins; its end sets `step_began` to None. RuntimeError if the other ranks are gone."""
        if self.closed.is_set():
            raise RuntimeError("the other ranks have been stopped: make a new engine")
        self.step_began = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """After a step that raised: the ranks no longer agree about what comes next, and there is no way back."""
        if self.size > 1:
            self.closed.wait(1.0 if isinstance(error, Exception) else 0.0)  # if a rank died, the watchdog says so
            self.close(in_step=True)

    def close(self, in_step: bool = False) -> None:
        """End the other ranks. `in_step`: they are in the middle of something, and will not hear a goodbye."""
        if self.size == 1 or self.closed.is_set():
            return
        if self.rank == 0 and torch.cuda.is_initialized():
            self.begin()  # the watchdog looks on
            with suppress(RuntimeError):
                torch.cuda.synchronize()  # what is under way ends while the others live, and never without them
        self.closed.set()
        if self.joins and self.rank == 0 and not in_step:
            with suppress(RuntimeError):
                dist.broadcast(torch.zeros(HEADER, dtype=torch.int64), 0)
        for child in self.children:
            child.kill()
            child.communicate()
        if dist.is_initialized() and not in_step:  # NCCL would wait for what will never come
            dist.destroy_process_group()

    def _obituary(self) -> str | None:
        """What happened to the first of the children that has ended, in its own words if it had any."""
        for rank, child in enumerate(self.children, 1):
            if (code := child.poll()) is not None:
                said = child.stdout.read().strip()
                return f"rank {rank} ended: " + (said or (f"killed by signal {-code}" if code < 0 else f"code {code}"))
        return None

    def _watch(self) -> None:
        while not self.closed.wait(0.1):
            if (began := self.step_began) is not None and time.monotonic() - began > self.step_seconds:
                self._give_up(f"a step has not ended in {self.step_seconds:g} seconds: a rank stalls")
            if any(child.poll() is not None for child in self.children):
                if self._is_starting and self.closed.wait(5.0):
                    return  # the main thread could say it
                self._give_up(self._obituary())

    def _give_up(self, reason: str) -> None:
        with self._last_word:  # not given back: the rest of this process may wait for a GPU that waits for ever
            print(f"error: {reason}; all ranks are stopped", file=sys.stderr, flush=True)
            for child in self.children:
                child.kill()
            os._exit(EXIT_LOST)


def main() -> None:
    """A rank started by rank 0: options on stdin, which ends when rank 0 does; on stdout, why this one ends."""
    options = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    report, _ = os.dup(1), os.dup2(2, 1)  # whatever else prints goes to stderr
    try:
        from engine import LLM

        LLM(**options)
    except BaseException as error:
        os.write(report, f"{type(error).__name__}: {error}".splitlines()[0].encode())
    os._exit(1)


if __name__ == "__main__":
    main()
