"""Entries of native code on disk: damage, other users, other processes, directories that refuse."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest

from fa4_hd256.run import native_cache
from fa4_hd256.run.native_cache import NativeCache, writable_by_others

SOURCE = Path(native_cache.__file__)
NAME, HEADER, PARTS = "entry.o", {"function": "f"}, [b"object" * 1000, b"", b"text"]
SOMEBODY = 12345


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch):
    monkeypatch.setattr(native_cache, "_warned", set())
    monkeypatch.setattr(native_cache, "_swept", set())


@pytest.fixture
def cache(tmp_path):
    return NativeCache(tmp_path / "below" / "cache", "compiled kernels", "SOME_CACHE_DIR")


@contextlib.contextmanager
def quietly():
    """No warning inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def make():
    return HEADER, PARTS


def refuse():
    raise AssertionError("made although it is there")


def files(cache):
    return sorted(path.name for path in cache.directory.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_made_is_found_and_belongs_to_its_owner_alone(cache, umask):
    before = os.umask(umask)
    try:
        with quietly():
            assert cache.obtain(NAME, make) == (HEADER, PARTS, False)
            assert cache.obtain(NAME, refuse) == (HEADER, PARTS, True)
    finally:
        os.umask(before)
    assert files(cache) == [NAME]
    for path in (cache.directory.parent, cache.directory):
        assert path.stat().st_mode & 0o7777 == 0o700
    for path in cache.directory.iterdir():
        assert path.stat().st_mode & 0o7777 == 0o600


def test_an_entry_is_replaced(cache):
    cache.write(NAME, HEADER, PARTS)
    cache.write(NAME, {}, [b"another"])
    assert cache.read(NAME) == ({}, [b"another"]) and files(cache) == [NAME]


# Places: in the digest, the length of the header, the header, a part; from the end: the last byte.
@pytest.mark.parametrize("place", [0, 33, 60, 1000, -1])
def test_a_changed_byte_is_damage(cache, place):
    cache.write(NAME, HEADER, PARTS)
    path = cache.directory / NAME
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with quietly():
        assert cache.obtain(NAME, make) == (HEADER, PARTS, False)
    assert cache.read(NAME) == (HEADER, PARTS)


@pytest.mark.parametrize("kept", [0, 20, 36, 50, 1000, -1])
def test_a_part_of_a_file_is_damage(cache, kept):
    cache.write(NAME, HEADER, PARTS)
    path = cache.directory / NAME
    path.write_bytes(path.read_bytes()[:kept])
    assert cache.read(NAME) is None
    path.write_bytes(b"")
    assert cache.read(NAME) is None


def test_an_entry_under_another_name_is_none(cache):
    cache.write(NAME, HEADER, PARTS)
    (cache.directory / NAME).rename(cache.directory / "other.o")
    assert cache.read("other.o") is None


@pytest.mark.parametrize("kind", ["directory", "fifo", "broken link"])
def test_what_is_no_file_is_no_entry(cache, kind):
    cache.write("another.o", HEADER, PARTS)
    path = cache.directory / NAME
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path, 0o600)
    else:
        path.symlink_to(path.with_name("nothing"))
    assert cache.read(NAME) is None


def status(uid: int, mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, 0, 0, 0, 0, 0))


DIRECTORY, FILE = 0o040000, 0o100000


