"""What a run and a machine that joins it agree on: address and keys, code and settings, seeds and numbers of actors."""

import hashlib
import json
import platform
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from agent.transport import sockets
from agent.transport.ledger import MAX_REMOTE_ACTORS, Ledger
from agent.transport.listener import REFUSALS, Admission, RemoteSettings
from agent.transport.mapped import Counters
from agent.transport.wire import WireError
from launch.config import CONFIG_FILE, RESOLVED_FILE, ROOT, RunFiles, code_version
from launch.plan import MORE_REMOTE_SEEDS, Plan, make_plan, seeds_per_start, unroll_spec
from launch.records import Lines, read_lines
from launch.settings import flatten

KEYS, LEDGER, MEMBERS, MACHINE = "keys", "remote_unrolls", "members.jsonl", "machine.json"
RELAY = "relay"
# Starts of actors that a machine gets seeds for beyond those that it has had; it asks for more in time.
STARTS_AHEAD = 16
MAX_ACTORS = 4096
# Learner ranks that listen each for itself, and the numbers of seeds that each has to give.
MAX_LISTENERS = 64
PART_OF_SEEDS = MORE_REMOTE_SEEDS // MAX_LISTENERS
_ADDRESS = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[\w.*-]+):(?P<port>\d{1,5})")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_OF_NO_ACTOR = ("actor.num_actors", "actor.slots", "actor.inference")


def remote_ring_name(rank: int, task: int) -> str:
    """Of the mapped file with a task's unrolls from other machines, for one learner."""
    return f"remote-{rank}-{task}"


