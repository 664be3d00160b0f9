"""PlaceLock: lets one run at a time save to a storage, by a small file with the owner and a heartbeat. Readers need no lock.

The worker of rank 0 holds the lock. Any other worker of the same launch may take it over at any time, for example if rank 0 died.
A worker of another launch is refused while the owner lives, and takes the lock over once the owner is gone:

    the owner ran on this machine     its process has ended, or its last heartbeat is old (by the monotonic clock of the machine)
    anywhere else                     no heartbeat has come for STALE_S seconds, counted by this worker: clocks are not compared

Hand-written because an object store has no file locks, and because the error must name the owner.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from lockstep.checkpoint.storage import Storage

FILE = "lock.json"
HEARTBEAT_S = 5.0
STALE_S = 30.0
_MAX_BYTES = 4096


@dataclass(frozen=True)
class Owner:
    """The content of the file."""

    launch: str
    """Random, the same on all workers of one launch."""
    run: str
    """The run id of the checkpoints that are written (manifest.py); empty while it is not known."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    process: str = field(default_factory=lambda: _process(os.getpid()))
    """When the process was started: another process may get the same pid later."""
    machine: str = field(default_factory=lambda: _machine())
    """Equal for processes that see each other's pids and have the same monotonic clock; empty if that is not known."""
    since: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    holder: str = field(default_factory=lambda: os.urandom(8).hex())
    """One PlaceLock."""
    beat: int = 0
    beat_at_s: float = field(default_factory=time.monotonic)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @staticmethod
    def parse(content: bytes) -> Owner | None:
        """Returns None if the file holds anything else, for example nothing because its writer was killed."""
        try:
            owner = Owner(**json.loads(content))
        except (ValueError, TypeError, RecursionError):
            return None
        is_sound = all(type(value) is type(getattr(_EXAMPLE, name)) for name, value in asdict(owner).items())
        return owner if is_sound and f"{owner.run}{owner.host}{owner.since}".isprintable() else None

    @property
    def is_here(self) -> bool:
        """Whether the owner ran on this machine, where it can be seen whether its process lives."""
        return bool(self.machine) and self.machine == _machine()

    @property
    def is_gone(self) -> bool:
        """Whether the owner's process has ended, or has been silent for long. False if that cannot be known here."""
        return self.is_here and (self.process != _process(self.pid) or self._age_s > STALE_S)

    @property
    def is_alive(self) -> bool:
        """Whether a heartbeat has come lately. False if that cannot be known here."""
        return self.is_here and not self.is_gone

    @property
    def _age_s(self) -> float:
        return time.monotonic() - self.beat_at_s

    def __str__(self) -> str:
        run = f"run {self.run}, " if self.run else ""
        return f"process {self.pid} on {self.host} ({run}since {self.since})"


_EXAMPLE = Owner("", "", "", 0, "", "", "", "", 0, 0.0)


@dataclass(frozen=True)
class Attempt:
    """What came of an attempt to take the lock. Neither held nor refused: try again in about a second."""

    is_held: bool = False
    refusal: str = ""
    notice: str = ""
    """What the user must know, if the lock was taken over."""


