"""A real run whose actors come from other machines, and those machines. Used by tests/faults.py."""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import runs
from agent.network import Network
from agent.transport.board import Board, num_parameters
from agent.transport.ledger import Ledger
from agent.transport.ring import Ring
from fault_ledger import Books, Oracle, Stay, Unroll, audit_remote, compare_lines, describe
from fault_runs import PATIENCE_SECONDS, Broken, NotRun, Run, numbered
from launch.config import read_run
from launch.plan import LISTENER, make_plan
from launch.remote import LEDGER, RELAY, plan_of, read_machine
from launch.services import open_counters, open_remote_rings


def waiting_in(ring: Ring, check: Any) -> list[Unroll]:
    """Unrolls that nobody has read."""
    found = (ring.spec.views(ring.bytes_of(index).copy()) for index in range(ring.released, ring.committed))
    return [describe(dict(unroll), check) for unroll in found]


class Machine:
    """launch/actors.py, joined.

    Args:
        run: that it joins.
        name: of its folder.
        address: where it finds the run.
        actors: how many.
        prefix: a command that starts the command.
    """

    def __init__(self, run: Run, name: str, address: str, actors: int, prefix: Sequence[str] = ()) -> None:
        self.folder, self._log = run.folder / name, run.folder / f"{name}.txt"
        flags = ["--connect", address, "--actors", str(actors), "--folder", str(self.folder)]
        if (keys := run.run_dir / "keys").exists():
            flags += ["--keys", str(keys)]
        with self._log.open("wb") as log:
            command = [*prefix, *runs.command(*flags, script=runs.ACTORS)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        run.wait(lambda: self.check() and (self.folder / "pids.json").exists())
        files = read_run(self.folder)
        plan = plan_of(files, read_machine(self.folder))
        memory = Path(json.loads((self.folder / "pids.json").read_text(encoding="utf-8"))["memory"])
        self.rings = [Ring(memory / f"ring-{actor.index}", plan.unroll, plan.slots) for actor in plan.actors]
        self.counters = open_counters(memory, RELAY)
        self.board = Board(memory / "board", num_parameters(Network(plan.network)))

    def check(self) -> bool:
        """True; `Broken` if it has ended."""
        if self.process.poll() is not None:
            raise Broken(f"actors.py ended by itself: {' '.join(self._log.read_text(errors='replace').split())[-400:]}")
        return True

    def pids(self) -> dict[str, int | None]:
        """Of its workers by name."""
        return json.loads((self.folder / "pids.json").read_text(encoding="utf-8"))["workers"]

    def actors(self) -> list[int | None]:
        """Process ids of its actors."""
        return [pid for name, pid in self.pids().items() if name.startswith("actor-")]

    def leave(self, check: Any) -> Stay:
        """Ctrl-C; what it was."""
        self.check()
        self.process.send_signal(signal.SIGINT)
        if (code := self.process.wait(PATIENCE_SECONDS)) != 130:
            raise Broken(f"Ctrl-C gave exit code {code} of actors.py: {self._log.read_text(errors='replace')[-400:]}")
        committed, released = sum(ring.committed for ring in self.rings), sum(ring.released for ring in self.rings)
        waiting = [unroll for ring in self.rings for unroll in waiting_in(ring, check)]
        return Stay(committed, released, self.counters["acknowledged"], self.counters["dropped"], waiting)

    def kill(self) -> None:
        """As Run.kill."""
        self.process.kill()
        self.process.wait()
        for role in runs.roles_of(self.folder):
            role.kill()


class RemoteRun(Run):
    """A numbered run without actors of its own; a machine with two joins when it starts.

    Args:
        folder: to work in.
        seed: of the run.
        address: to listen at.
        prefix: of the run's command. machine_prefix: of actors.py.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        address: str,
        prefix: Sequence[str] = (),
        machine_prefix: Sequence[str] = (),
    ) -> None:
        arguments = [*numbered(folder, seed), "--listen", address, "remote.only=true"]
        super().__init__(folder, arguments, Oracle().check, prefix=prefix)
        self.address, self.machines, self.stays = address, list[Machine](), list[Stay]()
        self._machine_prefix = machine_prefix

    def join(self, name: str, address: str, actors: int, prefix: Sequence[str] = ()) -> Machine:
        """A machine joins."""
        self.machines.append(Machine(self, name, address, actors, prefix))
        return self.machines[-1]

    def leave(self, machine: Machine) -> None:
        """It leaves."""
        self.machines.remove(machine)
        self.stays.append(machine.leave(self._check))

    def _populate(self) -> None:
        self.join("first", self.address, 2, self._machine_prefix)

    def _attach(self, memory: Path) -> None:
        super()._attach(memory)
        plan = make_plan(read_run(self.run_dir))
        self.rings = [ring for ranks in open_remote_rings(memory, plan, [0]) for ring in ranks]
        self.counters = open_counters(memory, LISTENER)
        self.ledger = Ledger(self.run_dir / LEDGER)

    def wait(self, what: Callable[[], Any], pause: float = 0.01) -> Any:
        """As Run.wait; `Broken` also if a machine ends."""
        return super().wait(lambda: all(machine.check() for machine in self.machines) and what(), pause)

    def interrupt(self) -> None:
        """Machines leave, then the run ends."""
        for machine in list(self.machines):
            self.leave(machine)
        super().interrupt()

    def end(self) -> None:
        """As Run.end, with what lies in the rings."""
        super().end()
        self.lives[-1].left = [unroll for ring in self.rings for unroll in waiting_in(ring, self._check)]

    def kill(self) -> None:
        """As Run.kill."""
        for machine in self.machines:
            machine.kill()
        super().kill()

    def books(self) -> list[Books]:
        """Of its one life."""
        [life] = self.lives
        books = audit_remote(life, self.stays, self.ledger.totals()[1], self._length)
        return [books + compare_lines(self.lives, runs.lines(self.run_dir / "episodes.jsonl"))]


def free_address() -> str:
    """On this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


class Distance:
    """A TCP relay in a thread of its own: bytes take `seconds` each way, and while `cut` none arrive.

    Args:
        address: where the run listens.
        seconds: may be changed at any time.
    """

    def __init__(self, address: str, seconds: float) -> None:
        self.seconds, self._cut, self._to = seconds, False, address.removeprefix("tcp://").split(":")
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_SECONDS)

    @property
    def address(self) -> str:
        """Where the other end connects."""
        return f"tcp://127.0.0.1:{self._port}"

    def cut(self, cut: bool) -> None:
        """Cut or mend."""
        self._cut = cut

    def close(self) -> None:
        """End the thread; connections break."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", 0))
        self._port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(*self._to)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._carry(reader, other_writer), self._carry(other_reader, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One way: read at once, write when it is time."""
        flying: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)

        async def land() -> None:
            try:
                while True:
                    due, data = await flying.get()
                    await asyncio.sleep(max(0.0, due - self._loop.time()))
                    while self._cut:
                        await asyncio.sleep(0.02)
                    if not data:
                        break
                    writer.write(data)
                    await writer.drain()
            except OSError:
                pass
            writer.close()

        landing = self._loop.create_task(land())
        data = b"-"
        while data:
            try:
                data = await reader.read(2**16)
            except OSError:
                data = b""
            await flying.put((self._loop.time() + self.seconds, data))
        await landing