@pytest.mark.parametrize(
    ("uid", "mode", "reason"),
    [
        (SOMEBODY, DIRECTORY | 0o700, None),
        (0, DIRECTORY | 0o755, None),
        (0, FILE | 0o644, None),
        (SOMEBODY + 1, DIRECTORY | 0o700, "it belongs to user 12346"),
        (SOMEBODY + 1, FILE | 0o644, "it belongs to user 12346"),
        # Somebody's directory, sticky or not, is his.
        (SOMEBODY + 1, DIRECTORY | 0o1777, "it belongs to user 12346"),
        (SOMEBODY, DIRECTORY | 0o775, "its group may write it (mode 0775)"),
        (SOMEBODY, DIRECTORY | 0o2775, "its group may write it (mode 2775)"),
        (SOMEBODY, DIRECTORY | 0o777, "everybody may write it (mode 0777)"),
        (0, DIRECTORY | 0o777, "everybody may write it (mode 0777)"),
        # Modes of /tmp: others cannot replace what is not theirs.
        (0, DIRECTORY | 0o1777, None),
        (SOMEBODY, DIRECTORY | 0o3775, None),
        (SOMEBODY, FILE | 0o664, "its group may write it (mode 0664)"),
        (SOMEBODY, FILE | 0o602, "everybody may write it (mode 0602)"),
        # Means nothing on a file.
        (SOMEBODY, FILE | 0o1666, "everybody may write it (mode 1666)"),
    ],
)
def test_who_could_have_written(monkeypatch, uid, mode, reason):
    monkeypatch.setattr(os, "geteuid", lambda: SOMEBODY)
    assert writable_by_others(status(uid, mode)) == reason


def give_away(path: Path, monkeypatch) -> None:
    """Let it belong to another user, by name only where this is not root."""
    if os.geteuid() == 0:
        try:
            os.chown(path, SOMEBODY, -1)
        except OSError:
            pytest.skip("there is no other user in this container")
    else:
        owner = path.stat().st_uid
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_directory_of_others_is_refused(cache, monkeypatch, how):
    cache.write(NAME, HEADER, PARTS)
    if how == "mode":
        cache.directory.chmod(0o770)
    else:
        give_away(cache.directory, monkeypatch)
    before = files(cache)
    message = "not used: (its group|it belongs).*Set SOME_CACHE_DIR.*of your own.*chmod go-w"
    with pytest.warns(RuntimeWarning, match=message) as warned:
        assert cache.read(NAME) is None
        assert cache.obtain("other.o", make) == (HEADER, PARTS, False)
    assert len(warned) == 1 and "\n" not in str(warned[0].message)
    assert files(cache) == before, "nothing is written to it either"


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_file_of_others_is_refused_and_replaced(cache, monkeypatch, how):
    cache.write(NAME, {}, [b"bad"])
    if how == "mode":
        (cache.directory / NAME).chmod(0o666)
    elif os.geteuid() == 0:
        give_away(cache.directory / NAME, monkeypatch)
    else:
        pytest.skip("another user's file in a directory of one's own takes root")
    with pytest.warns(RuntimeWarning, match=f"{NAME} is not used: .*; delete it"):
        assert cache.obtain(NAME, make) == (HEADER, PARTS, False)
    with quietly():
        assert cache.obtain(NAME, refuse) == (HEADER, PARTS, True)


def test_a_lock_file_that_leads_elsewhere_is_not_followed(cache, tmp_path):
    cache.write("other.o", HEADER, PARTS)
    target = tmp_path / "target"
    (cache.directory / f"{NAME}.lock").symlink_to(target)
    assert cache.obtain(NAME, make) == (HEADER, PARTS, False)
    assert not target.exists()


# ---------------------------------------------------------------- directories that refuse


def without_write_permission(cache, function):
    """Return what `function` returns (text) to a user who may read the cache only."""
    for path in cache.directory.iterdir():
        path.chmod(0o444)
    if os.geteuid() != 0:
        cache.directory.chmod(0o500)
        try:
            return function()
        finally:
            cache.directory.chmod(0o700)
    # Modes do not bind root: a child gives up that.
    cache.directory.chmod(0o755)
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(SOMEBODY)
            os.setuid(SOMEBODY)
        except OSError:
            os._exit(0)
        try:
            text = function()
        except BaseException as error:
            text = repr(error)
        os.write(sending, text.encode())
        os._exit(0)
    os.close(sending)
    with open(receiving, "rb") as pipe:
        text = pipe.read().decode()
    os.waitpid(child, 0)
    if not text:
        pytest.skip("there is no other user in this container")
    return text