class PlaceLock:
    """The lock of one storage, as one worker sees it. Threads may use it at once.

    Every method but ``release`` raises ``OSError`` if the storage fails. The lock is released at the latest when the interpreter
    exits.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._hold = _Hold(storage)
        self._watched: tuple[bytes, float] = b"", 0.0
        """What was in the file of another machine's owner, and since when."""
        weakref.finalize(self, self._hold.release)

    @property
    def is_held(self) -> bool:
        return self._hold.content is not None

    def try_acquire(self, launch: str, run: str) -> Attempt:
        """Take the lock if it is free, if this launch holds it, or if its owner is gone."""
        with self._hold.mutex:
            content = _read(self._storage)
            if content is not None and content == self._hold.content:
                return Attempt(is_held=True)
            self._hold.content = None
            mine = Owner(launch, run)
            owner = Owner.parse(content) if content is not None else None
            if content is None or (owner is not None and launch and owner.launch == launch):
                return self._take(content, mine)
            if owner is not None and owner.is_here and owner.pid == os.getpid():
                return self._take(content, mine, "was used by another Run of this process, which cannot save any more")
            if owner is not None and owner.is_gone:
                return self._take(content, mine, f"was locked by {owner}, which has ended without releasing it")
            return self._watch(content, owner, mine)

    def _watch(self, content: bytes, owner: Owner | None, mine: Owner) -> Attempt:
        """Refuse if the owner shows that it lives; take the lock over if it has not done so for long enough."""
        before, since_s = self._watched
        who = owner or "a process that did not write its name"
        has_written = Owner.parse(before) is not None and before != content
        if owner is not None and (owner.is_alive or has_written):
            self._watched = b"", 0.0
            return Attempt(refusal=_refusal(self._storage.url, owner))
        if before != content:
            self._watched = content, time.monotonic()
            waits = f"was locked by {who}. Waiting up to {STALE_S:.0f} s for a sign that it still runs"
            return Attempt(notice=self._notice(waits))
        if time.monotonic() - since_s < STALE_S:
            return Attempt()
        return self._take(content, mine, f"was locked by {who}, which has given no sign for {STALE_S:.0f} s. It is taken over")

    def require(self, launch: str, run: str) -> None:
        """Raise ``OSError`` unless this launch has the lock, or can take it now. Called before each publication."""
        attempt = self.try_acquire(launch, run)
        if not attempt.is_held:
            raise OSError(attempt.refusal or f"another run has taken over {self._storage.url}: see {FILE} there")

    def beat(self, run: str | None = None) -> None:
        """Write another heartbeat now, and the id of the run if it is known by now."""
        self._hold.beat(run)

    def release(self) -> None:
        """Let other runs use the storage. Does nothing if this worker does not hold the lock."""
        self._hold.release()

    def _take(self, old: bytes | None, owner: Owner, said: str = "") -> Attempt:
        new = owner.to_json()
        if not self._storage.exchange(FILE, old, new):
            return Attempt()
        self._hold.begin(new)
        self._watched = b"", 0.0
        return Attempt(is_held=True, notice=self._notice(said) if said else "")

    def _notice(self, said: str) -> str:
        return f"the checkpoint place {self._storage.url} {said}."


class _Hold:
    """The lock while it is held, and the thread that sends heartbeats. Does not refer to the PlaceLock, so that it may be freed."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.mutex = threading.Lock()
        self.content: bytes | None = None
        """What this worker last wrote to the file; None if it does not hold the lock."""
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, content: bytes) -> None:
        self.content = content
        if self._thread is None or not self._thread.is_alive():
            self._ended = threading.Event()
            self._thread = threading.Thread(target=self._send, args=(self._ended,), name="lockstep-heartbeat", daemon=True)
            self._thread.start()

    def _send(self, ended: threading.Event) -> None:
        while not ended.wait(HEARTBEAT_S):
            with suppress(Exception):  # a storage may fail for a while; `require` finds out whether the lock was lost
                self.beat()

    def beat(self, run: str | None = None) -> None:
        with self.mutex:
            owner = Owner.parse(self.content) if self.content is not None else None
            if owner is None:
                return
            run = owner.run if run is None else run
            new = replace(owner, run=run, beat=owner.beat + 1, beat_at_s=time.monotonic()).to_json()
            found = _read(self._storage)
            if found in (self.content, None) and self._storage.exchange(FILE, found, new):  # None: somebody has tidied up
                self.content = new

    def release(self) -> None:
        self._ended.set()
        with self.mutex, suppress(Exception):  # the next run sees that this process has ended
            held, self.content = self.content, None
            owner = Owner.parse(held) if held is not None else None
            if owner is not None and owner.pid == os.getpid():  # a child that was forked does not hold the lock
                self._storage.exchange(FILE, held, None)


def _read(storage: Storage) -> bytes | None:
    return storage.read("", FILE, _MAX_BYTES) if storage.exists("", FILE) else None


def _refusal(url: str, owner: Owner) -> str:
    here = f" (here: kill {owner.pid})" if owner.is_here else ""
    return (
        f"the checkpoint place {url} is in use by another run: {owner}. Two runs in one place would resume from each other's "
        f"checkpoints. Wait until it has ended, end it{here}, or pass another folder to checkpoint=."
    )


def _machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process(pid: int) -> str:
    """Return when a process was started, in ticks of the system; empty if it has ended, also if nobody has waited for it yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