def check_address(flag: str, address: str, encrypted: bool) -> None:
    """ValueError if it is none, or is open to others without keys."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found["port"]) <= 65535:
        raise ValueError(f"{flag} {address} is no address: write tcp://HOST:PORT, such as tcp://0.0.0.0:5555")
    if not encrypted and found["host"] not in _LOOPBACK:
        raise ValueError(
            f"{flag} {address} without keys is for this machine only: use tcp://127.0.0.1:{found['port']}, or keys"
        )


def check_listen(settings: RemoteSettings) -> None:
    """ValueError if nobody can listen there."""
    if not settings.listen:
        return
    check_address("remote.listen", settings.listen, settings.encrypt)
    context = zmq.Context()
    try:
        sockets.listen(context, settings.listen, 1, None, lambda: None)[0].close()
    except zmq.ZMQError as error:
        raise ValueError(f"remote.listen {settings.listen}: {zmq.strerror(error.errno or 0)}; choose another port") from error
    finally:
        context.destroy(linger=0)


def prepare(run_dir: Path, settings: RemoteSettings) -> str:
    """Keys and ledger of a run that listens, made once; returns what a person has to do on the other machines."""
    if not (run_dir / LEDGER).exists():
        Ledger(run_dir / LEDGER, create=True)
    command = f"python launch/actors.py --connect {settings.listen} --actors 8"
    if not settings.encrypt:
        return f"actors in other processes of this machine: {command}"
    keys = run_dir / KEYS
    if not keys.exists():
        sockets.make_keys(keys)
    return (
        f"actors on other machines: copy {keys / sockets.RUN_KEY}.key and {keys / sockets.ACTORS_KEY}.key_secret into a folder "
        f"there, then {command.replace('0.0.0.0', 'HOST').replace('*', 'HOST')} --keys FOLDER"
    )


class Code(NamedTuple):
    """Of this program: digest of the source files that both ends run, and its version for people."""

    digest: str
    version: str


def this_code() -> Code:
    """Read from the files: once per process."""
    digest = hashlib.sha256()
    for path in sorted(path for package in ("agent", "tasks", "launch") for path in (ROOT / package).rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return Code(digest.hexdigest(), code_version())


def agreement(run: RunFiles) -> dict[str, str]:
    """Digests of what actors depend on, by the words for a refusal. Settings of the learner are not among it."""
    config = run.config
    settings = {
        key: value
        for key, value in flatten(config).items()
        if (key.split(".")[0] in ("seed", "environment", "network", "actor") and key not in _OF_NO_ACTOR)
        or key == "remote.window"
    }
    fields = unroll_spec(run.network, config.actor.unroll_length)
    parts = {
        "another task table": [run.suite.to_dict(), list(run.network.legal_actions.items())],
        "another table of fields": [repr(fields), repr(fields.fields())],
        "other settings of actors, environments, network or seed": settings,
    }
    return {words: hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest() for words, part in parts.items()}


def greeting(num_actors: int, starts: int, agreed: Mapping[str, str], code: Code) -> dict[str, Any]:
    """The HELLO of a machine. agreed: what it began with, empty at first. starts: of actors, that it needs seeds for."""
    return {
        "code": code.digest,
        "code_version": code.version,
        "host": platform.node()[:64],
        "actors": num_actors,
        "starts": starts,
        "agreed": dict(agreed),
    }


class Members:
    """Which machines have joined in the life of the run: numbers of their actors, and blocks of seeds that no other has.

    Args:
        run_dir: of the run; MEMBERS is written there before anything in it is given away.
        run: its files.
        part: number of the seeds' part; ranks that were started apart admit machines without asking each other.
    """

    def __init__(self, run_dir: Path, run: RunFiles, part: int = 0) -> None:
        self._run, self._code, self._agreement = run, this_code(), agreement(run)
        self._files = {name: (run_dir / name).read_text(encoding="utf-8") for name in (CONFIG_FILE, RESOLVED_FILE)}
        self._members: dict[int, dict[str, Any]] = {}
        self._blocks: dict[int, list[list[int]]] = {}
        self._actors, self._numbers, self._end = 0, part * PART_OF_SEEDS, (part + 1) * PART_OF_SEEDS
        for line in read_lines(run_dir / MEMBERS):
            self._add(line)
        self._lines = Lines(run_dir / MEMBERS)

    def admit(self, session: int, hello: Mapping[str, Any]) -> Admission | str:
        """Take a machine in, or say why not.

        Raises:
            WireError: this is no greeting.
        """
        actors, starts, agreed = _check_greeting(hello)
        if hello["code"] != self._code.digest:
            return (
                f"this machine runs other code ({hello['code_version']}) than the run ({self._code.version}): "
                "install the same version on both"
            )
        for words, digest in agreed.items():
            if self._agreement.get(words) != digest:
                return f"the run has gone on with {words}: start launch/actors.py again"
        if (refusal := self._register(session, actors, starts, str(hello["host"]))) is not None:
            return refusal
        member = self._members[session]
        answer = {
            "files": self._files,
            "agreement": self._agreement,
            "member": member["member"],
            "first": member["first"],
            "seeds": self._blocks[session],
        }
        return Admission(member["first"], actors, answer)

    def _register(self, session: int, actors: int, starts: int, host: str) -> str | None:
        """Write down a new machine, or more seeds of a known one; the reason if that cannot be."""
        known = self._members.get(session)
        if known is not None and known["actors"] != actors:
            return f"this machine has joined with {known['actors']} actors, not {actors}: start launch/actors.py again"
        line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "session": session}
        if known is None:
            if self._actors + actors > MAX_REMOTE_ACTORS:
                return f"the run has had {self._actors} remote actors, {MAX_REMOTE_ACTORS} are the most: start a new run"
            line |= {"member": len(self._members), "host": host, "actors": actors, "first": self._actors}
        each = seeds_per_start(self._run.config)
        missing = starts - sum(count for _, count in self._blocks.get(session, [])) // each
        if missing > 0:
            if self._numbers + missing * each > self._end:
                return "the run has used up its seeds for actors on other machines: start a new run"
            line["seeds"] = [self._numbers, missing * each]
        if known is None or missing > 0:
            self._lines.write(line)
            self._add(line)
        return None

    def _add(self, line: dict[str, Any]) -> None:
        session = line["session"]
        if "member" in line:
            self._members[session] = line
            self._actors = line["first"] + line["actors"]
        if "seeds" in line:
            self._blocks.setdefault(session, []).append(line["seeds"])
            self._numbers = sum(line["seeds"])


def _check_greeting(hello: Mapping[str, Any]) -> tuple[int, int, dict[str, str]]:
    """Actors, starts and what is agreed; WireError for wrong types or ranges."""
    actors, starts, agreed = hello.get("actors"), hello.get("starts"), hello.get("agreed")
    texts = [hello.get(key) for key in ("code", "code_version", "host")]
    if (
        type(actors) is not int
        or type(starts) is not int
        or not 1 <= actors <= MAX_ACTORS
        or not 1 <= starts <= 2**24
        or not isinstance(agreed, dict)
        or not all(isinstance(text, str) for text in [*texts, *agreed.values()])
    ):
        raise WireError("content", "no greeting")
    return actors, starts, agreed


@dataclass(frozen=True)
class Machine:
    """Stay of a machine with a run: FOLDER/machine.json. `keys` is a folder, or empty; the rest is as in the WELCOME."""

    address: str
    keys: str
    session: int
    first: int
    agreement: dict[str, str]
    seeds: list[list[int]]

    def write(self, folder: Path) -> None:
        """Whole at any time."""
        temporary = folder / f".{MACHINE}.tmp"
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(folder / MACHINE)


def read_machine(folder: Path) -> Machine | None:
    """None: this is the run's own folder."""
    path = folder / MACHINE
    return Machine(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def plan_of(run: RunFiles, machine: Machine | None) -> Plan:
    """The plan of the processes of this machine: the run's own, or one that has joined."""
    plan = make_plan(run)
    if machine is None:
        return plan
    blocks = tuple((first, count) for first, count in machine.seeds)
    return replace(plan, num_ranks=0, services=(*plan.services, RELAY), seed_blocks=blocks)


def as_joined(run: RunFiles, num_actors: int) -> RunFiles:
    """The run's files for a machine that has joined with so many actors."""
    config = run.config
    actor, remote = replace(config.actor, num_actors=num_actors), replace(config.remote, listen="", only=False)
    learner = replace(config.learner, ranks=1)  # all its actors feed one relay
    return run._replace(config=replace(config, actor=actor, remote=remote, learner=learner))


def remote_record(ledger: Ledger, counters: Counters) -> dict[str, Any]:
    """For metrics.jsonl: machines and actors now; unrolls in the life of the run; refused and saved since this start."""
    received, lost, refused = ledger.totals()
    return {
        "machines": counters["machines"],
        "actors": counters["actors"],
        "unrolls_received": received,
        "unrolls_lost": lost,
        "unrolls_refused": refused,
        "saved_bytes": counters["saved_bytes"],
        "refused": {kind: counters[kind] for kind in REFUSALS if counters[kind]},
    }