def test_a_directory_that_can_only_be_read():
    """Existing entries are used, in silence; others are made, with one warning."""
    with tempfile.TemporaryDirectory() as directory:  # pytest's own is closed to other users
        os.chmod(directory, 0o755)
        cache = NativeCache(Path(directory, "cache"), "compiled kernels", "SOME_CACHE_DIR")
        cache.write(NAME, HEADER, PARTS)

        def attempt():
            with quietly():
                found = cache.obtain(NAME, refuse)
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                made = [cache.obtain(name, make) for name in ("a.o", "b.o")]
            return repr((found, made, [str(w.message) for w in warned], cache.state()))

        found, made, warned, state = eval(without_write_permission(cache, attempt))
        assert found == (HEADER, PARTS, True) and made == [(HEADER, PARTS, False)] * 2
        assert len(warned) == 1
        denied = os.strerror(errno.EACCES)
        message = f"compiled kernels cannot be kept in {cache.directory}: {denied}; they are made "
        assert warned[0].startswith(message)
        assert warned[0].endswith("Set SOME_CACHE_DIR to a directory that can be written")
        assert f"not writable ({denied})" in state
        assert files(cache) == [NAME]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_directory_that_cannot_be_made(tmp_path, below):
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o666)
    cache = NativeCache(tmp_path / "file" / below, "compiled kernels", "SOME_CACHE_DIR")
    with pytest.warns(RuntimeWarning, match="cannot be kept in .*Set SOME_CACHE_DIR") as warned:
        for _ in range(2):
            assert cache.obtain(NAME, make) == (HEADER, PARTS, False)
    assert len(warned) == 1


def fail_with(number):
    def function(*_, **__):
        raise OSError(number, os.strerror(number))

    return function


@contextlib.contextmanager
def files_no_longer_than(size):
    """The kernel's own refusal in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old one"])
@pytest.mark.parametrize("where", ["create", "write", "rename"])
def test_a_full_disk(cache, monkeypatch, where, old):
    """The result is there, a warning, no broken entry, nothing left over."""
    if old:
        cache.write(NAME, {}, [b"old"])
    else:
        cache.write("another.o", {}, [b""])
    before = files(cache)
    limit = contextlib.nullcontext()
    with monkeypatch.context() as patch:
        if where == "create":
            patch.setattr(tempfile, "mkstemp", fail_with(errno.ENOSPC))
        elif where == "write":
            limit = files_no_longer_than(4096)
        else:
            patch.setattr(os, "replace", fail_with(errno.EDQUOT))
        reason = {"create": errno.ENOSPC, "write": errno.EFBIG, "rename": errno.EDQUOT}[where]
        with pytest.warns(RuntimeWarning, match=os.strerror(reason)) as warned, limit:
            for _ in range(2):
                cache.write(NAME, HEADER, PARTS)
    assert len(warned) == 1
    assert files(cache) == before
    assert cache.read(NAME) == (({}, [b"old"]) if old else None)
    cache.write(NAME, HEADER, PARTS)
    assert cache.read(NAME) == (HEADER, PARTS)


def test_an_interrupted_write_leaves_nothing(cache, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    cache.write("another.o", HEADER, PARTS)
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cache.write(NAME, HEADER, PARTS)
    assert files(cache) == ["another.o"]


def test_what_killed_processes_left_goes(cache):
    """At the first write of a process."""
    cache.write(NAME, HEADER, PARTS)
    native_cache._swept.clear()
    recent, old = (f"{NAME}.{age}.tmp" for age in ("recent", "old"))
    for name in (recent, old, "old.lock"):
        (cache.directory / name).write_text("")
    two_days_ago = time.time() - 2 * 86400
    for name in (old, "old.lock", NAME):
        os.utime(cache.directory / name, (two_days_ago, two_days_ago))
    cache.write("another.o", HEADER, PARTS)
    assert sorted(os.listdir(cache.directory)) == ["another.o", NAME, recent]
    (cache.directory / old).write_text("")
    os.utime(cache.directory / old, (two_days_ago, two_days_ago))
    cache.write("a third.o", HEADER, PARTS)
    assert (cache.directory / old).exists()


# ---------------------------------------------------------------- other processes

PROCESS = """
import errno, fcntl, os, sys, time, warnings
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from native_cache import NativeCache
cache = NativeCache(Path(sys.argv[2]), "compiled kernels", "SOME_CACHE_DIR")
warnings.simplefilter("ignore")
if sys.argv[4] == "no locks":
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    fcntl.flock = refuse
def make():
    with open(sys.argv[3], "a") as log:
        log.write("made\\n")
    time.sleep(0.2 * (sys.argv[4] == "locks"))  # long enough for the others to want it, too
    return {"by": os.getpid()}, [os.getpid().to_bytes(4, "little") * (1 << 18)]