_numbers = itertools.count()


class Wire:
    """Two network namespaces with a cable. a, b: command prefixes that start a command in them. address_a: of the first."""

    def __init__(self) -> None:
        number = next(_numbers)
        names = [f"faults-{os.getpid()}-{number}{end}" for end in "ab"]
        self._ends = [(name, f"f{os.getpid() % 10**7}{number % 10}{end}") for name, end in zip(names, "ab", strict=True)]
        self.a, self.b = (["ip", "netns", "exec", name] for name in names)
        self.address_a = "10.231.7.1"

    def make(self) -> None:
        """subprocess.CalledProcessError without the right to."""
        (first, plug), (second, socket_) = self._ends
        for name in (first, second):
            ip("netns", "add", name)
        ip("link", "add", plug, "netns", first, "type", "veth", "peer", "name", socket_, "netns", second)
        for number, (name, device) in enumerate(self._ends, 1):
            ip("-n", name, "addr", "add", f"10.231.7.{number}/30", "dev", device)
            for one in ("lo", device):
                ip("-n", name, "link", "set", one, "up")

    def set(self, state: str) -> None:
        """The cable "up" or "down"."""
        ip("-n", self._ends[1][0], "link", "set", self._ends[1][1], state)

    def remove(self) -> None:
        """Both; the cable goes with them."""
        for name, _ in self._ends:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def ip(*words: str) -> None:
    """The command of that name."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_namespaces() -> Iterator[Wire]:
    """`NotRun` where that cannot be."""
    if os.geteuid() != 0:
        raise NotRun("needs root")
    wire = Wire()
    try:
        try:
            wire.make()
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotRun(f"needs root, and the right to make network namespaces ({error})") from error
        yield wire
    finally:
        wire.remove()
