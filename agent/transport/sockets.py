"""ZeroMQ sockets between machines, encrypted with CURVE, and the key pairs that open them.

A folder of keys holds `NAME.key` (public) and `NAME.key_secret`. The listener accepts whoever has the secret to a public key
that lies in its folder `authorised`; everybody else gets nothing, not even a refusal.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

RUN_KEY, ACTORS_KEY, AUTHORISED = "run", "actors", "authorised"
# Milliseconds. A dead connection is noticed and made anew, also where no packet says so.
_HEARTBEAT, _HEARTBEAT_TIMEOUT, _CONNECT, _RECONNECT, _RECONNECT_MAX = 1000, 5000, 3000, 100, 1000


def make_keys(folder: Path) -> None:
    """A pair for the run and one for its actors, in a new folder that only its owner can read."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    (temporary / AUTHORISED).mkdir(parents=True)
    for name in (RUN_KEY, ACTORS_KEY):
        zmq.auth.create_certificates(temporary, name)
    shutil.copy(temporary / f"{ACTORS_KEY}.key", temporary / AUTHORISED)
    for path in (temporary, *temporary.rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    temporary.replace(folder)


def read_key(path: Path) -> tuple[bytes, bytes | None]:
    """Public and, if the file holds it, secret key.

    Raises:
        ValueError: no such file, or no key in it.
    """
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no key file: copy it from RUN/keys on the learner's machine") from error


class _Authorised:
    """Reads the folder at every connection: keys may be added and removed while a run goes on."""

    def __init__(self, folder: Path, refused: Callable[[], None]) -> None:
        self._folder, self._refused = folder, refused

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether the owner of this public key may connect."""
        for path in self._folder.glob("*.key"):
            try:
                if zmq.auth.load_certificate(path)[0] == key:
                    return True
            except (OSError, ValueError):
                continue
        self._refused()
        return False


def listen(
    context: zmq.Context, address: str, largest_bytes: int, keys: Path | None, refused: Callable[[], None]
) -> tuple[zmq.Socket, ThreadAuthenticator | None]:
    """A ROUTER at `address`, and what guards it; `refused` is called when a key is not accepted, in another thread.

    Raises:
        zmq.ZMQError: the address is taken, or not of this machine.
    """
    guard = None
    socket = _socket(context, zmq.ROUTER, largest_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    if keys is not None:
        guard = ThreadAuthenticator(context)
        guard.start()
        guard.configure_curve_callback("*", _Authorised(keys / AUTHORISED, refused))
        socket.curve_publickey, socket.curve_secretkey = read_key(keys / f"{RUN_KEY}.key_secret")
        socket.curve_server = True
    socket.bind(address)
    return socket, guard


def connect(context: zmq.Context, address: str, largest_bytes: int, keys: Path | None) -> zmq.Socket:
    """A DEALER that connects, again and again if need be."""
    socket = _socket(context, zmq.DEALER, largest_bytes)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT)
    if keys is not None:
        socket.curve_publickey, socket.curve_secretkey = read_key(keys / f"{ACTORS_KEY}.key_secret")
        socket.curve_serverkey = read_key(keys / f"{RUN_KEY}.key")[0]
    socket.connect(address)
    return socket


def _socket(context: zmq.Context, kind: int, largest_bytes: int) -> zmq.Socket:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, largest_bytes)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT)
    return socket