sys.stdin.read()  # all start together
def check(header, parts):
    assert parts == [header["by"].to_bytes(4, "little") * (1 << 18)], "torn"
check(*cache.obtain("entry.o", make)[:2])
if sys.argv[4] == "no locks":
    for _ in range(20):
        cache.write("entry.o", *make())
        # Whatever the others do, there is always a whole entry.
        check(*cache.read("entry.o"))
"""


@pytest.mark.parametrize("locks", ["locks", "no locks"])
def test_processes_that_start_together(cache, tmp_path, locks):
    """One of the processes makes the entry with locks; without, nobody ever reads a torn one."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", PROCESS, SOURCE.parent, cache.directory, log, locks]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(5)
    ]
    for process in processes:
        process.stdin.close()
    for process in processes:
        errors = process.stderr.read().decode()
        process.stderr.close()
        assert process.wait() == 0, errors
    if locks == "locks":
        assert log.read_text().count("made") == 1
    assert files(cache) == ["entry.o"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(cache, monkeypatch, number):
    monkeypatch.setattr(fcntl, "flock", fail_with(number))
    with pytest.warns(RuntimeWarning, match="without locks.*on a local disk") as warned:
        assert cache.obtain("a.o", make) == (HEADER, PARTS, False)
        assert cache.obtain("b.o", make) == (HEADER, PARTS, False)
        assert cache.obtain("a.o", refuse) == (HEADER, PARTS, True)
    assert len(warned) == 1
    assert f"no locks ({os.strerror(number)})" in cache.state()


def test_a_child_forked_meanwhile_does_not_keep_the_lock(cache):
    receiving, sending = os.pipe()
    with cache.exclusive(NAME):
        child = os.fork()
        if child == 0:
            os.close(sending)
            os.read(receiving, 1)
            os._exit(0)
        other = os.open(cache.directory / f"{NAME}.lock", os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for file in (other, sending, receiving):
        os.close(file)
    os.waitpid(child, 0)


def test_a_lock_file_that_goes_while_others_wait_for_it(cache):
    """Waiting processes take the lock file that newcomers lock, too."""
    path, waited = cache.directory / f"{NAME}.lock", []

    def wait():
        with cache.exclusive(NAME):
            waited.append(path.exists())

    with cache.exclusive(NAME):
        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)  # by then it waits
        path.unlink()
    thread.join()
    assert waited == [True]


def test_a_lock_in_use_is_not_swept(cache):
    path = cache.directory / f"{NAME}.lock"
    with cache.exclusive(NAME):
        os.utime(path, (1, 1))
    with cache.exclusive(NAME):
        cache.write("another.o", HEADER, PARTS)
        assert path.exists()


def test_an_error_of_the_maker_frees_the_lock(cache):
    def fail():
        raise ValueError("does not compile")

    with pytest.raises(ValueError, match="does not compile"):
        cache.obtain(NAME, fail)
    assert cache.obtain(NAME, make) == (HEADER, PARTS, False)


def test_the_state_for_a_bug_report(cache):
    assert cache.state() == "not there yet"
    cache.write(NAME, HEADER, PARTS)
    owner = os.geteuid()
    assert cache.state() == f"owner {owner}, mode 0700, writable, locks work"
    cache.directory.chmod(0o777)
    assert cache.state().endswith("not used: everybody may write it (mode 0777)")
    assert files(cache) == [NAME]
    shutil.rmtree(cache.directory)
    cache.directory.parent.rmdir()
    cache.directory.parent.write_text("")
    assert cache.state().startswith("cannot be used")
